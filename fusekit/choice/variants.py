"""Which variant of a kernel to load when a name leaves it open.

A tuning table decides where one has the problem (fusekit.choice.tuning). Else the least cost wins (fusekit.choice.
model); equal costs: the larger tile, then the larger cluster, then the name, so that the choice is the same everywhere.

Variants of kernels that work token by token differ in warps a block alone: the one nearest to 8 is taken, to 4 for long
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fusekit.choice.model import rank
from fusekit.errors import ArgumentError, IntegrityError, UsageError, whole
from fusekit.plan.operations import OPERATIONS, Operation, operation
from fusekit.store.entries import of_program

if TYPE_CHECKING:
    from fusekit.choice.gpus import Gpu
    from fusekit.choice.tuning import Tuning
    from fusekit.store import NameRecord

_TEXTS = frozenset(
    {"op", "file", "kernel", "summary", "arch", "dtype", "out_dtype", "schedule", "mainloop", "glu_layout", "b_major",
     "alpha"}
)  # fmt: skip
_COUNTS = frozenset({"warps", "experts", "topk", "cluster_margin"})
_PAIRS = frozenset({"tile", "cluster"})
_MOST = 2**63  # of an extent


def check_alike(variants: Sequence[NameRecord]) -> None:
    """Raises UsageError where the variants of one kernel do not compute the same, with the same defaults: a variant
    that a spec no longer has stays in the store when the spec is changed, and must not be taken for one of it.
    """
    if len(variants) < 2 or not any(_operation(record).variants for record in variants):
        return  # those of a foreign kernel's sweep are kernels of their own
    _check(variants)
    first, *others = map(_computed, variants)
    for record, other in zip(variants[1:], others, strict=True):
        keys = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
        if keys:
            raise UsageError(
                f"{variants[0].name} and {record.name} for {record.arch} differ in {', '.join(keys)}; variants of one"
                " kernel compute the same; one may be left from before its spec was changed: give the full name, or"
                " remove what is left with `fusekit build --prune` of the spec file, or `fusekit rm NAME`"
            )


def _check(variants: Sequence[NameRecord]) -> None:
    for record in variants:
        check_name(record)
        needed = _operation(record).chosen_by
        if not record.spec.keys() >= {*needed}:
            raise IntegrityError(
                f"name record {record.name}: its spec lacks one of {', '.join(sorted(needed))}, by which a variant is "
                "chosen; give the full name, or build the kernel again",
                key=record.key,
            )


def _operation(record: NameRecord) -> Operation:
    if of_program(record.spec):
        raise UsageError(
            f"{record.name} is none of several variants: `fusekit exec` stored it, and others under such names; give"
            " the full name; `fusekit ls` shows them"
        )
    op = record.spec.get("op")
    if not isinstance(op, str):
        raise IntegrityError(
            f"name record {record.name}: its spec has op = {op!r}, where a name must be; remove it and build the kernel"
            " again",
            key=record.key,
        )
    row = operation(op)
    if row is None:
        raise UsageError(
            f"{record.name} has variants, and op {op!r}, which chooses among them, is of no package that is installed "
            f"here; give the full name, such as {record.name}, or install the package of {op}"
        )
    return row


def warps(spec: Mapping[str, Any], problem: Mapping[str, int]) -> int:
    """What orders the variants of a kernel that works token by token: how far its warps are from what is fastest."""
    token = OPERATIONS[spec["op"]].token
    long = token is not None and 0 < token.long_row <= spec.get("experts", 0)
    return abs(int(spec["warps"]) - (4 if long else 8))


def check_name(record: NameRecord) -> None:
    """Raises IntegrityError where a member of the spec of `record` that launching looks at is of another type, and for
    a cluster_margin that is not a count.
    """
    for label, value in record.spec.items():
        if not _fits(label, value):
            raise IntegrityError(
                f"name record {record.name}: its spec has {label} = {repr(value)[:80]}, which that cannot be; remove "
                "it and build the kernel again",
                key=record.key,
            )

    margin = record.defaults.get("cluster_margin", 0)
    if not _is_count(margin):
        raise IntegrityError(
            f"name record {record.name}: its cluster_margin is {margin!r}, where a count must be; remove it "
            "and build the kernel again",
            key=record.key,
        )


def _fits(label: str, value: Any) -> bool:
    if label in _TEXTS:
        return isinstance(value, str)
    if label in _COUNTS:
        return _is_count(value)
    if label in _PAIRS:
        return isinstance(value, list) and len(value) == 2 and all(_is_count(item) and item > 0 for item in value)
    if label == "layer":
        return isinstance(value, Mapping)
    if label == "problem":
        return value is None or (isinstance(value, Mapping) and all(map(_is_count, value.values())))
    if label == "activation":
        texts = [value.get(key, "") for key in ("kind", "approximate")] if isinstance(value, Mapping) else [value, None]
        return all(isinstance(text, str) for text in texts)
    return True


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _computed(record: NameRecord) -> dict[str, Any]:
    from fusekit.choice.tuning import features

    scalars = {name: value for name, value in record.defaults.items() if name != "cluster_margin"}
    return features(record.spec) | scalars


def choose(
    variants: Sequence[NameRecord], problem: Mapping[str, int] | None = None, tuning: Tuning | None = None,
    device: str | None = None, gpu: Gpu | None = None,
) -> NameRecord:  # fmt: skip
    """The variant to load; `variants` are those of one kernel, at least one. Raises UsageError as `check_alike` does,
    and ArgumentError for a problem that no kernel of that operation can have.

    Every way from a name without a variant to a kernel goes through here: load, show, export, run, bench.

    problem: overrides E, M, N, K (tokens T and width H) of the spec's own problem. tuning: measured times; asked
    first. device: the name that the driver gives the device, whose own measurements count before others'. gpu: the
    device's row, by which the model chooses.
    """
    return explained(variants, problem, tuning, device, gpu)[0]


def explained(
    variants: Sequence[NameRecord], problem: Mapping[str, int] | None = None, tuning: Tuning | None = None,
    device: str | None = None, gpu: Gpu | None = None,
) -> tuple[NameRecord, str]:  # fmt: skip
    """`choose`, and why this variant was chosen."""
    first = variants[0]
    if problem is not None:
        problem = _checked(first, problem)
    if len(variants) == 1:
        return first, "the only variant"
    check_name(first)
    kernels = sorted({record.name.partition("@")[0] for record in variants})
    if len(kernels) > 1:
        more = f" and {len(kernels) - 2} more" if len(kernels) > 2 else ""
        raise UsageError(f"{', '.join(kernels[:2])}{more} are kernels of their own; give the name of one")
    row = _operation(first)
    if not row.variants:
        names = ", ".join(record.name for record in variants[:4])
        why = "each has other params of a foreign function"
        why = f"op {row.name}: {row.lacks('variants')}" if row.package else why
        raise UsageError(f"{names} are kernels of their own: {why}; give the full name")
    check_alike(variants)
    return fastest(variants, problem, tuning, device, gpu)


def fastest(
    variants: Sequence[NameRecord], problem: Mapping[str, int] | None = None, tuning: Tuning | None = None,
    device: str | None = None, gpu: Gpu | None = None,
) -> tuple[NameRecord, str]:  # fmt: skip
    """`explained`, for variants and a problem that it would not refuse."""
    first, row = variants[0], _operation(variants[0])
    whole = _whole(first.spec, row, problem)
    if tuning is not None:
        by_variant = {record.name.partition("@")[2]: record for record in variants}
        for variant in tuning.best(first.spec, whole, device):
            if variant in by_variant:
                return by_variant[variant], "the fastest that was measured"
    order = row.load("variants")
    if order is rank:
        order = partial(rank, gpu=gpu)
    best = min(variants, key=lambda record: (order(record.spec, _whole(record.spec, row, problem)), record.name))
    return best, "the fastest by the model"


def _checked(record: NameRecord, problem: Any) -> dict[str, int]:
    """The problem that a caller gives, in integers. Raises ArgumentError."""
    check_name(record)
    kernel = record.name.partition("@")[0]
    if not isinstance(problem, Mapping):
        raise ArgumentError(
            f"problem is {repr(problem)[:80]}; it must be a dict of extents by name, such as {{'M': 4096}}, or left"
            " out",
            argument="problem",
        )
    row = OPERATIONS.get(record.spec.get("op", ""))  # a package is not asked for what a launch can do without
    known = row.dims if row is not None else ()
    extents: dict[str, int] = {}
    for name, value in problem.items():
        if known and name not in known:
            raise ArgumentError(
                f"problem has {repr(name)[:80]}; the extents of {kernel} are {', '.join(known)}; leave it out",
                argument="problem",
            )
        extent = whole(value)
        if extent is None or not 0 <= extent < _MOST:
            raise ArgumentError(
                f"problem has {name} = {repr(value)[:80]}; it must be a whole number from 0 to {_MOST - 1}; give that,"
                f" or leave {name} out for the spec's own",
                argument="problem",
            )
        extents[name] = extent
    if row is not None and row.token_wise and {"T", "M"} <= problem.keys():  # M is another name of T
        raise ArgumentError(
            f"problem has T = {problem['T']!r} and M = {problem['M']!r}; both are the tokens of {kernel}; give one of"
            " them",
            argument="problem",
        )
    return extents


def _whole(spec: Mapping[str, Any], row: Operation, problem: Mapping[str, int] | None) -> dict[str, int]:
    """The spec's problem, overridden by `problem`; rows M of a kernel that works token by token are T."""
    whole = {**(spec.get("problem") or {}), **(problem or {})}
    if row.token_wise and "M" in whole:
        whole["T"] = whole.pop("M")
    return whole
