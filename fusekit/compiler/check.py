"""The check of group ends: what `kernels.check` is traced with, and what its arguments are."""

from __future__ import annotations

from fusekit.abi import Dim, ScalarArgument, TensorArgument
from fusekit.compiler.hostfunction import Signature, TracePlan, token_wise
from fusekit.spec.permutation import PermutationSpec

REPORT_WORDS = 8
MOST_GROUPS = 65536


def plan(spec: PermutationSpec) -> TracePlan:
    """Trace plan of moe-check. Imports the DSL."""
    from fusekit.kernels.check.offsets import MoeCheck

    return token_wise(MoeCheck(), ("offsets", "report"), signature(spec.arch))


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
