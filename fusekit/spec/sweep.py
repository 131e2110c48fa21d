"""The kernels of a table: every combination of its swept fields, less what is excluded or cannot be built.

A GEMM that leaves out `tile`, `cluster` or `schedule` is given variants that fit its problem, by the model of
fusekit.choice:

- no tile: three. The best one of `TILES` (`LOW` for a dense product of few columns alone, `FEW` for few rows of a
  group) and `CLUSTERS`, the same tile with the other cluster, and the best one with another tile. Tiles of `COMMON` are
  preferred, where the model calls them hardly dearer than the best, or as the other tile not much dearer.
- no tile, but clusters: for each of them the best tile and that other one.
- a tile, but no cluster: for each tile the better of `CLUSTERS`; `ALONE` for a tile that cannot have either, as none of
  MXFP4 weights can. `LOW` of FP8 and MXFP4 weights is for few rows as well.
- no schedule: dynamic.

Without a problem they are those of `TYPICAL`. Values that a table gives are kept: each of its lists has a variant for
each value.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fusekit.choice import rank
from fusekit.choice.model import few_rows
from fusekit.plan.quant import FP8_W, MX_W
from fusekit.plan.tiles import SWAPPED
from fusekit.spec.fields import SWEEP_FIELDS, Broken
from fusekit.spec.model import KernelSpec, Problem
from fusekit.spec.values import show

if TYPE_CHECKING:
    from fusekit.plan.operations import Schema
    from fusekit.spec.schemas import Spec

LOW = (64, 128)
NARROW = 128  # columns of a dense product, such as a router's, that LOW is a candidate for
FEW = ((16, 64), (16, 128), (32, 128))  # for few rows of a group
TILES = (*FEW, LOW, (128, 128), (128, 160), (128, 192), (128, 256), (256, 128), (256, 192))
CLUSTERS = ((2, 1), (1, 2))
ALONE = (1, 1)  # the cluster of swapped tiles
CANDIDATES = {"tile": TILES, "cluster": (*CLUSTERS, ALONE), "schedule": ("dynamic",)}
COMMON = ((128, 192), (256, 192))
HARDLY_DEARER, MUCH_DEARER = 1.02, 1.05
TYPICAL = Problem(E=32, M=65536, N=4096, K=4096)

Index = dict[tuple[str, ...], dict[tuple[Any, ...], set[int]]]  # fields, their values, numbers of `exclude` tables


@dataclass(slots=True)
class Expansion:
    """The kernels of one table. broken: why there are none. dropped: combinations that cannot be built, in a sweep that
    has others, each with its rules. unused: numbers of the `exclude` tables that no combination matches.
    """

    specs: list["Spec"] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    dropped: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    unused: set[int] = field(default_factory=set)


def combinations(schema: "Schema", values: Mapping[str, Any]) -> int:
    """How many kernels the table makes at most."""
    count = schema.most
    for swept in schema.sweep_fields:
        count *= len(values[swept])
    return count * (3 if values.get("tile") == (None,) else 1)


def expand(schema: "Schema", stem: str, values: Mapping[str, Any], index: Index) -> Expansion:
    """The specs of one kernel table.

    values: by field, complete, a tuple for each field that may be swept. index: `indexed` of the value of `exclude`.
    """
    free = {field: schema.candidates[field] for field in schema.candidates if values[field] == (None,)}
    given = {field: values[field] for field in schema.sweep_fields if field not in free}
    excluded: Sequence[Mapping[str, Any]] = values.get("exclude") or ()
    expansion = Expansion(unused=set(range(1, len(excluded) + 1)))
    fatal = False
    quant = values.get("quant")
    inputs = quant.get("in") if isinstance(quant, Mapping) else None
    alone = TILES if inputs == MX_W else (*FEW, LOW) if inputs == FP8_W else FEW
    for choice in _product(given):
        built: list[Spec] = []
        broken: list[Broken] = []
        for rest in _product(free):
            if rest.keys() >= {"tile", "cluster"} and (rest["cluster"] == ALONE) != (rest["tile"] in alone):
                continue
            spec = schema.make(stem, values, choice | rest)
            if "cluster" in free and (spec.cluster == ALONE) != (inputs == MX_W or spec.mainloop == SWAPPED):
                continue
            matching = _matching(spec, index)
            expansion.unused -= matching
            if matching:
                continue
            rules = schema.broken(spec)
            broken += rules
            if not rules and ("tile" not in free or _fits(spec)):
                built.append(spec)
        expansion.specs += _chosen(built, free) if free and built else built
        if broken and not built:
            fatal = fatal or any(field not in schema.sweep_fields for field, _, _ in broken)
            expansion.broken += broken
            swept = ", ".join(f"{field} = {show(choice[field])}" for field in given if len(given[field]) > 1)
            expansion.dropped.append((swept, tuple(dict.fromkeys(rule for _, _, rule in broken))))
    if fatal and free:  # what holds for every candidate
        expansion.broken = [refusal for refusal in expansion.broken if refusal[0] not in schema.sweep_fields]
    elif expansion.specs and not fatal:
        expansion.broken = []
    elif not expansion.specs and not expansion.broken:
        expansion.broken = [("exclude", excluded, "leaves nothing of the sweep; exclude less")]
    return expansion


def _product(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for choice in itertools.product(*values.values()):
        yield dict(zip(values, choice, strict=True))


def indexed(tables: Sequence[Mapping[str, Any]]) -> Index:
    """The tables of `exclude`, to be found by the values of a spec."""
    index: Index = {}
    for number, table in enumerate(tables, start=1):
        fields = tuple(sorted(table))
        index.setdefault(fields, {}).setdefault(tuple(table[field] for field in fields), set()).add(number)
    return index


def _matching(spec: Any, index: Index) -> set[int]:
    """Numbers of the tables all of whose values the spec has."""
    matches = (tables.get(tuple(getattr(spec, field) for field in fields)) for fields, tables in index.items())
    return set().union(*filter(None, matches))


def _chosen(specs: Sequence[Any], free: Mapping[str, Any]) -> list[Any]:
    """Chooses the variants to build among those that differ in the fields `free`."""
    problem = _problem(specs[0])
    alike = specs[0].canonical()
    ranked = [(rank(alike | {field: getattr(spec, field) for field in SWEEP_FIELDS}, problem), spec) for spec in specs]
    ranked.sort(key=lambda entry: (*entry[0], entry[1].variant))
    ordered = [spec for _, spec in ranked]
    if "tile" not in free:
        return ordered[:1]
    (least, *_), _ = ranked[0]

    def common(within: float) -> list[Any]:
        return [spec for (cost, *_), spec in ranked if cost <= within * least and spec.tile in COMMON]

    first, *_ = common(HARDLY_DEARER) or ordered
    others = [spec for spec in (*common(MUCH_DEARER), *ordered) if spec.tile != first.tile]
    twins = [spec for spec in ordered if spec.tile == first.tile and spec is not first]
    return [first, *twins[:1], *others[:1]]


def _fits(spec: Any) -> bool:
    """Whether the problem is one that the tile is a candidate for."""
    if spec.mainloop == SWAPPED:
        problem = _problem(spec)
        return few_rows(problem["M"], problem["E"], spec.grouped, max(spec.tile[0], *spec.plan.arch.tile_rows[SWAPPED]))
    narrow = spec.op == "dense-gemm" and spec.problem is not None and spec.problem.N <= NARROW
    return spec.tile != LOW or narrow


def _problem(spec: KernelSpec) -> dict[str, int]:
    shape = spec.problem or (TYPICAL if spec.grouped else replace(TYPICAL, E=1))
    return {"E": shape.E, "M": shape.M, "N": shape.N, "K": shape.K}
