"""What an operand of a GEMM declares; see the package's docstring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fusekit.dtypes import DTYPES
from fusekit.plan.fields import Broken as Broken
from fusekit.plan.fields import Field
from fusekit.plan.shared import Region

# A spec is read and looked up without `fusekit.abi`.
if TYPE_CHECKING:
    from fusekit.abi import Argument as Argument
    from fusekit.abi import Constraint as Constraint
    from fusekit.abi import Dim as Dim
    from fusekit.abi import Expr as Expr
    from fusekit.plan.gemm import GemmPlan
else:
    Argument = Constraint = Dim = Expr = Any

FORWARD, BACKWARD, WGRAD = "forward", "backward", "wgrad"  # the epilogues
VECTOR = 8  # elements in 16 bytes, the granule of TMA addresses and strides


class Operand:
    """One operand. A subclass has what it declares, and nothing else.

    name: of the operand among those of a kernel. The device half is the class of the same name, in the module of the
    same name in fusekit.kernels.gemm.operands. order: its place among a launch's arguments; parameter: among the
    kernel's parameters, where it is another. epilogues: those that can have it. field: of a spec file; the operand is
    there where its value is not the default. needs_registers: idle warps of the load warpgroup work for it.
    """

    name: ClassVar[str]
    order: ClassVar[int]
    parameter: ClassVar[int | None] = None
    epilogues: ClassVar[tuple[str, ...]]
    field: ClassVar[Field | None] = None
    on_device: ClassVar[bool] = True  # whether it has a device half
    # Of another package: dotted names of the modules of its device half, and of its NumPy twin.
    device_module: ClassVar[str] = ""
    twin: ClassVar[str] = ""
    needs_registers: ClassVar[bool] = False
    blocks_in_turn: ClassVar[bool] = False  # its code for a block of rows is long enough to be worth fetching once
    named_barriers: ClassVar[tuple[str, ...]] = ()  # the sets that it uses; see GemmPlan.named_barrier
    local_rows_first: ClassVar[bool] = False  # tiles whose rows are the rank's own come first
    begins_early: ClassVar[bool] = False  # the launch begins before the one before it in the stream has ended
    in_parts: ClassVar[bool] = False  # the rows are summed in parts, which a second launch adds up

    # For people; none of it reaches a kernel or its key.
    words: ClassVar[Mapping[str, str]] = {}  # what each of its arguments is, for pages and `show`
    # By epilogue: why it cannot have the field. {kind}: the activation, {op}: the operation.
    refused: ClassVar[Mapping[str, str]] = {}

    def asked(self, spec: Any) -> bool:
        """Whether a spec file asks for it."""
        return self.field is not None and spec.operands[self.field.name] != self.field.default

    def present(self, plan: GemmPlan) -> bool:
        """Whether a kernel with one of its epilogues has it."""
        return self.field is None or self.asked(plan.spec)

    def rules(self, spec: Any) -> Iterable[Broken]:
        """What a spec that asks for it breaks: (field, value, rule)."""
        why = self.refused.get(spec.epilogue)
        if why is not None and self.field is not None:
            name = self.field.name
            yield name, spec.operands[name], why.format(kind=spec.activation.kind, op=spec.op)

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        """What a launch passes for it."""
        return ()

    def dims(self, plan: GemmPlan) -> tuple[Dim, ...]:
        """Extents that its arguments alone have."""
        return ()

    def constraints(self, plan: GemmPlan) -> tuple[Constraint, ...]:
        """What its arguments must keep to."""
        return ()

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        """Its shared memory, with a pipeline of `stages`."""
        return ()

    def barriers(self, plan: GemmPlan) -> tuple[int, ...]:
        """Its barriers in shared memory, by how many arrivals each waits for."""
        return ()

    def reading_warps(self, plan: GemmPlan) -> int:
        """Warps of the load warpgroup that read tiles and stages for it."""
        return 0

    def following_warps(self, plan: GemmPlan) -> int:
        """Warps of the load warpgroup that read tiles alone for it."""
        return 0

    def warps(self, plan: GemmPlan) -> tuple[int, ...]:
        """Idle warps of the load warpgroup, 2 and 3, that work for it until the tiles are over, so for no other."""
        return ()

    def fourth(self, plan: GemmPlan) -> bool:
        """Whether a fourth warpgroup works for it, and for no other."""
        return False

    def filling_threads(self, plan: GemmPlan) -> int:
        """Threads of the load warpgroup, whole warps, that fill stages for it and arrive when they have."""
        return 0

    def workspace(self, plan: GemmPlan) -> int:
        """Bytes of the workspace, which is zero between launches, that end with its own words."""
        return 0

    def scratch(self, plan: GemmPlan) -> tuple[Expr, ...]:
        """32-bit words of scratch memory, of any content."""
        return ()

    @property
    def device(self) -> str:
        """Dotted name of the module of its device half."""
        return self.device_module or type(self).__module__.replace("fusekit.plan.", "fusekit.kernels.gemm.")

    @property
    def outside(self) -> bool:
        """Whether it is of another package."""
        return type(self).__module__.partition(".")[0] != "fusekit"

    @property
    def modules(self) -> tuple[str, ...]:
        """Dotted names of the modules that make it up."""
        module = type(self).__module__
        return (module, self.device) if self.on_device else (module,)


def scalar(name: str) -> Argument:
    """A float32 number."""
    from fusekit.abi import ScalarArgument

    return ScalarArgument(name, "f32")


def tensor(
    name: str, role: str, dtype: str, shape: tuple[Expr, ...], strides: tuple[Expr, ...], divisor: int = 1,
    alignment: int = 16, in_place_of: str = "",
) -> Argument:  # fmt: skip
    """A tensor, as `fusekit.abi.TensorArgument` has it."""
    from fusekit.abi import TensorArgument

    return TensorArgument(name, role, dtype, shape, strides, divisor, alignment, in_place_of)


def rows(name: str, role: str, dtype: str, columns: Expr, count: str = "M", in_place_of: str = "") -> Argument:
    """A row-major tensor with a row for each token, `count` of them."""
    shape, strides, divisor = (count, columns), (f"{name}.stride0", 1), 16 // DTYPES[dtype].bytes
    return tensor(name, role, dtype, shape, strides, divisor, in_place_of=in_place_of)


def factor(name: str, plan: GemmPlan, columns: Expr) -> Argument:
    """A factor of the product with a row for each token; T of them where an index chooses its rows."""
    return rows(name, "input", plan.factors[0], columns, "T" if plan.gather == name else "M")


def vector(name: str, role: str, dtype: str, extent: Expr, size: int = 4) -> Argument:
    """A contiguous vector of elements of `size` bytes."""
    return tensor(name, role, dtype, (extent,), (1,), alignment=size)


def by_group(name: str, role: str, dtype: str, plan: GemmPlan, columns: Expr, size: int = 4) -> Argument:
    """Contiguous rows, one for each group; a dense GEMM has one group, and no dim for it."""
    strides: tuple[Expr, ...] = (columns, 1) if plan.grouped else (1,)
    return tensor(name, role, dtype, (*plan.leading, columns), strides, alignment=size)
