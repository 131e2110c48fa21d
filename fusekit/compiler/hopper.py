"""What the Hopper families share: limits of their dims, and the fake arguments of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusekit.abi import Expr, TensorArgument
from fusekit.compiler.hostfunction import (
    HostArgument,
    HostInteger,
    HostPointer,
    HostScalar,
    HostStream,
    HostTensor,
    Signature,
)
from fusekit.dtypes import DTYPES
from fusekit.spec import KernelSpec

ELEMENT = 2  # bytes of bf16 and fp16
VECTOR = 8  # elements in 16 bytes, the granule of TMA addresses and strides
BIG = 2**30  # rows of a ragged tensor map; see kernels/epilogue.py
MOST_GROUPS = 2**16
COUNTER_BYTES = 8  # two int32 of the dynamic schedule
SUM_BYTES = 20  # the same, and three int32 of the sums of gradients
GLU_SCALARS = ("act_alpha", "act_limit", "act_up_offset")


def weights(spec: KernelSpec, n: Expr) -> TensorArgument:
    """The argument w, [E, N, K] or [E, K, N]; dense without E."""
    shape: tuple[Expr, ...] = (n, "K") if spec.b_major == "k" else ("K", n)
    if spec.op == "grouped-gemm":
        return TensorArgument("w", "input", spec.dtype, ("E", *shape), ("w.stride0", "w.stride1", 1), VECTOR)
    return TensorArgument("w", "input", spec.dtype, shape, ("w.stride0", 1), VECTOR)


def config(spec: KernelSpec, **own: Any) -> Any:
    """What the kernel is traced for: a `GemmConfig` of what all families have, and of a family's `own` fields. Imports
    the DSL.
    """
    from fusekit.kernels.config import GemmConfig

    kind, approximate = spec.activation.kind, spec.activation.approximate
    fields: dict[str, Any] = {
        "grouped": spec.op == "grouped-gemm",
        "dtype": spec.dtype,
        "out_dtype": spec.out_dtype,
        "b_major": spec.b_major,
        "activation": kind if approximate == "none" else f"{kind}:{approximate}",
        "row_scale": spec.row_scale,
        "tile": spec.tile,
        "cluster": spec.cluster,
        "pingpong": spec.mainloop == "pingpong",
        "stages": spec.budget.stages,
        "epilogue_box": spec.budget.epilogue_box,
        "dynamic": spec.schedule == "dynamic",
    }
    return GemmConfig(**(fields | own))


def fake_arguments(signature: Signature, operands: Sequence[str]) -> tuple[Any, ...]:
    """What the kernel's host function is traced with: its operands (None where the signature has none; `workspace` and
    `scratch` are operands too), SM count, cluster margin, stream. Imports the DSL."""
    import cutlass
    from cuda.bindings.driver import CUstream
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    divisors = {dim.name: dim.divisor for dim in signature.dims}
    tensors = {tensor.name: tensor for tensor in signature.tensors}
    scalars = {scalar.name for scalar in signature.scalars}

    def fake(name: str) -> Any:
        if name in scalars:
            return cutlass.Float32(1.0)
        if name in ("workspace", "scratch") and getattr(signature, name) != 0:
            return make_fake_tensor(cutlass.Int32, (1,), (1,), assumed_align=16)  # its address is all that is taken
        if name not in tensors:
            return None
        tensor = tensors[name]
        shape = tuple(
            cute.sym_int(divisibility=divisors[extent] if isinstance(extent, str) else 2 * divisors["I"])
            for extent in tensor.shape
        )
        strides = tuple(
            1
            if stride == 1
            else cute.sym_int64(divisibility=tensor.stride_divisor if tensor.reads_stride(index) else 1)
            for index, stride in enumerate(tensor.strides)
        )
        dtype = getattr(cutlass, DTYPES[tensor.dtype].cutlass)
        return make_fake_tensor(dtype, shape, strides, assumed_align=tensor.alignment)

    return (*(fake(name) for name in operands), cutlass.Int32(132), cutlass.Int32(0), CUstream(0))


def host_arguments(signature: Signature, operands: Sequence[str]) -> tuple[HostArgument, ...]:
    """What each of the traced arguments is at run time; those that are None have no entry."""
    tensors = {tensor.name for tensor in signature.tensors}
    scalars = {scalar.name for scalar in signature.scalars}
    arguments: list[HostArgument] = []
    for name in operands:
        if name in tensors:
            arguments.append(HostTensor(name))
        elif name in scalars:
            arguments.append(HostScalar(name))
        elif name in ("workspace", "scratch") and getattr(signature, name) != 0:
            arguments.append(HostPointer(name))
    return (*arguments, HostInteger("sm_count"), HostInteger("cluster_margin"), HostStream())
