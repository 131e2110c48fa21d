"""Memory that the DSL adds to a host function: kernels of `cute.experimental` that change tensor maps keep them there.

The module says how many pointers were added behind the arguments, and has a function for each kernel that tells how
many bytes it needs. Their content before and after a launch means nothing, so each lies in the record's scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fusekit.compiler import dsl
from fusekit.compiler.hostcall import given
from fusekit.compiler.hostcode.machine import Machine
from fusekit.compiler.hostfunction import HostPointer, TracePlan, plus, rounded_up
from fusekit.errors import BuildError

_ATTRIBUTE, _TOTAL, _QUERY = "lir.kernel_extra_args", "total_added_arguments", "queryDeviceWorkspace"
_ALIGNMENT = 256  # of what lies in a record's scratch


@dataclass(frozen=True, slots=True)
class Implicit:
    """The memory that a module's host function takes besides its arguments: bytes of each piece, and by symbol the
    kernels that take it.
    """

    sizes: tuple[int, ...] = ()
    kernels: frozenset[str] = frozenset()

    def given_to(self, plan: TracePlan) -> TracePlan:
        """The plan with a place in the scratch for each piece."""
        scratch, pointers = plan.signature.scratch, list[HostPointer]()
        for size in self.sizes:
            begin = rounded_up(scratch, _ALIGNMENT)
            pointers.append(HostPointer("scratch", begin))
            scratch = plus(begin, size)
        return replace(
            plan, host_arguments=(*plan.host_arguments, *pointers),
            leaves=(*given(plan), *pointers), signature=replace(plan.signature, scratch=scratch),
        )  # fmt: skip


def implicit(module: Any) -> Implicit:
    """Raises BuildError for sizes that follow the arguments."""
    ir = dsl.ir()
    if _ATTRIBUTE not in module.operation.attributes:
        return Implicit()
    added = {
        item.name: ir.IntegerAttr(item.attr).value for item in ir.DictAttr(module.operation.attributes[_ATTRIBUTE])
    }
    total = added.pop(_TOTAL, 0)
    kernels = frozenset(name for name, count in added.items() if count)
    # Which piece is whose does not matter if each has room for any kernel.
    most = max((_bytes(module, name) for name in kernels), default=0)
    return Implicit((most,) * total, kernels)


def _bytes(module: Any, kernel: str) -> int:
    machine = Machine(module)
    name = f"{kernel}_{_QUERY}"
    if name not in machine.names:
        raise BuildError(f"host code: {kernel} takes a workspace, and no {name} tells how large")
    pair = machine.layouts.of(dsl.ir().Type.parse("!llvm.struct<(i64, i64)>"))
    arguments, answer = machine.allocate(pair), machine.allocate(pair)
    try:
        ending = machine.call(name, [arguments, answer], {})
    except BuildError:  # it reads its arguments
        ending = None
    cells = ending.memory.get(answer.memory, {}) if ending is not None else {}
    size, alignment = (cells.get(at, (0, None))[1] for at in (0, 8))
    if size is None or alignment is None or not (size.is_const and alignment.is_const):
        raise BuildError(
            f"host code: the size of the workspace that cute.experimental gives {kernel} follows the arguments; give"
            " the kernel a workspace as an argument, or make what decides it a Constexpr"
        )
    if _ALIGNMENT % alignment.number:
        raise BuildError(f"host code: {kernel} wants its workspace aligned to {alignment.number} bytes; it has 256")
    return int(size.number)
