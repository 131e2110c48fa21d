"""Which variant of a kernel to load when a name leaves it open.

A tuning table says it where one knows the problem (fusekit.runtime.tuning). Else the model of fusekit.choice is asked;
equal costs: the larger tile, then the larger cluster, then the name, so that the choice is the same everywhere.

Variants of the router's kernels and of those that move rows differ in warps a block alone: the one nearest to 8 is
taken, to 4 for a router of 1024 experts or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fusekit.choice import rank
from fusekit.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from fusekit.runtime.tuning import Tuning
    from fusekit.store import NameRecord


def check_alike(variants: Sequence[NameRecord]) -> None:
    """Raises UsageError where the variants of one kernel do not compute the same, with the same defaults: a variant
    that a spec no longer has stays in the store when the spec is changed, and must not be taken for one of it.
    """
    if len(variants) < 2:
        return
    _check(variants)
    first, *others = map(_computed, variants)
    for record, found in zip(variants[1:], others, strict=True):
        keys = sorted(key for key in first.keys() | found.keys() if first.get(key) != found.get(key))
        if keys:
            raise UsageError(
                f"{variants[0].name} and {record.name} for {record.arch} differ in {', '.join(keys)}; variants of one"
                " kernel compute the same; one may be left from before its spec was changed: give the full name, or"
                " remove what is left with `fusekit build --prune` of the spec file, or `fusekit rm NAME`"
            )


def _check(variants: Sequence[NameRecord]) -> None:
    from fusekit.runtime.wellformed import check_name

    for record in variants:
        check_name(record)
        needed = {"op", "warps"} if "warps" in variants[0].spec else {"op", "tile", "cluster"}
        if not needed <= record.spec.keys():
            raise IntegrityError(
                f"name record {record.name}: its spec lacks one of {', '.join(sorted(needed))}, by which a variant is "
                "chosen; give the full name, or build the kernel again",
                key=record.key,
            )


def _computed(record: NameRecord) -> dict[str, Any]:
    from fusekit.runtime.tuning import features

    scalars = {name: value for name, value in record.defaults.items() if name != "cluster_margin"}
    return features(record.spec) | scalars


def choose(
    variants: Sequence[NameRecord], problem: Mapping[str, int] | None = None, tuning: Tuning | None = None,
    device: str | None = None,
) -> NameRecord:  # fmt: skip
    """The variant to load; `variants` are those of one kernel, at least one. Raises UsageError as `check_alike` does.

    Every way from a name without a variant to a kernel goes through here: load, show, export, run, bench.

    problem: overrides what the spec's own says of E, M, N, K (tokens T and width H). tuning: measured times; asked
    first. device: the name that the driver gives the device, whose own measurements count before others'.
    """
    if len(variants) == 1:
        return variants[0]
    if variants[0].spec.get("op") == "extern":
        names = ", ".join(record.name for record in variants[:4])
        raise UsageError(f"{names} are kernels of their own: a sweep of a foreign kernel's params; give the full name")
    check_alike(variants)
    if tuning is not None:
        spec = variants[0].spec
        by_variant = {record.name.partition("@")[2]: record for record in variants}
        for variant in tuning.best(spec, _whole(spec, problem), device):
            if variant in by_variant:
                return by_variant[variant]
    if "warps" in variants[0].spec:
        best = 4 if variants[0].spec["op"].startswith("router-") and variants[0].spec.get("experts", 0) >= 1024 else 8
        return min(variants, key=lambda record: (abs(record.spec["warps"] - best), record.name))
    return min(variants, key=lambda record: (*rank(record.spec, _whole(record.spec, problem)), record.name))


def _whole(spec: Mapping[str, Any], problem: Mapping[str, int] | None) -> dict[str, int]:
    """The spec's problem with what `problem` says otherwise; rows M of a kernel that works token by token are T."""
    whole = {**(spec.get("problem") or {}), **(problem or {})}
    if "warps" in spec and "M" in whole:
        whole["T"] = whole.pop("M")
    return whole
