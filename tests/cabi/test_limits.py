"""A launch record that Python takes is one that C takes: the same limits, whatever grows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from fusekit.abi import Constraint, Dim, LaunchRecord, RecordError, TensorArgument
from fusekit.abi.expr import OPERATORS
from fusekit.abi.floats import FLOAT_OPERATORS
from fusekit.cabi import Exported, generate
from tests.cubins import cubin_of
from tests.runtime.samples import record
from tests.soak import sample

from .launcher import CUBIN, complete
from .samples import hand_written
from .test_hostile import attempts, hostile, packed

__all__ = ["hostile"]

NUMBERS = (
    -(2**63) - 1,
    -(2**31) - 1,
    -1,
    0,
    6,
    9,
    129,
    257,
    32757,
    2**30 + 1,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    10**400,
)
COUNTS = (6, 16, 17, 65, 256, 257, 513)
TEXTS = ("", "\ud800", "a\0b", "ü" * (1 << 15), "x" * ((1 << 16) + 1))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the leaves, arrays and objects of a JSON value are, expressions as one."""
    yield path
    if isinstance(value, dict):
        inside: Any = value.items()
    else:
        inside = enumerate(value) if isinstance(value, list) and not is_expression(value) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def is_expression(value: Any) -> bool:
    """Those have limits and tests of their own."""
    return isinstance(value, list) and bool(value) and value[0] in (*OPERATORS, *FLOAT_OPERATORS)


def changes(value: Any) -> Iterator[Any]:
    """What to try instead of a part of a record."""
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield from NUMBERS
    elif isinstance(value, str):
        yield from TEXTS
    elif isinstance(value, list) and value and not is_expression(value):
        for count in COUNTS:
            yield [renamed(value[index % len(value)], index) for index in range(count)]


def renamed(item: Any, index: int) -> Any:
    """One more entry of an array; those with names get one of their own, and lie one after the other."""
    if not isinstance(item, dict) or "name" not in item:
        return item
    return item | {"name": f"{item['name']}_{index}"} | ({"offset": 128 * index} if "offset" in item else {})


def mutants(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One part changed; of an array's entries that have the same fields, the parts of the first."""
    tried = set()
    for path in places(document):
        at: Any = document
        alike: tuple[Any, ...] = ()
        for key in path:
            at = at[key]
            kind = (at.get("kind"), at.get("encoding"), *at) if isinstance(at, dict) else None
            alike = (*alike, kind if isinstance(key, int) else key)
        if alike in tried:
            continue
        tried.add(alike)
        for change in changes(at):
            mutant = copy.deepcopy(document)
            inside: Any = mutant
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = change
            yield mutant


@pytest.mark.parametrize(
    "name", sample(["sample/peers@1", "sample/schema-2@1", "sample/every-field@1"], "sample/schema-2@1")
)
def test_whatever_python_takes_is_within_the_limits_of_c(hostile, tmp_path, name, soak):
    """Each number, text and array of a record at and beyond the limits; one in 23 of these without --soak."""
    kernel = next(kernel for kernel in hand_written() if kernel.name == name)
    taken, refused = [], 0
    for mutant in islice(mutants(kernel.record.to_json()), 0, None, 1 if soak else 23):
        try:
            launch = LaunchRecord.from_json(mutant)
        except RecordError:
            refused += 1
            continue
        if any(tensor.rank > 5 for tensor in launch.tensors):  # the one thing that only Python takes
            continue
        taken.append(packed(Exported(kernel.name, launch, cubin_of(*(step.symbol for step in launch.launches)), {})))
    assert taken and refused
    result = attempts(hostile, tmp_path, taken)
    assert not [text for opened, _, _, text in result if opened]
    assert not [text for _, loaded, _, text in result if loaded and "must be" in text][:3]


def large(count: int, rank: int = 1, **changes: Any) -> LaunchRecord:
    """A record of `count` more tensors, each with a dim of its own."""
    base = record()
    dims = tuple(Dim(f"D{n}") for n in range(count))
    tensors = tuple(TensorArgument(f"t{n}", "input", "f32", (f"D{n}",) * rank, (1,) * rank) for n in range(count))
    return complete(replace(base, dims=(*base.dims, *dims), arguments=(*base.arguments, *tensors), **changes))


def test_a_record_may_have_so_many_tensors():
    """Enough for the windows of 32 ranks and all else that a kernel takes."""
    most = 64 - len(record().tensors)
    assert generate([Exported("sample/x@1", large(most), CUBIN)])
    with pytest.raises(RecordError, match=r"^arguments: 65 tensors; launchers take 0 to 64$"):
        large(most + 1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rank": 9}, r"^arguments\[6\]\.shape: 9 dims; launchers take 0 to 8$"),
        ({"values": {f"v{n}": 1 for n in range(500)}}, r"^arguments: 522 variables .*; launchers take 0 to 512$"),
        ({"dynamic_shared": 2**31}, r"^dynamic_shared: 2147483648 bytes; launchers take 0 to 2147483647$"),
        ({"skip_if_zero": ("M",) * 513}, "^skip_if_zero: 513 dims; launchers take 0 to 512$"),
        (
            {"constraints": (Constraint(0, "a" * 65537),)},
            r"^constraints\[0\]\.message: 'a{80}'; it is UTF-8 of at most",
        ),
    ],
)
def test_a_record_beyond_the_limits(changes, text):
    with pytest.raises(RecordError, match=text):
        large(1, **changes)
