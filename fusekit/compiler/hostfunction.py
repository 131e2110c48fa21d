"""What a planner hands to the compiler: the function to trace, and what its arguments mean."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fusekit.abi import Argument, Constraint, Dim, Expr, PeersArgument, TensorArgument
from fusekit.abi.arguments import WithArguments
from fusekit.dtypes import DTYPES


@dataclass(frozen=True, slots=True)
class HostTensor:
    """The host function takes a tensor, traced as a fake one.

    argument: the record's tensor whose address is passed. shape, strides: in the order of the fake tensor's modes and
    in elements, expressions as in the record; None: those of the record's argument. A mode that the fake tensor
    fixes must evaluate to the fixed value. large: whether the kernel reaches 2**31 elements over modes whose strides
    are fixed or have 32 bits; else the record refuses such a tensor.
    """

    argument: str
    shape: tuple[Expr, ...] | None = None
    strides: tuple[Expr, ...] | None = None
    large: bool = True


def plus(one: Expr, other: Expr) -> Expr:
    """The sum, as a number where both are."""
    return one + other if isinstance(one, int) and isinstance(other, int) else ("add", one, other)


def rounded_up(size: Expr, step: int) -> Expr:
    """The next multiple of `step`, as a number where `size` is one."""
    return -(-size // step) * step if isinstance(size, int) else ("mul", step, ("ceildiv", size, step))


@dataclass(frozen=True, slots=True)
class HostPointer:
    """The host function takes the address of the record's tensor `argument`, of its workspace or of its scratch, and
    `shift` bytes more.
    """

    argument: str
    shift: Expr = 0

    @property
    def address(self) -> Expr:
        """The address as an expression."""
        base = f"{self.argument}.address"
        return base if self.shift == 0 else ("add", base, self.shift)


@dataclass(frozen=True, slots=True)
class HostMemory(HostPointer):
    """The same, traced as a tensor of which more than the address is dynamic. shape, strides: of its modes."""

    shape: tuple[Expr, ...] = ()
    strides: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class HostScalar:
    """The host function takes the record's scalar `argument`, in that scalar's own type."""

    argument: str


@dataclass(frozen=True, slots=True)
class HostInteger:
    """The host function takes an i32 or i64 computed from dims, strides, i32 scalars, sm_count and cluster_margin."""

    value: Expr
    dtype: str = "i32"


@dataclass(frozen=True, slots=True)
class HostStream:
    """The host function takes the stream to launch on."""


HostArgument = HostTensor | HostPointer | HostScalar | HostInteger | HostStream


@dataclass(frozen=True)
class Signature(WithArguments):
    """The facts of a kernel that its host code does not have: its arguments' names, roles, shapes and divisors, and its
    memory.

    The fields are those of LaunchRecord. Every dim keeps to its minimum, maximum and divisor, and every stride that is
    read to its argument's: the record is simplified by them.
    """

    arch: str
    arguments: tuple[Argument, ...]
    dims: tuple[Dim, ...]
    constraints: tuple[Constraint, ...] = ()
    workspace: Expr = 0
    workspace_zeroed: bool = False
    scratch: Expr = 0
    skip_if_zero: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TracePlan:
    """How to compile one kernel.

    function: the host callable (`cute.jit`). arguments: what `cute.compile` is given, in the order of the parameters:
    fake tensors, numbers, a null stream; None for one that this kernel does without. host_arguments: what each that is
    not None is at run time, in order. signature: what the kernel's callers pass. keywords: given to
    `cute.compile` by name. leaves: the run-time arguments among both, in the host function's order, where they are
    others than those of `arguments` that are not None. options: of the DSL, that change the cubin. traced: what the
    trace was given for i32 scalars that are fixed at it where a launch record has a constant. again: makes this plan
    anew; with it the function may ask for facts of the device while it is traced. asked: what was asked for already
    when it was made (see `hardware.answering`). symbol: what the symbols of its kernels begin with, "" for the DSL's.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    host_arguments: tuple[HostArgument, ...]
    signature: Signature
    keywords: Mapping[str, Any] = field(default_factory=dict)
    leaves: tuple[Any, ...] | None = None
    lifted: Lifted | None = None
    options: str = ""
    traced: Mapping[str, int] = field(default_factory=dict)
    again: Callable[[], TracePlan] | None = None
    asked: Mapping[Expr, int] = field(default_factory=dict)
    symbol: str = ""

    def with_option(self, option: str) -> TracePlan:
        """The same with one more option of the DSL, also where it is traced again."""
        again, lifted = self.again, self.lifted
        return replace(
            self,
            options=f"{self.options} {option}",
            again=None if again is None else lambda: again().with_option(option),
            lifted=None if lifted is None else replace(lifted, plan=lifted.plan.with_option(option)),
        )

    def fixed(self, scalars: Collection[str]) -> TracePlan:
        """The same with these scalars at what the trace was given: callers do not pass them."""

        def fix(host: HostArgument) -> HostArgument:
            if isinstance(host, HostScalar) and host.argument in scalars:
                return HostInteger(self.traced[host.argument])
            if isinstance(host, HostInteger) and isinstance(host.value, str) and host.value in scalars:
                return replace(host, value=self.traced[host.value])
            return host

        left = tuple(argument for argument in self.signature.arguments if argument.name not in scalars)
        traced = {name: value for name, value in self.traced.items() if name not in scalars}
        return replace(
            self,
            host_arguments=tuple(map(fix, self.host_arguments)),
            signature=replace(self.signature, arguments=left),
            traced=traced,
        )


@dataclass(frozen=True, slots=True)
class Lifted:
    """A compile-time integer that becomes `expr` in the record. values: what it is compiled with, by the plan that has
    this and by `plan`.
    """

    expr: Expr
    values: tuple[int, int]
    plan: TracePlan


def token_wise(function: Any, operands: Iterable[str], signature: Signature) -> TracePlan:
    """The plan of a kernel that works token by token. operands: of its host function, which takes None for one that
    `signature` has no tensor of, a tuple of pointers for peers, and then the scalars and the stream. Imports the DSL.

    Of the extents that run time gives, H is as divisible as the strides, others are any number.
    """
    import cutlass
    from cuda.bindings.driver import CUstream
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor, make_ptr

    def fake(tensor: TensorArgument) -> Any:
        step = tensor.stride_divisor
        shape = tuple(
            extent if isinstance(extent, int) else cute.sym_int(divisibility=step if extent == "H" else 1)
            for extent in tensor.shape
        )
        strides = tuple(
            stride if isinstance(stride, int) else cute.sym_int64(divisibility=step) for stride in tensor.strides
        )
        dtype = getattr(cutlass, DTYPES[tensor.dtype].cutlass)
        return make_fake_tensor(dtype, shape, strides, assumed_align=tensor.alignment)

    def windows(peers: PeersArgument) -> tuple[Any, ...]:
        memory = cute.AddressSpace.gmem
        return tuple(make_ptr(cutlass.Uint8, 0, memory, assumed_align=peers.alignment) for _ in range(peers.count))

    given: dict[str, Any] = {}
    hosts: list[HostArgument] = []
    for argument in signature.arguments:
        if isinstance(argument, TensorArgument):
            given[argument.name] = fake(argument)
            hosts.append(HostTensor(argument.name))
        elif isinstance(argument, PeersArgument):
            given[argument.name] = windows(argument)
            hosts += [HostPointer(tensor.name) for tensor in argument.tensors]
    scalars = [getattr(cutlass, DTYPES[scalar.dtype].cutlass)(1) for scalar in signature.scalars]
    hosts += [*(HostScalar(scalar.name) for scalar in signature.scalars), HostStream()]
    arguments = (*map(given.get, operands), *scalars, CUstream(0))
    leaves = [leaf for item in arguments for leaf in (item if isinstance(item, tuple) else (item,))]
    taken = tuple(leaf for leaf in leaves if leaf is not None)
    return TracePlan(function, arguments, tuple(hosts), signature, leaves=taken if signature.peers else None)
