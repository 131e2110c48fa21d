"""The 128 bytes of a tensor map (CUtensorMap), in plain Python: `encode` and its inverse `decode`.

The driver calls the descriptor opaque. This layout, valid for compute capability 9.0, was found by varying one argument
of cuTensorMapEncodeTiled at a time; tests/gpu/test_tensormap_driver.py compares it with the driver at hand, and
tests/abi/data/tensormaps.json holds descriptors that a driver made. A launcher lets the driver encode. This
serves the build-time proof, and passes that follow the tokens: they change a map's address, dims and strides in place
if the driver at hand has them where `rewritten` puts them.

====== ========= ==================================================================
word   bits      content (little-endian 32-bit words; a word not listed is 0)
====== ========= ==================================================================
0, 1   all       global address
2      4-6       rank - 1
2      7-10      element type
2      11-12     interleave
2      13-14     swizzle
2      15        out-of-bounds fill: NaN
2      16        round float32 to TF32
2      17-18     L2 promotion
3-6    all       strides of dims 1-4: bits 4-35 of the bytes
7      4i..4i+3  bits 36-39 of the stride of dim i + 1
8-12   all       dims - 1
13     3i..3i+2  element stride of dim i, - 1
13     24-31     box extent of dim 0, - 1
14     8i..8i+7  box extent of dim i + 1, - 1
====== ========= ==================================================================

Bits 1 and 21 of word 2 carry none of the arguments: the DSL's encoder sets them, driver 580 does not. Only the first 64
bytes describe the tensor; the rest is the encoder's own scratch and is not compared.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from fusekit.abi.expr import RecordError
from fusekit.abi.parameters import (
    INTERLEAVES,
    L2_PROMOTIONS,
    OOB_FILLS,
    SWIZZLE_BYTES,
    TENSOR_MAP_BYTES,
)
from fusekit.dtypes import DTYPES, FLOAT, MAPS, by

DEFINED_BYTES = 64
ADDRESS_AT, STRIDES_AT, DIMS_AT = 0, 12, 32  # bytes; a stride without its lowest 4 bits, a dim less 1
ENCODER_BITS = 1 << 1 | 1 << 21  # of word 2
MAX_RANK = 5

_TYPES = by("map_code", MAPS)
_TYPE_CODES = {name: code for code, name in _TYPES.items()}
_TYPE_MASK = 0xF | 1 << 9  # bits 7-10 of word 2, and bit 16 for TF32
_PADDED = ("u4_align16", "u6_align16")  # 16 elements take 16 bytes of shared memory
_SWIZZLES = tuple(SWIZZLE_BYTES)
_WORDS = struct.Struct("<16I")
# Every bit that some field of a descriptor may use; any other one makes `decode` refuse.
_KNOWN_WORD_2 = 0x7 << 4 | _TYPE_MASK << 7 | 0x3 << 11 | 0x3 << 13 | 1 << 15 | 0x3 << 17 | ENCODER_BITS


@dataclass(frozen=True, slots=True)
class TensorMap:
    """The arguments of cuTensorMapEncodeTiled.

    `address` in bytes; `dims`, `box` and `element_strides` in elements, innermost first; `strides` in bytes, of dims 1
    and up (one fewer than dims). The names of dtype, interleave, swizzle, promotion and fill are those of the launch
    record.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: str = "none"
    swizzle: str = "none"
    l2_promotion: str = "none"
    oob_fill: str = "none"

    @property
    def rank(self) -> int:
        return len(self.dims)

    def fields(self) -> dict[str, int | str]:
        """Every field by the name that a message gives it: ``address``, ``dims[0]``, ``box[1]``, ``swizzle``, ..."""
        flat: dict[str, int | str] = {"rank": self.rank, "address": self.address, "dtype": self.dtype}
        for name in ("dims", "strides", "box", "element_strides"):
            flat |= {f"{name}[{index}]": value for index, value in enumerate(getattr(self, name))}
        for name in ("interleave", "swizzle", "l2_promotion", "oob_fill"):
            flat[name] = getattr(self, name)
        return flat

    def check(self) -> None:
        """Raises RecordError, naming the field, for what cuTensorMapEncodeTiled refuses.

        It also refuses most boxes larger than a block's shared memory, which a descriptor does not show.
        """
        self._check_modes()
        padded = self.dtype in _PADDED
        atom = 32 if self.interleave == "32B" or padded else 16
        if padded:
            _require(self.box[0] == 128, "box[0]", self.box[0], f"128 for {self.dtype}")
        whole = 128 if padded else 2 if self.dtype == "u4_align8" else 1
        _require(self.dims[0] % whole == 0, "dims[0]", self.dims[0], f"a multiple of {whole} for {self.dtype}")
        rule = f"a multiple of {atom}, below 2**57"
        _require(self.address % atom == 0 and 0 <= self.address < 2**57, "address", self.address, rule)
        for index, dim in enumerate(self.dims):
            _require(1 <= dim <= 2**32, f"dims[{index}]", dim, "1 to 2**32")
        for index, stride in enumerate(self.strides):
            rule = f"a multiple of {atom} bytes, below 2**40"
            _require(stride % atom == 0 and 0 <= stride < 2**40, f"strides[{index}]", stride, rule)
        for index, extent in enumerate(self.box):
            _require(1 <= extent <= 256, f"box[{index}]", extent, "1 to 256")
        for index, step in enumerate(self.element_strides):
            _require(1 <= step <= 8, f"element_strides[{index}]", step, "1 to 8")
        inner = self.box[0] * DTYPES[self.dtype].bits / 8
        if self.interleave == "none":
            _require(inner % 16 == 0, "box[0]", self.box[0], f"a multiple of 16 bytes ({inner:g} bytes are not)")
        width = SWIZZLE_BYTES[self.swizzle]
        if width and self.interleave == "none":
            _require(inner <= width, "box[0]", self.box[0], f"at most {width} bytes with swizzle {self.swizzle}")

    def _check_modes(self) -> None:
        for name, value, allowed in (
            ("dtype", self.dtype, MAPS), ("interleave", self.interleave, INTERLEAVES),
            ("swizzle", self.swizzle, _SWIZZLES), ("l2_promotion", self.l2_promotion, L2_PROMOTIONS),
            ("oob_fill", self.oob_fill, OOB_FILLS),
        ):  # fmt: skip
            _require(value in allowed, name, value, f"one of {', '.join(allowed)}")
        _require(1 <= self.rank <= MAX_RANK, "rank", self.rank, f"1 to {MAX_RANK}")
        for name, count, expected in (
            ("strides", len(self.strides), self.rank - 1), ("box", len(self.box), self.rank),
            ("element_strides", len(self.element_strides), self.rank),
        ):  # fmt: skip
            _require(count == expected, name, f"{count} entries", f"{expected} entries at rank {self.rank}")
        if self.interleave != "none":
            _require(self.rank >= 3, "rank", self.rank, f"3 to {MAX_RANK} with interleave {self.interleave}")
        if self.oob_fill != "none":
            _require(
                DTYPES[self.dtype].kind == FLOAT, "oob_fill", self.oob_fill, f"none for the integer type {self.dtype}"
            )


def encoder_modes(dtype: int, interleave: int, swizzle: int, promotion: int, fill: int) -> dict[str, str]:
    """The fields dtype, interleave, swizzle, l2_promotion and oob_fill from the numbers that cuTensorMapEncodeTiled
    takes, in its order. Raises RecordError for one that no launch record has.
    """
    names = ("interleave", "swizzle", "l2_promotion", "oob_fill")
    known = (INTERLEAVES, _SWIZZLES, L2_PROMOTIONS, OOB_FILLS)
    numbers = (interleave, swizzle, promotion, fill)
    types = by("number", MAPS)
    _require(dtype in types, "dtype", dtype, f"one of {', '.join(map(str, types))}")
    for name, values, number in zip(names, known, numbers, strict=True):
        _require(0 <= number < len(values), name, number, f"0 to {len(values) - 1}: {', '.join(values)}")
    modes = {name: values[number] for name, values, number in zip(names, known, numbers, strict=True)}
    return {"dtype": types[dtype], **modes}


def encode(tensor_map: TensorMap) -> bytes:
    """The 128 bytes as the driver lays them out, with the encoder's bits and the last 64 bytes zero.

    Raises RecordError for arguments that cuTensorMapEncodeTiled refuses.
    """
    tensor_map.check()
    return encode_raw(tensor_map)


def encode_raw(tensor_map: TensorMap) -> bytes:
    """`encode` of any values, cut to the width of their fields: address modulo 2**57, strides modulo 2**40, dims modulo
    2**32.
    """
    words = [0] * 16
    address = tensor_map.address & (1 << 57) - 1
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32
    words[2] = (
        (tensor_map.rank - 1) << 4
        | _TYPE_CODES[tensor_map.dtype] << 7
        | INTERLEAVES.index(tensor_map.interleave) << 11
        | _SWIZZLES.index(tensor_map.swizzle) << 13
        | OOB_FILLS.index(tensor_map.oob_fill) << 15
        | L2_PROMOTIONS.index(tensor_map.l2_promotion) << 17
    )
    for index, stride in enumerate(tensor_map.strides):
        words[3 + index] = stride >> 4 & 0xFFFFFFFF
        words[7] |= (stride >> 36 & 0xF) << 4 * index
    for index, dim in enumerate(tensor_map.dims):
        words[8 + index] = dim - 1 & 0xFFFFFFFF
    for index, step in enumerate(tensor_map.element_strides):
        words[13] |= (step - 1) << 3 * index
    words[13] |= (tensor_map.box[0] - 1) << 24
    for index, extent in enumerate(tensor_map.box[1:]):
        words[14] |= (extent - 1) << 8 * index
    return _WORDS.pack(*words).ljust(TENSOR_MAP_BYTES, b"\0")


def rewritten(data: bytes, address: int, dims: Sequence[int], strides: Sequence[int]) -> bytes:
    """The first 64 bytes of a descriptor with another address, dims and strides, where `encode` has them."""
    ones = (1,) * len(dims)
    ours = encode_raw(TensorMap(address, "u8", tuple(dims), tuple(strides), ones, ones))
    result = bytearray(data[:DEFINED_BYTES])
    for place in (slice(ADDRESS_AT, ADDRESS_AT + 8), slice(STRIDES_AT, DIMS_AT + 4 * MAX_RANK)):
        result[place] = ours[place]
    return bytes(result)


def decode(data: bytes) -> TensorMap:
    """The fields of a descriptor; `data` has its first 64 bytes at least.

    Raises RecordError for bits that no known field explains: a descriptor of another kind or another layout.
    """
    if len(data) < DEFINED_BYTES:
        raise RecordError(f"tensor map of {len(data)} bytes; its first {DEFINED_BYTES} bytes are needed")
    words = _WORDS.unpack(data[:DEFINED_BYTES])
    rank = (words[2] >> 4 & 0x7) + 1
    code = words[2] >> 7 & _TYPE_MASK
    if rank > MAX_RANK or code not in _TYPES:
        raise RecordError(
            f"tensor map: word 2 is {words[2]:#010x}, rank {rank} and type {code}; neither may be unknown"
        )
    interleave = words[2] >> 11 & 0x3
    if interleave >= len(INTERLEAVES):
        raise RecordError(f"tensor map: interleave {interleave} in word 2 ({words[2]:#010x}) is unknown")
    _refuse_unknown(words, rank)
    strides = tuple(words[3 + i] << 4 | (words[7] >> 4 * i & 0xF) << 36 for i in range(rank - 1))
    box = (words[13] >> 24, *(words[14] >> 8 * i & 0xFF for i in range(rank - 1)))
    return TensorMap(
        address=words[0] | words[1] << 32,
        dtype=_TYPES[code],
        dims=tuple(words[8 + i] + 1 for i in range(rank)),
        strides=strides,
        box=tuple(extent + 1 for extent in box),
        element_strides=tuple((words[13] >> 3 * i & 0x7) + 1 for i in range(rank)),
        interleave=INTERLEAVES[interleave],
        swizzle=_SWIZZLES[words[2] >> 13 & 0x3],
        l2_promotion=L2_PROMOTIONS[words[2] >> 17 & 0x3],
        oob_fill=OOB_FILLS[words[2] >> 15 & 0x1],
    )


def _refuse_unknown(words: tuple[int, ...], rank: int) -> None:
    known = {
        2: _KNOWN_WORD_2,
        7: (1 << 4 * (rank - 1)) - 1,
        13: 0xFF000000 | (1 << 3 * rank) - 1,
        14: (1 << 8 * (rank - 1)) - 1,
        15: 0,
        **{3 + index: 0 for index in range(rank - 1, MAX_RANK - 1)},
        **{8 + index: 0 for index in range(rank, MAX_RANK)},
    }
    for index, mask in known.items():
        stray = words[index] & ~mask
        if stray:
            raise RecordError(
                f"tensor map: bits {stray:#x} of word {index} ({words[index]:#010x}) belong to no known field"
            )


def _require(condition: bool, field: str, value: object, rule: str) -> None:
    if not condition:
        raise RecordError(f"tensor map {field}: {value}; it must be {rule}")
