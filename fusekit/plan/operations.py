"""The operations: one object each, whose members hold what every room needs.

A member is a reference, "module:attribute", imported when it is asked for: a list of what a store has imports none, and
a launch neither the compiler nor the spec's fields. An operation of another package is an entry point of the group
`fusekit.operations`: its name is the operation's, and it leads to an `Operation`. It may leave out every member but
`schema` and `planner`; an error names the member that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from fusekit.errors import SpecError, UsageError
from fusekit.plan import packages
from fusekit.plan.fields import Broken, Field
from fusekit.plan.token_operation import CHECK, EXCHANGE, PERMUTATION, ROUTER, TokenOperation
from fusekit.plan.tokens import TOKENS

# What each member of a package's operation is for, in the error where it is missing.
_MEMBERS = {
    "schema": "the fields of a spec file",
    "planner": "how it is compiled",
    "variants": "which of several variants is loaded",
    "trial": "how it is run",
    "reference": "what its results must be",
    "words": "what its arguments are",
}


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields that a [[kernel]] table of an operation may have, and the spec that it gives.

    make: (file stem, values by field, one value of each swept field) -> a spec. broken: the rules that a spec breaks,
    as (field, value, rule). kernel_only: fields that [defaults] cannot give. candidates: what a swept field that is
    left out is chosen from (see fusekit.spec.sweep). expand: instead of `sweep.expand`, for tables that make several
    kernels, `most` at most. ops: filled in by fusekit.
    """

    fields: tuple[Field, ...]
    sweep_fields: tuple[str, ...]
    make: Callable[[str, Mapping[str, Any], Mapping[str, Any]], Any]
    broken: Callable[[Any], list[Broken]]
    kernel_only: tuple[str, ...] = ("name", "summary")
    candidates: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    expand: Callable[[str, Mapping[str, Any]], Any] | None = None
    most: int = 1
    ops: tuple[str, ...] = ()

    @property
    def defaults_fields(self) -> tuple[Field, ...]:
        """The fields that [defaults] may give."""
        return tuple(field for field in self.fields if field.name not in self.kernel_only)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. Its members, each a reference, "" where it has none:

    schema: a `Schema`, or a mapping that has one under the operation's name.
    planner: (spec) -> fusekit.compiler.hostfunction.TracePlan, what is compiled.
    kernel: the class of the device code, where the planner is shared by operations.
    variants: (spec, problem) -> what orders the variants of a kernel; the least is loaded where a name leaves it open.
    trial: a class of fusekit.bench.trial.Trial, (library, kernel, rows, seed, guarded=...); without one a kernel runs
    on random inputs of the shapes in its launch record.
    reference: (spec, inputs) -> outputs, for `run --check` without a trial of its own: float64 arrays by name.
    words: what the arguments of a launch are, by name; or (spec) -> such a mapping.

    specs are in canonical form but for `planner`. dims: the extents of a problem; none: any. chosen_by: fields of a
    spec that `variants` reads. alone: why a kernel of it cannot be launched by itself.

    Of a GEMM: tiles: the dims along which a tile's M and N lie; reduction: the dim that is summed over; ragged: the dim
    of which each of E groups has a part, "" where there are none. token: the row of one that works token by token.
    package: the distribution that it comes with, "" for fusekit.
    """

    name: str
    schema: str = ""
    planner: str = ""
    kernel: str = ""
    variants: str = ""
    trial: str = ""
    reference: str = ""
    words: str = ""
    dims: tuple[str, ...] = ()
    chosen_by: tuple[str, ...] = ()
    alone: str = ""
    tiles: tuple[str, str] | None = None
    reduction: str = ""
    ragged: str = ""
    token: TokenOperation | None = None
    package: str = ""

    def load(self, member: str) -> Any:
        """The member of this name. Raises UsageError where it is left out, SpecError where it cannot be imported."""
        reference = getattr(self, member)
        if not reference:
            raise UsageError(f"op {self.name!r}: {self.lacks(member)}")
        try:
            return packages.attribute(reference)
        except Exception as error:
            if not self.package:
                raise
            raise SpecError(
                f"op {self.name!r}: its {member}, {reference} of the package {self.package}, cannot be imported: "
                f"{type(error).__name__}: {error}; install {self.package} again"
            ) from error

    def lacks(self, member: str) -> str:
        """That the member is left out, in words."""
        return f"the package {self.package or 'fusekit'} gives no `{member}`, which says {_MEMBERS[member]}"

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that a key follows next to those of the spec's plan."""
        return tuple(function.partition(":")[0] for function in (self.planner, self.kernel) if function)

    @property
    def gemm(self) -> bool:
        """Whether it is a product of matrices."""
        return self.tiles is not None

    @property
    def token_wise(self) -> bool:
        """Whether the rows of its problem are tokens, T."""
        return self.token is not None

    @property
    def wide(self) -> bool:
        """Whether it works token by token, on rows of H elements."""
        return self.token is not None and self.token.wide

    @property
    def reduces_rows(self) -> bool:
        """Whether the sum is over rows, as in a weight gradient."""
        return self.reduction == "M"


def _gemm(name: str, tiles: tuple[str, str], reduction: str, ragged: str = "") -> Operation:
    return Operation(
        name, "fusekit.spec.schemas:SCHEMA", "fusekit.compiler.gemm:plan", variants="fusekit.choice.model:rank",
        trial="fusekit.bench.trial:Trial", words="fusekit.spec.operands:gemm", dims=("E", "M", "N", "K"),
        chosen_by=("tile", "cluster"), tiles=tiles, reduction=reduction, ragged=ragged,
    )  # fmt: skip


_ALONE = {
    CHECK: "launches beside other kernels and has no trial; open_library(checked=True) uses it",
    EXCHANGE: "is launched by all ranks together and has no trial on one device; fusekit.exchange makes the windows "
    "that it needs",
}
_SCHEMAS = {ROUTER: "router", PERMUTATION: "permutation", CHECK: "permutation", EXCHANGE: "exchange"}


def _token(row: TokenOperation) -> Operation:
    return Operation(
        row.name, f"fusekit.spec.{_SCHEMAS[row.family]}:SCHEMAS", "fusekit.compiler.tokens:plan", row.kernel,
        "fusekit.choice.variants:warps", "" if row.family in _ALONE else "fusekit.bench.token_trial:TokenTrial",
        words="fusekit.spec.operands:token", dims=("T", "H", "M"), chosen_by=("warps",),
        alone=_ALONE.get(row.family, ""), token=row,
    )  # fmt: skip


OPERATIONS = {
    row.name: row
    for row in (
        _gemm("dense-gemm", ("M", "N"), "K"),
        _gemm("grouped-gemm", ("M", "N"), "K", "M"),
        _gemm("dense-wgrad", ("N", "K"), "M"),
        _gemm("grouped-wgrad", ("N", "K"), "M", "M"),
        *map(_token, TOKENS.values()),
        Operation(
            "quantise", "fusekit.spec.quantise:SCHEMA", "fusekit.compiler.quantise:plan",
            trial="fusekit.bench.quantise_trial:QuantiseTrial", words="fusekit.spec.operands:QUANTISE",
            variants="fusekit.choice.variants:warps", dims=("E", "M", "K", "T"), chosen_by=("warps",),
        ),
        Operation("extern", "fusekit.spec.extern:SCHEMA", "fusekit.compiler.extern:plan",
                  words="fusekit.spec.operands:extern"),
    )
}  # fmt: skip


def operation(name: Any) -> Operation | None:
    """The operation of that name, of fusekit or of an installed package; None where there is none.

    Raises SpecError for a package that cannot be imported, or whose entry point gives something else.
    """
    if not isinstance(name, str):
        return None
    return OPERATIONS.get(name) or _outside(name)


@cache
def _outside(name: str) -> Operation | None:
    if name not in packages.provided(packages.OPERATIONS):
        return None
    row, package = packages.load(packages.OPERATIONS, name), packages.package(packages.OPERATIONS, name)
    if not isinstance(row, Operation) or row.name != name or not row.schema or not row.planner:
        raise SpecError(
            f"{packages.what(packages.OPERATIONS, name)}: its entry point gives {row!r}; it must give a "
            "fusekit.plan.operations.Operation of that name, with schema and planner"
        )
    return replace(row, package=package)
