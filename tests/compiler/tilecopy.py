"""A small kernel with every kind of parameter, for the tests of the compiler: it moves tiles of x to y by TMA.

y = x for whole 64 x 64 tiles; table[0] = scale * rows + total. The grid depends on the multiprocessor count.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor

from fusekit.abi import Dim, ScalarArgument, TensorArgument
from fusekit.compiler.hostfunction import HostInteger, HostScalar, HostStream, HostTensor, Signature, TracePlan

TILE = 64
THREADS = 128


class TileCopy:
    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        y: cute.Tensor,
        table: cute.Tensor,
        scale: cutlass.Float32,
        rows: cutlass.Int32,
        total: cutlass.Int64,
        sm_count: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, x.element_type)
        layout = cute.tile_to_shape(atom, (TILE, TILE), order=(0, 1))
        load, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, (TILE, TILE))
        store, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, layout, (TILE, TILE))
        tiles = cute.ceil_div(x.shape[0], TILE)
        self.kernel(load, store, table.iterator, scale, rows, total).launch(
            grid=(cutlass.min(tiles, sm_count), cute.ceil_div(x.shape[1], TILE), 1),
            block=(THREADS, 1, 1),
            cluster=(1, 1, 1),
            smem=2048,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        store: cute.CopyAtom,
        table: cute.Pointer,
        scale: cutlass.Float32,
        rows: cutlass.Int32,
        total: cutlass.Int64,
    ):
        if cutlass.const_expr(self.broken):
            raise ValueError("this kernel cannot be traced")
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            cpasync.prefetch_descriptor(load)
            cpasync.prefetch_descriptor(store)
            out = cute.make_tensor(table, cute.make_layout((1,)))
            out[0] = scale * rows.to(cutlass.Float32) + total.to(cutlass.Float32)


def signature() -> Signature:
    def matrix(name: str, role: str) -> TensorArgument:
        return TensorArgument(name, role, "bf16", ("M", "N"), (f"{name}.stride0", 1), stride_divisor=8)

    return Signature(
        arch="sm_90a",
        arguments=(
            matrix("x", "input"),
            matrix("y", "output"),
            TensorArgument("table", "inout", "f32", ("N",), (1,), alignment=4),
            ScalarArgument("scale", "f32"),
        ),
        dims=(Dim("M"), Dim("N", divisor=8)),
        skip_if_zero=("M", "N"),
    )


def matrix(stride_divisor: int = 8) -> cute.Tensor:
    shape = cute.sym_int(), cute.sym_int(divisibility=8)
    return make_fake_tensor(cutlass.BFloat16, shape, (cute.sym_int64(divisibility=stride_divisor), 1), assumed_align=16)


def plan(spec: object = None) -> TracePlan:
    return TracePlan(
        function=TileCopy(broken=getattr(spec, "kernel", "") == "broken"),
        arguments=(
            matrix(),
            matrix(),
            make_fake_tensor(cutlass.Float32, (cute.sym_int(divisibility=8),), (1,), assumed_align=4),
            cutlass.Float32(1.0),
            cutlass.Int32(1),
            cutlass.Int64(1),
            cutlass.Int32(132),
            cuda.CUstream(0),
        ),
        host_arguments=(
            HostTensor("x"),
            HostTensor("y"),
            HostTensor("table"),
            HostScalar("scale"),
            HostInteger("M"),
            HostInteger(["mul", "M", "N"], "i64"),
            HostInteger("sm_count"),
            HostStream(),
        ),
        signature=signature(),
    )
