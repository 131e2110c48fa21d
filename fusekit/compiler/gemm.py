"""GEMMs: what a kernel is traced with, and what its arguments are. All of it is in the kernel's plan."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from fusekit.abi import ScalarArgument, TensorArgument
from fusekit.compiler.hostfunction import (
    HostArgument,
    HostInteger,
    HostPointer,
    HostScalar,
    HostStream,
    HostTensor,
    Signature,
    TracePlan,
)
from fusekit.dtypes import DTYPES
from fusekit.plan.gemm import GemmPlan
from fusekit.spec.model import KernelSpec

MEMORY = ("workspace", "scratch")


def plan(spec: KernelSpec) -> TracePlan:
    """Trace plan of a GEMM. Imports the DSL."""
    import cutlass
    from cuda.bindings.driver import CUstream

    made = signature(spec)
    fakes = {argument.name: _fake(argument, made) for argument in made.arguments}
    hosts: list[HostArgument] = [
        HostTensor(argument.name) if isinstance(argument, TensorArgument) else HostScalar(argument.name)
        for argument in made.arguments
    ]
    for name in MEMORY:
        if getattr(made, name) != 0:
            fakes[name] = _memory()
            hosts.append(HostPointer(name))
    arguments = namedtuple("Arguments", fakes)(**fakes)
    numbers = cutlass.Int32(spec.plan.arch.sms), cutlass.Int32(0), CUstream(0)
    return TracePlan(
        function=_function(spec.plan),
        arguments=(arguments, *numbers),
        host_arguments=(*hosts, HostInteger("sm_count"), HostInteger("cluster_margin"), HostStream()),
        signature=made,
        leaves=(*arguments, *numbers),
    )


def signature(spec: KernelSpec) -> Signature:
    """What the callers of `spec` pass, and the memory that it needs."""
    made = spec.plan
    return Signature(
        arch=spec.arch,
        arguments=made.arguments,
        dims=made.dims,
        workspace=made.workspace,
        workspace_zeroed=made.workspace > 0,
        scratch=made.scratch,
        skip_if_zero=made.skip_if_zero,
        constraints=made.constraints,
    )


def _function(made: GemmPlan) -> Any:
    """The kernel, from the device halves of its operands."""
    kit = import_module(made.kit)
    halves = {
        operand.name: getattr(import_module(operand.device), type(operand).__name__)(made, operand, kit)
        for operand in made.operands
        if operand.on_device
    }
    for half in halves.values():
        half.bind(halves)
    return import_module(made.driver).kernel(made, halves)


def _fake(argument: Any, made: Signature) -> Any:
    """What stands for an argument while the kernel is traced."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    if isinstance(argument, ScalarArgument):
        return cutlass.Float32(1.0)
    divisors = {dim.name: dim.divisor for dim in made.dims}
    shape = tuple(
        extent if isinstance(extent, int) else cute.sym_int(divisibility=_divisor(extent, divisors))
        for extent in argument.shape
    )
    strides = tuple(
        1
        if stride == 1
        else cute.sym_int64(divisibility=argument.stride_divisor if argument.reads_stride(index) else 1)
        for index, stride in enumerate(argument.strides)
    )
    return make_fake_tensor(
        getattr(cutlass, DTYPES[argument.dtype].cutlass), shape, strides, assumed_align=argument.alignment
    )


def _divisor(extent: Any, divisors: Mapping[str, int]) -> int:
    """What the extent is a multiple of, as far as the kernel is told."""
    if isinstance(extent, str):
        return divisors[extent]
    kind, factor, of = extent
    known = divisors[of] if isinstance(of, str) else 1
    return int(factor) * known if kind == "mul" else 1


def _memory() -> Any:
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(cutlass.Int32, (1,), (1,), assumed_align=16)  # its address is all that is taken
