"""Tuning tables: which variant of a kernel is fastest for a problem, as it was measured.

A table is one JSON document for an architecture:

    {"schema": 1, "arch": ARCH, "rows": [{
        "device": "NVIDIA H200",
        "features": {"op": "grouped-gemm", "dtype": "bf16", "activation": {"kind": "swiglu", ...}, ...},
        "problem": {"E": 32, "M": 98304, "N": 5760, "K": 2880},
        "variants": [["128x160-c1x2-dynamic", 4917.5], ["128x192-c1x2-dynamic", 4925.8]]
    }]}

A row is one measurement: `variants` lists what was timed, fastest first, with median microseconds (null: only
its place is kept, as of what was timed inside a layer's passes). `features` is everything in a spec that decides what
is computed, and nothing of how: kernels of two models that compute the same share their rows. What a spec does not ask
for (false, "none") is left out, so that a new key leaves the rows of kernels without it as they are.

A row speaks for a problem when the features are equal, N and K (the width H of kernels that move rows) are equal, and
the rest is near. Measured points represent their neighbourhood; ranges are not needed. The distance is

    |log2 of rows a group| + |log2 of groups| / 2       of a GEMM: M / E and E
    |log2 of tokens|                                    of a kernel that works token by token

between the two, and 1 at most: twice the rows a group, or four times the groups. Of several rows the nearest speaks;
one that was measured on a device of the same name comes before all others. Of what it lists, the first variant that
is there is taken. No row near enough: the heuristic of fusekit.choice.variants.

Where tables lie: `tuning/<arch>.json` in each root of the store, because what is fastest belongs to the kernels that
were built and to the machines that share them, and must be writable; then `tuning-<arch>.json` next to this module,
which comes with fusekit and names packaged variants only. A table decides how fast a launch is and never what is
launched under a name's variant, so it is not part of any key, has no digest, and may be edited. Where only signed
kernels are loaded, only signed tables are: `fusekit key sign` signs one that was edited. A table that cannot be read,
or is not trusted, is left out when a kernel is loaded, and an error where one is to be written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusekit.errors import FusekitError, IntegrityError
from fusekit.store.documents import LIMIT, parse
from fusekit.store.given import given_file

if TYPE_CHECKING:
    from fusekit.store import Store

SCHEMA = 1
REACH = 1.0
# Keys of a canonical spec for a kernel's name, where it runs and how it computes, but not what it computes.
_APART = frozenset(
    {"file", "kernel", "summary", "problem", "arch", "tile", "cluster", "mainloop", "schedule", "cluster_margin",
     "warps", "scaling_factor", "coefficient", "layer", "pdl"}
)  # fmt: skip
_OFF = (None, False, "none")
_NEAR = frozenset({"E", "M", "T"})  # dims of which a neighbour will do


def features(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What the spec (canonical form) computes, in JSON types: no names, shapes, tiles, or run-time scalars."""
    fields = {key: value for key, value in sorted(spec.items()) if key not in _APART and value not in _OFF}
    activation = fields.get("activation")
    if isinstance(activation, Mapping):  # its other members are run-time scalars
        fields["activation"] = {key: activation[key] for key in ("approximate", "kind") if key in activation}
    return fields


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. device: as the driver names it. variants: (variant, median microseconds or None), fastest
    first.
    """

    device: str
    features: Mapping[str, Any]
    problem: Mapping[str, int]
    variants: tuple[tuple[str, float | None], ...]

    def distance(self, problem: Mapping[str, int]) -> float:
        """How far `problem` is from what was measured; infinite where a dim that must be equal is not."""
        if self.problem.keys() != problem.keys():
            return math.inf
        if any(problem[name] != value for name, value in self.problem.items() if name not in _NEAR):
            return math.inf
        if any(sizes[name] < 1 for sizes in (problem, self.problem) for name in _NEAR & problem.keys()):
            return 0.0 if problem == self.problem else math.inf
        if "T" in problem:
            return abs(math.log2(problem["T"] / self.problem["T"]))
        groups = problem["E"] / self.problem["E"]
        rows = problem["M"] / self.problem["M"] / groups
        return abs(math.log2(rows)) + abs(math.log2(groups)) / 2

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "features": self.features,
            "problem": dict(self.problem),
            "variants": [list(variant) for variant in self.variants],
        }


@dataclass(frozen=True, slots=True)
class Tuning:
    """The rows of one or more tables of `arch`; of rows that are equally near, the first speaks."""

    arch: str
    rows: tuple[Row, ...] = ()

    def best(self, spec: Mapping[str, Any], problem: Mapping[str, int], device: str | None = None) -> tuple[str, ...]:
        """The variants that are known to be fast for `problem`, fastest first; empty where no row speaks for it.

        spec: any variant's, in canonical form. device: see `fusekit.choice.variants.choose`.
        """
        if not self.rows:
            return ()
        wanted = features(spec)
        near = [
            (device is not None and row.device != device, distance, index)
            for index, row in enumerate(self.rows)
            if row.features == wanted and (distance := row.distance(problem)) <= REACH
        ]
        return tuple(variant for variant, _ in self.rows[min(near)[2]].variants) if near else ()

    def merged(self, rows: Iterable[Row]) -> Tuning:
        """This table with `rows`. Rows of the same device, features and problem become one, in which a newer time of a
        variant replaces an older one. Places give way to newer times, and come before older times.
        """
        merged: list[Row] = []
        for row in (*self.rows, *rows):
            same = next((i for i, other in enumerate(merged) if _same(row, other)), None)
            if same is None:
                merged.append(row)
                continue
            new, old = dict(row.variants), dict(merged[same].variants)
            if None in new.values():
                timed_before = [(name, us) for name, us in old.items() if us is not None and name not in new]
                merged[same] = replace(row, variants=(*row.variants, *timed_before))
                continue
            timed = sorted((us, variant) for variant, us in (old | new).items() if us is not None)
            merged[same] = replace(row, variants=tuple((variant, us) for us, variant in timed))
        return Tuning(self.arch, tuple(merged))

    def to_bytes(self) -> bytes:
        """The table's file: one row a line, in an order that does not depend on when it was measured."""
        lines = sorted(json.dumps(row.to_json(), sort_keys=True, allow_nan=False) for row in self.rows)
        head = json.dumps({"schema": SCHEMA, "arch": self.arch})[:-1]
        return (head + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: Path | str, arch: str) -> Tuning:
        """The table in `data`, read from `path`. Raises IntegrityError for what is no table of this schema and arch."""
        try:
            document = parse(data)
            if (document["schema"], document["arch"]) != (SCHEMA, arch):
                raise ValueError(
                    f"schema {document['schema']} and arch {document['arch']!r}, not {SCHEMA} and {arch!r}"
                )
            return cls(arch, tuple(_row(row) for row in document["rows"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise IntegrityError(
                f"{path} is no tuning table of {arch}: {type(error).__name__}: {str(error)[:200]}; remove it, or"
                " measure anew with: fusekit bench --sweep"
            ) from error


def load(store: Store, arch: str) -> Tuning:
    """The rows of every root's table and of the packaged one, in that order; what cannot be read is left out."""
    rows: list[Row] = []
    for path, data in store.tuning_tables(arch):
        try:
            rows += Tuning.from_bytes(data, path, arch).rows
        except FusekitError:
            continue
    return Tuning(arch, (*rows, *packaged(arch).rows))


def packaged(arch: str) -> Tuning:
    """The table that comes with fusekit; empty for an architecture that has none."""
    return read(Path(__file__).with_name(f"tuning-{arch}.json"), arch)


def read(path: Path, arch: str) -> Tuning:
    """The table at `path`, empty where there is no such file. IntegrityError for what is no table of `arch`, UsageError
    for what is no plain file, StoreError for one that cannot be read.
    """
    if not os.path.lexists(path):
        return Tuning(arch)
    with given_file(path, "tuning table") as (file, _):
        data = file.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise IntegrityError(f"{path} has more than {LIMIT} bytes, the most of a tuning table; remove it")
    return Tuning.from_bytes(data, path, arch)


def _same(row: Row, other: Row) -> bool:
    return (row.device, row.features, row.problem) == (other.device, other.features, other.problem)


def _row(document: Any) -> Row:
    if not isinstance(document["device"], str) or not isinstance(document["features"], dict):
        raise ValueError(f"a row has device {document['device']!r} and features {document['features']!r}")
    problem = document["problem"]
    if not problem or not all(type(value) is int and value >= 0 for value in problem.values()) or not _dims(problem):
        raise ValueError(f"problem {problem!r}; it has integers, E and M or T among them")
    variants = []
    for variant, us in document["variants"]:
        if not isinstance(variant, str) or not (us is None or (type(us) in (int, float) and us > 0)):
            raise ValueError(f"{[variant, us]!r} is no variant with its microseconds")
        variants.append((variant, None if us is None else float(us)))
    if not variants:
        raise ValueError("a row without variants")
    return Row(document["device"], features(document["features"]), dict(problem), tuple(variants))


def _dims(problem: Mapping[str, int]) -> bool:
    return "T" in problem or {"E", "M"} <= problem.keys()
