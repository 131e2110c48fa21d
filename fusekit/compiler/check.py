"""The check of group ends: what `kernels.check` is traced with, and what its arguments are."""

from __future__ import annotations

from fusekit.abi import Dim, ScalarArgument, TensorArgument
from fusekit.compiler.hostfunction import HostScalar, HostStream, HostTensor, Signature, TracePlan
from fusekit.spec.permutation import PermutationSpec

REPORT_WORDS = 8
MOST_GROUPS = 65536


def plan(spec: PermutationSpec) -> TracePlan:
    """Trace plan of moe-check. Imports the DSL."""
    import cutlass
    from cuda.bindings.driver import CUstream
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    from fusekit.kernels.check.offsets import MoeCheck

    function = MoeCheck()
    offsets = make_fake_tensor(cutlass.Int32, (cute.sym_int(),), (1,), assumed_align=4)
    report = make_fake_tensor(cutlass.Int32, (REPORT_WORDS,), (1,), assumed_align=4)
    return TracePlan(
        function=function,
        arguments=(offsets, report, cutlass.Int32(0), CUstream(0)),
        host_arguments=(HostTensor("offsets"), HostTensor("report"), HostScalar("rows"), HostStream()),
        signature=signature(spec.arch),
    )


def signature(arch: str) -> Signature:
    """What the callers of moe-check pass."""
    return Signature(
        arch=arch,
        arguments=(
            TensorArgument("offsets", "input", "i32", ("E",), (1,), alignment=4),
            TensorArgument("report", "inout", "i32", (REPORT_WORDS,), (1,), alignment=4),
            ScalarArgument("rows", "i32"),
        ),
        dims=(Dim("E", minimum=1, maximum=MOST_GROUPS),),
    )
