"""What a family module hands to the compiler: the function to trace and the launch record that it must agree with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusekit.abi import Expr, LaunchRecord


@dataclass(frozen=True, slots=True)
class HostTensor:
    """The host function takes a tensor, traced as a fake one.

    argument: the record's tensor whose address is passed. shape, strides: in the order of the fake tensor's modes and
    in elements, expressions as in the record; None stands for the record argument's own. A mode that the fake tensor
    fixes must evaluate to the fixed value.
    """

    argument: str
    shape: tuple[Expr, ...] | None = None
    strides: tuple[Expr, ...] | None = None


@dataclass(frozen=True, slots=True)
class HostPointer:
    """The host function takes the address of the record's tensor `argument`, of its workspace or of its scratch."""

    argument: str


@dataclass(frozen=True, slots=True)
class HostScalar:
    """The host function takes the record's scalar `argument`, in that scalar's own type."""

    argument: str


@dataclass(frozen=True, slots=True)
class HostInteger:
    """The host function takes an i32 or i64 computed from dims, strides, sm_count and cluster_margin."""

    value: Expr
    dtype: str = "i32"


@dataclass(frozen=True, slots=True)
class HostStream:
    """The host function takes the stream to launch on."""


HostArgument = HostTensor | HostPointer | HostScalar | HostInteger | HostStream


@dataclass(frozen=True, slots=True)
class TracePlan:
    """How to compile one kernel.

    function: the host callable (`cute.jit`) that launches exactly one kernel. arguments: what `cute.compile` is given,
    in the order of the parameters: fake tensors, numbers, a null stream; None for one that this kernel does without.
    host_arguments: what each that is not None stands for at run time, in order. record: the launch record, its symbol
    empty and its offsets -1; its parameters stand in the order of the kernel's.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    host_arguments: tuple[HostArgument, ...]
    record: LaunchRecord
