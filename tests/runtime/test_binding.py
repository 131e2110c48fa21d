"""Every wrong argument is named, with what it is and what it must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusekit.errors import ArgumentError
from fusekit.runtime.binding import Pair
from tests.runtime.samples import Torchlike, load, over_x, tensors


@dataclass(frozen=True)
class TorchDevice:
    type: str
    index: int | None = None


CPU = TorchDevice("cpu")


def T(*shape: int, **how: Any) -> Torchlike:  # noqa: N802 - short, in a table
    return Torchlike(shape, **how)


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "dtype": ({"x": T(96, 128, dtype="torch.float16")}, "x", "x is fp16; it must be bf16"),
    "unknown dtype": ({"x": T(96, 128, dtype="torch.complex64")}, "x", "x has dtype torch.complex64; known are"),
    "rank": ({"x": T(96, 2, 64)}, "x", r"x has rank 3, shape \[96, 2, 64\]; it must have rank 2: bf16\[M, K\]"),
    "K differs": ({"w": T(4, 320, 136)}, "w", r"w has 136 at dim 2.*it must have K = 128 \(fixed by x\)"),
    "E differs": ({"offsets": T(5, dtype="torch.int32")}, "offsets", r"offsets has 5 at dim 0.*E = 4 \(fixed by w\)"),
    "y not halved": ({"y": T(96, 320)}, "y", r"y has 320 at dim 1.*it must have I = 160 \(fixed by w\): bf16\[M, I\]"),
    "odd N": ({"w": T(4, 321, 128)}, "w", r"w has 321 at dim 1.*it must have 2 \* I = 320 \(fixed by y\)"),
    "rows differ": ({"y": T(95, 160)}, "y", r"y has 95 at dim 0.*M = 96 \(fixed by x\)"),
    "divisor": ({"x": T(96, 124), "w": T(4, 320, 124)}, "x", "x gives K = 124; K must be a multiple of 8"),
    "minimum": ({"w": T(0, 320, 128), "offsets": T(0, dtype="torch.int32")}, "w", "w gives E = 0; E must be 1 to"),
    "constraint": ({"y": T(96, 168), "w": T(4, 336, 128)}, "", "I must be a multiple of 16 .*I = 168"),
    "transposed": ({"x": T(96, 128, strides=(1, 96))}, "x", r"x has stride 1 at dim 0.*positive multiple of 8"),
    "not contiguous": ({"x": T(96, 128, strides=(256, 2))}, "x", r"x has stride 2 at dim 1.*it must be 1 \(contig"),
    "stride off 16 bytes": ({"x": T(96, 128, strides=(132, 1))}, "x", r"stride 132 at dim 0.*multiple of 8 \(16 byt"),
    "stride 0": ({"w": T(4, 320, 128, strides=(0, 128, 1))}, "w", "w has stride 0 at dim 0"),
    "negative stride": ({"x": T(96, 128, strides=(-128, 1))}, "x", "x has stride -128 at dim 0"),
    "output on itself": ({"y": T(96, 160, strides=(80, 1))}, "y", r"y has strides \[80, 1\].*elements overlap"),
    "output a little on itself": ({"y": T(96, 160, strides=(152, 1))}, "y", r"y has strides \[152, 1\].*elements over"),
    "strided offsets": ({"offsets": T(4, dtype="torch.int32", strides=(2,))}, "offsets", "offsets has stride 2 at"),
    "alignment": ({"x": T(96, 128, address=0x1000_0008)}, "x", "x begins at 0x10000008, 8 bytes after a mult"),
    "null": ({"x": T(96, 128, address=0)}, "x", "x has a null address"),
    "device": ({"w": T(4, 320, 128, device=1)}, "w", "w is on device 1, x on device 0"),
    "cpu": ({"x": T(96, 128, device=CPU)}, "x", "x is on .*; it must be in the memory of a CUDA device"),
    "no tensor": ({"x": [1, 2]}, "x", "x is a list; it must be a CUDA tensor"),
    "extra": ({"bias": T(4, 320)}, "bias", "bias is no argument of sample/fc1.* it takes x, w, offsets, y"),
    "misspelt": ({"offset": T(4, dtype="torch.int32")}, "offset", "did you mean 'offsets'"),
    "output is input": ({"y": T(96, 160, address=0x1000_0000)}, "y", "y overlaps x in memory"),
    "output runs into input": ({"y": T(96, 160, address=0x2000_0000 - 16)}, "y", "y overlaps w in memory"),
    "output on the last offset": ({"y": T(96, 160, address=0x3000_0010)}, "y", "y overlaps offsets in memory"),
    "scalar text": ({"act_alpha": "1.5"}, "act_alpha", "act_alpha is '1.5', a str; it must be an f32 number"),
    "scalar tensor": ({"act_alpha": [1]}, "act_alpha", "act_alpha is .*a list; it must be an f32 number"),
    "scalar overflow": ({"act_alpha": 1e39}, "act_alpha", "act_alpha is 1e.39; it does not fit into f32"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    changes, argument, message = WRONG[case]
    kernel, fake = load()
    for attempt in (kernel, kernel.bind):
        with pytest.raises(ArgumentError, match=message) as caught:
            attempt(**(tensors() | changes))
        assert caught.value.argument == argument
    assert not fake.launches


@pytest.mark.parametrize("case", ["alignment", "null", "output is input", "output runs into input", "scalar overflow"])
def test_what_depends_on_the_call_is_checked_on_every_call(case: str) -> None:
    changes, argument, message = WRONG[case]
    kernel, _ = load()
    kernel(**tensors())
    with pytest.raises(ArgumentError, match=message) as caught:
        kernel(**(tensors() | changes))
    assert caught.value.argument == argument


@pytest.mark.parametrize("name", ["x", "w", "offsets", "y", "act_alpha"])
def test_a_missing_argument_is_named(name: str) -> None:
    kernel, _ = load()
    given = tensors()
    del given[name]
    with pytest.raises(ArgumentError, match=f"{name} is missing; sample/fc1") as caught:
        kernel(**given)
    assert caught.value.argument == name


@pytest.mark.parametrize(
    "changes",
    [
        {"x": T(1, 128, strides=(1, 1)), "y": T(1, 160, address=0x4000_0000, strides=(7, 1))},
        {"w": T(1, 320, 128, address=0x2000_0000, strides=(3, 128, 1)), "offsets": T(1, dtype="torch.int32")},
    ],
)
def test_the_stride_of_an_extent_of_one_means_nothing(changes: dict[str, Any]) -> None:
    kernel, fake = load()
    kernel(**(tensors() | changes))
    assert len(fake.launches) == 1
    assert fake.encoded[0]["strides"] == [256]


def test_inputs_may_share_memory_and_outputs_may_interleave() -> None:
    kernel, fake = load()
    wide = 128 + 160
    columns = {
        "x": T(96, 128, address=0x1000_0000, strides=(wide, 1)),
        "y": T(96, 160, address=0x1000_0000 + 2 * 128, strides=(wide, 1)),
    }
    kernel(**(tensors() | columns))
    assert len(fake.launches) == 1
    columns["y"] = T(96, 160, address=0x1000_0000 + 2 * 120, strides=(wide, 1))
    with pytest.raises(ArgumentError, match="y overlaps x"):
        kernel(**(tensors() | columns))


def test_an_output_may_lie_over_the_input_that_its_record_names() -> None:
    """At the same address with the same strides; in a call, a bound launch and an update, and nowhere else."""
    kernel, fake = load(over_x())
    wide = {"x": T(96, 128, address=0x1000_0000, strides=(256, 1))}
    apart, same = (T(96, 128, address=address, strides=(256, 1)) for address in (0x7000_0000, 0x1000_0000))
    kernel(**(tensors() | wide | {"dx": same}))
    bound = kernel.bind(**(tensors() | wide | {"dx": apart}))
    bound.update(dx=same)
    bound()
    assert [int.from_bytes(each.parameters[-1], "little") for each in fake.launches] == [0x1000_0000] * 2
    close = T(96, 128, address=0x1000_0000 + 16, strides=(256, 1))
    for change in ({"dx": close}, {"dx": T(96, 128, address=0x1000_0000, strides=(128, 1))}):
        for attempt in (kernel, kernel.bind, bound.update):
            given = change if attempt == bound.update else tensors() | wide | change
            with pytest.raises(
                ArgumentError, match="dx overlaps x in memory; it must be the same memory, of the same st"
            ):
                attempt(**given)
    with pytest.raises(ArgumentError, match="dx overlaps w in memory; an output must not share"):
        kernel(**(tensors() | wide | {"dx": T(96, 128, address=0x2000_0000, strides=(256, 1))}))
    with pytest.raises(ArgumentError, match="y overlaps x in memory; an output must not share"):
        kernel(**(tensors() | wide | {"dx": same, "y": T(96, 160, address=0x1000_0000)}))


@settings(deadline=None)
@given(
    rows=st.tuples(st.integers(2, 5), st.integers(2, 5)),
    widths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    pitch=st.integers(6, 9),
    distance=st.integers(-60, 60),
)
def test_interleaving_matrices_overlap_when_they_share_a_byte(
    rows: tuple[int, int], widths: tuple[int, int], pitch: int, distance: int
) -> None:
    spans = [(count - 1) * pitch + width for count, width in zip(rows, widths, strict=True)]
    first, second = (
        {start + row * pitch + column for row in range(count) for column in range(width)}
        for start, count, width in ((0, rows[0], widths[0]), (distance, rows[1], widths[1]))
    )
    pair = Pair(0, 1, spans[0], spans[1], pitch, widths[0], widths[1], in_place=False)
    # Sharing no byte is only certain where spans are apart or columns are: the check may refuse more, never less.
    if first & second:
        assert pair.overlap(distance)
    if not pair.overlap(distance):
        assert not first & second
