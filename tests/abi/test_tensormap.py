"""The tensor map codec against a driver's own descriptors, and against itself over the whole range of every field."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.abi import RecordError
from fusekit.abi.tensormap import DEFINED_BYTES, ENCODER_BITS, TensorMap, decode, encode, rewritten
from fusekit.dtypes import DTYPES

ROWS = json.loads((Path(__file__).parent / "data" / "tensormaps.json").read_text())["rows"]
SWIZZLES = {"none": 256, "32B": 32, "64B": 64, "128B": 128}
PLAIN = TensorMap(0x7F0000001000, "bf16", (264, 1000), (1024,), (64, 64), (1, 1))


def from_row(row):
    address, dtype, dims, strides, box, steps, *modes = row[:-1]
    return TensorMap(address, dtype, tuple(dims), tuple(strides), tuple(box), tuple(steps), *modes)


def test_encodes_and_refuses_as_the_driver():
    for row in ROWS:
        tensor_map, theirs = from_row(row), row[-1]
        if theirs is None:
            with pytest.raises(RecordError, match="tensor map"):
                encode(tensor_map)
        else:
            data = encode(tensor_map)
            assert len(data) == 128
            assert data[:DEFINED_BYTES].hex() == theirs, tensor_map
            assert decode(data) == tensor_map
    assert sum(row[-1] is None for row in ROWS) > 100


def test_other_addresses_dims_and_strides_are_where_the_driver_has_them():
    taken = [row for row in ROWS if row[-1] is not None]
    for row in taken:
        want = from_row(row)
        before = encode(
            dataclasses.replace(want, address=1 << 45, dims=(128,) * want.rank, strides=(1 << 12,) * (want.rank - 1))
        )
        assert rewritten(before, want.address, want.dims, want.strides).hex() == row[-1], want
    assert {len(row[2]) for row in taken} == {2, 3, 4, 5}


@st.composite
def tensor_maps(draw):
    rank = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(["bf16", "fp16", "f32", "i32", "u8", "f64", "u64"]))
    swizzle = draw(st.sampled_from(list(SWIZZLES)))
    interleave = draw(st.sampled_from(["none", "16B", "32B"])) if rank >= 3 else "none"
    atom = 32 if interleave == "32B" else 16
    granule = 16 // DTYPES[dtype].bytes
    widest = min(256, SWIZZLES[swizzle] // DTYPES[dtype].bytes)
    inner = granule * draw(st.integers(1, max(1, widest // granule)))
    return TensorMap(
        address=atom * draw(st.integers(0, 2**57 // atom - 1)),
        dtype=dtype,
        dims=tuple(draw(st.lists(st.integers(1, 2**32), min_size=rank, max_size=rank))),
        strides=tuple(atom * draw(st.integers(0, 2**40 // atom - 1)) for _ in range(rank - 1)),
        box=(inner, *(draw(st.integers(1, 4)) for _ in range(rank - 1))),
        element_strides=tuple(draw(st.integers(1, 8)) for _ in range(rank)),
        interleave=interleave,
        swizzle=swizzle,
        l2_promotion=draw(st.sampled_from(["none", "64B", "128B", "256B"])),
        oob_fill=draw(st.sampled_from(["none", "nan_zero"])) if dtype in ("bf16", "fp16", "f32", "f64") else "none",
    )


@given(tensor_maps())
def test_decode_inverts_encode(tensor_map):
    assert decode(encode(tensor_map)) == tensor_map


def test_every_combination_of_modes_is_distinct():
    seen = {}
    for rank, swizzle, dtype, promotion in itertools.product(
        range(1, 6), SWIZZLES, ("bf16", "fp16", "f32", "i32", "u8"), ("none", "64B", "128B", "256B")
    ):
        box = (16 // DTYPES[dtype].bytes, *(1,) * (rank - 1))
        tensor_map = TensorMap(
            4096, dtype, (7,) * rank, (16,) * (rank - 1), box, (1,) * rank, "none", swizzle, promotion
        )
        data = encode(tensor_map)
        assert data not in seen, (tensor_map, seen.get(data))
        seen[data] = tensor_map
        assert decode(data) == tensor_map


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"address": 8}, "address"),
        ({"address": 2**57}, "address"),
        ({"dims": (0, 1)}, r"dims\[0\]"),
        ({"dims": (1, 2**32 + 1)}, r"dims\[1\]"),
        ({"strides": (2**40,)}, r"strides\[0\]"),
        ({"strides": (24,)}, r"strides\[0\]"),
        ({"strides": ()}, "strides"),
        ({"box": (257, 1)}, r"box\[0\]"),
        ({"box": (64, 0)}, r"box\[1\]"),
        ({"box": (4, 1)}, r"box\[0\]"),
        ({"box": (64, 64), "swizzle": "64B"}, r"box\[0\]"),
        ({"element_strides": (1, 9)}, r"element_strides\[1\]"),
        ({"swizzle": "16B"}, "swizzle"),
        ({"interleave": "16B"}, "rank"),
        ({"dtype": "i32", "box": (32, 8), "oob_fill": "nan_zero"}, "oob_fill"),
        ({"dtype": "e4m3"}, "dtype"),
        ({"dims": (1,) * 6, "strides": (16,) * 5, "box": (8,) * 6, "element_strides": (1,) * 6}, "rank"),
    ],
)
def test_a_refusal_names_the_field(change, field):
    with pytest.raises(RecordError, match=f"tensor map {field}: .*; it must be"):
        encode(dataclasses.replace(PLAIN, **change))


def test_no_bit_is_ignored():
    """Flipping any bit behind the address either changes a field or makes `decode` refuse."""
    for bit in range(64, 512):
        data = bytearray(encode(PLAIN))
        data[bit // 8] ^= 1 << bit % 8
        if bit < 96 and 1 << bit - 64 & ENCODER_BITS:
            assert decode(bytes(data)) == PLAIN, bit
            continue
        try:
            assert decode(bytes(data)) != PLAIN, bit
        except RecordError as error:
            assert "tensor map" in str(error), bit


def test_half_a_descriptor_is_refused():
    with pytest.raises(RecordError, match="63 bytes"):
        decode(bytes(63))


@pytest.mark.parametrize(
    ("dtype", "box", "word"),
    # Word 2 as the DSL's host code makes it for sm_100a, without the encoder's own bits.
    [("f32", 32, 0x40390), ("tf32", 32, 0x50390), ("u4_align8", 128, 0x40590), ("u4_align16", 128, 0x40610),
     ("u6_align16", 128, 0x40690)],
)  # fmt: skip
def test_types_narrower_than_a_byte_and_tf32(dtype, box, word):
    tensor_map = TensorMap(4096, dtype, (256, 7), (128,), (box, 4), (1, 1), l2_promotion="128B")
    data = encode(tensor_map)
    assert int.from_bytes(data[8:12], "little") == word
    assert decode(data) == tensor_map


@pytest.mark.parametrize(
    ("change", "field"),
    [({"box": (64, 4)}, r"box\[0\]"), ({"dims": (192, 7)}, r"dims\[0\]"), ({"address": 4112}, "address"),
     ({"strides": (144,)}, r"strides\[0\]"), ({"dtype": "u4_align8", "dims": (255, 7)}, r"dims\[0\]")],
)  # fmt: skip
def test_rules_of_types_narrower_than_a_byte(change, field):
    tensor_map = TensorMap(4096, "u4_align16", (256, 7), (128,), (128, 4), (1, 1))
    with pytest.raises(RecordError, match=f"tensor map {field}: .*; it must be"):
        encode(dataclasses.replace(tensor_map, **change))
