"""What a kernel's key is made of. Imports neither the DSL nor a planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusekit.compiler.foreign import Foreign
from fusekit.compiler.options import compile_options
from fusekit.compiler.sources import Sources
from fusekit.compiler.toolchain import distributions
from fusekit.errors import BuildError
from fusekit.plan.operations import OPERATIONS, operation
from fusekit.spec import ExternSpec, KernelSpec
from fusekit.store.keys import common_fields, with_spec

if TYPE_CHECKING:
    from fusekit.spec import Spec


@dataclass(frozen=True, slots=True)
class Identity:
    """The key fields of any number of specs, as of now: metadata and sources are read once.

    lineinfo: of kernels with line information.
    """

    toolchain: dict[str, str] = field(default_factory=distributions)
    sources: Sources = field(default_factory=Sources)
    lineinfo: bool = False
    _common: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)
    _foreign: Foreign = field(default_factory=Foreign)

    def key_fields(self, spec: Spec) -> dict[str, str]:
        """The labelled key fields of `spec`."""
        roots = roots_of(spec)
        if (spec.arch, *roots) not in self._common:
            self._common[spec.arch, *roots] = common_fields(
                arch=spec.arch,
                toolchain=self.toolchain,
                options=compile_options(spec.arch, lineinfo=self.lineinfo),
                sources=self.sources.closure(roots),
            )
        fields = with_spec(self._common[spec.arch, *roots], spec.device_spec())
        if isinstance(spec, ExternSpec):
            fields = dict(sorted({**fields, **self._foreign.fields(spec)}.items()))
        return fields


def roots_of(spec: Spec) -> tuple[str, ...]:
    """The modules whose sources a key holds, with what they import: the planner, the operation's kernel, and those
    that the plan of a GEMM names. Raises BuildError for an unknown op.
    """
    row = operation(spec.op)
    if row is None:
        raise BuildError(f"op {spec.op!r} has no kernels; it must be one of {', '.join(sorted(OPERATIONS))}")
    return (*row.modules, *(spec.plan.modules if isinstance(spec, KernelSpec) else ()))


def key_fields_for(spec: Spec, *, lineinfo: bool = False) -> dict[str, str]:
    """The labelled key fields of one spec. Raises ToolchainError without the DSL, BuildError for an unknown op."""
    return Identity(lineinfo=lineinfo).key_fields(spec)
