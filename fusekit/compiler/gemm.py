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

    interface = signature(spec)
    fakes = {argument.name: _fake(argument, interface) for argument in interface.arguments}
    hosts: list[HostArgument] = [
        HostTensor(argument.name) if isinstance(argument, TensorArgument) else HostScalar(argument.name)
        for argument in interface.arguments
    ]
    for name in MEMORY:
        if getattr(interface, name) != 0:
            fakes[name] = _memory()
            hosts.append(HostPointer(name))
    arguments = namedtuple("Arguments", fakes)(**fakes)
    numbers = cutlass.Int32(spec.plan.arch.sms), cutlass.Int32(0), CUstream(0)
    return TracePlan(
        function=_function(spec.plan),
        arguments=(arguments, *numbers),
        host_arguments=(*hosts, HostInteger("sm_count"), HostInteger("cluster_margin"), HostStream()),
        signature=interface,
        leaves=(*arguments, *numbers),
    )


def signature(spec: KernelSpec) -> Signature:
    """What the callers of `spec` pass, and the memory that it needs."""
    gemm = spec.plan
    return Signature(
        arch=spec.arch,
        arguments=gemm.arguments,
        dims=gemm.dims,
        workspace=gemm.workspace,
        workspace_zeroed=gemm.workspace > 0,
        scratch=gemm.scratch,
        skip_if_zero=gemm.skip_if_zero,
        constraints=gemm.constraints,
    )


def _function(gemm: GemmPlan) -> Any:
    """The kernel, from the device halves of its operands."""
    kit = import_module(gemm.kit)
    halves = {
        operand.name: getattr(import_module(operand.device), type(operand).__name__)(gemm, operand, kit)
        for operand in gemm.operands
        if operand.on_device
    }
    for half in halves.values():
        half.bind(halves)
    return import_module(gemm.driver).kernel(gemm, halves)


def _fake(argument: Any, launch: Signature) -> Any:
    """The fake argument that the kernel is traced with."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    if isinstance(argument, ScalarArgument):
        return cutlass.Float32(1.0)
    divisors = {dim.name: dim.divisor for dim in launch.dims}
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
    """What the extent is a multiple of, as far as the kernel knows."""
    if isinstance(extent, str):
        return divisors[extent]
    kind, factor, of = extent
    known = divisors[of] if isinstance(of, str) else 1
    return int(factor) * known if kind == "mul" else 1


def _memory() -> Any:
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(cutlass.Int32, (1,), (1,), assumed_align=16)  # its address is all that is taken
