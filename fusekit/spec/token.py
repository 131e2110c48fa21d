"""Specs of kernels that work token by token: common fields, names, canonical form."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, TypeVar

from fusekit.plan.arch import arch_hint
from fusekit.plan.tokens import TOKENS
from fusekit.spec.fields import Field
from fusekit.spec.model import ARCHES

S = TypeVar("S", bound="TokenSpec")

NAME = Field("name", "string", "The kernel's name in this file.", required=True)
SUMMARY = Field("summary", "string", "One line about the kernel; default: the file's.")
ARCH = Field("arch", "choice", "Target architecture.", choices=ARCHES, required=True, sweep=True, hint=arch_hint)
TOKENS_FIELD = Field("T", "int", "Tokens.", required=True, alias="tokens")
PROBLEM = Field("problem", "table", "The shape that run and benchmarks use.", fields=(TOKENS_FIELD,))


@dataclass(frozen=True, slots=True)
class TokenProblem:
    """The shape that `run` and the benchmarks use by default: T tokens, of H elements where rows move."""

    T: int
    H: int = 0


class TokenSpec:
    """Names and forms of a frozen dataclass with the fields file, kernel, arch, warps, problem, summary and layer."""

    __slots__ = ()
    APART: ClassVar[tuple[str, ...]] = ("file", "kernel", "problem", "summary", "layer")  # no cubin depends on them
    PROBLEM: ClassVar[type] = TokenProblem

    @property
    def name(self) -> str:
        """`file/kernel`: every variant of the kernel."""
        return f"{self.file}/{self.kernel}"  # type: ignore[attr-defined]

    @property
    def variant(self) -> str:
        """The sweep's choice, such as `w4`."""
        return f"w{self.warps}"  # type: ignore[attr-defined]

    @property
    def full_name(self) -> str:
        """`file/kernel@variant`. Kernels of several architectures share it."""
        return f"{self.name}@{self.variant}"

    def defaults(self) -> dict[str, float | int]:
        """Scalars that a launch may leave out: there are none, or they are in the record."""
        return {}

    def canonical(self) -> dict[str, Any]:
        """The whole spec in JSON types, fields sorted."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        problem = values["problem"]
        if is_dataclass(problem):
            values["problem"] = {field.name: getattr(problem, field.name) for field in fields(problem)}
        layer = values.pop("layer", None)
        if layer is not None:
            values["layer"] = {"name": f"{layer.file}/{layer.name}", "topk": layer.topk}
        return dict(sorted(values.items()))

    def device_spec(self) -> dict[str, Any]:
        """The fields that decide the cubin and its launch record, in JSON types, without names, scalars or problem; and
        the facts of an operation of fusekit's, of which no source is in a field.
        """
        fields_ = {field: value for field, value in self.canonical().items() if field not in self.APART}
        return fields_ | ({"operation": TOKENS[fields_["op"]].facts(fields_)} if fields_["op"] in TOKENS else {})


def make_spec(kind: type[S], file: str, values: Mapping[str, Any], choice: Mapping[str, Any], **derived: Any) -> S:
    """The spec of one kernel. values: by field, complete for its operation; choice: what the sweep takes; derived: what
    is neither. A field that the operation lacks has the default of its field.
    """
    given = {field.name: values[field.name] for field in fields(kind) if field.name in values}  # type: ignore[arg-type]
    if given.get("problem"):
        given["problem"] = kind.PROBLEM(**given["problem"])
    return kind(**{"file": file, "kernel": values["name"], **given, **choice, **derived})
