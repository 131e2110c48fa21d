"""The permutation family: what `kernels.permutation` is traced with, and what their arguments are."""

from __future__ import annotations

from typing import Any

from fusekit.abi import Dim, TensorArgument
from fusekit.compiler.hostfunction import Signature, TracePlan, token_wise
from fusekit.dtypes import DTYPES
from fusekit.spec.permutation import (
    INDEX,
    PERMUTE,
    PERMUTE_BACKWARD,
    UNPERMUTE,
    UNPERMUTE_BACKWARD,
    VECTOR_BYTES,
    PermutationSpec,
)

MOST_ROWS = 2**31 - 2**16  # row, token and choice numbers of a last, partly empty block stay below 2**31
MOST_COLUMNS = 2**28  # of a row's bytes, an int32 with room for the last piece
LINES = {PERMUTE: 8, UNPERMUTE: 4, UNPERMUTE_BACKWARD: 4}  # of a piece; what a lane holds is in registers, K times
SUMMED = 16  # elements that a lane of the backward of permute holds of each row, and sums

# Operands in the order of the host functions, (name, role); rows are [M, H] or [T, H].
OPERANDS = {
    INDEX: (("indices", "input"), ("offsets", "output"), ("order", "output"), ("inverse", "output"),
            ("token", "output")),
    PERMUTE: (("x", "input"), ("inverse", "input"), ("weights", "input"), ("y", "output"), ("row_scale", "output")),
    UNPERMUTE: (("x", "input"), ("inverse", "input"), ("weights", "input"), ("y", "output")),
    PERMUTE_BACKWARD: (
        ("x", "input"), ("grad_y", "input"), ("inverse", "input"), ("weights", "input"), ("grad_x", "output"),
        ("grad_weights", "output"),
    ),
    UNPERMUTE_BACKWARD: (
        ("grad_y", "input"), ("x", "input"), ("inverse", "input"), ("weights", "input"), ("grad_x", "output"),
        ("grad_weights", "output"),
    ),
}  # fmt: skip
# Whose rows are tokens', and whose are experts'.
TOKEN_ROWS = {
    PERMUTE: ("x",), UNPERMUTE: ("y",), PERMUTE_BACKWARD: ("x", "grad_x"), UNPERMUTE_BACKWARD: ("grad_y",),
}  # fmt: skip


def plan(spec: PermutationSpec) -> TracePlan:
    """Trace plan of a permutation operation. Imports the DSL."""
    operands = (name for name, _ in OPERANDS[spec.op])
    return token_wise(_function(spec), operands, signature(spec))


def signature(spec: PermutationSpec) -> Signature:
    """What the callers of `spec` pass."""
    if spec.op == INDEX:
        return Signature(spec.arch, _tensors(spec), (Dim("T", maximum=MOST_ROWS // spec.topk),))
    size = DTYPES[spec.dtype].bytes
    divisor = VECTOR_BYTES // size
    columns = Dim("H", divisor, divisor, MOST_COLUMNS // size)
    dims = Dim("T", maximum=MOST_ROWS), Dim("M", maximum=MOST_ROWS), columns
    return Signature(spec.arch, _tensors(spec), dims, skip_if_zero=("T",))


def _tensors(spec: PermutationSpec) -> tuple[TensorArgument, ...]:
    made = (_tensor(spec, name, role) for name, role in OPERANDS[spec.op])
    return tuple(tensor for tensor in made if tensor is not None)


def _tensor(spec: PermutationSpec, name: str, role: str) -> TensorArgument | None:
    """The tensor called `name`; None where the spec has none."""
    if (name == "weights" and not (spec.weighted or spec.scaled)) or (name == "row_scale" and not spec.weighted):
        return None
    if name in ("indices", "inverse", "weights", "grad_weights"):
        dtype = "i32" if name in ("indices", "inverse") else "f32"
        return TensorArgument(name, role, dtype, ("T", spec.topk), (spec.topk, 1), alignment=4)
    if name == "offsets":
        return TensorArgument(name, role, "i32", (spec.experts,), (1,), alignment=4)
    if name == "token" and not spec.tokens:
        return None
    if name in ("order", "token"):
        return TensorArgument(name, role, "i32", (["mul", spec.topk, "T"],), (1,), alignment=4)
    if name == "row_scale":
        return TensorArgument(name, role, "f32", ("M",), (1,), alignment=4)
    rows = "T" if name in TOKEN_ROWS[spec.op] else "M"
    divisor = VECTOR_BYTES // DTYPES[spec.dtype].bytes
    return TensorArgument(name, role, spec.dtype, (rows, "H"), (f"{name}.stride0", 1), divisor)


def _lines(spec: PermutationSpec) -> int:
    """Accesses of a warp that make a piece."""
    return SUMMED * DTYPES[spec.dtype].bytes // VECTOR_BYTES if spec.op == PERMUTE_BACKWARD else LINES[spec.op]


def _function(spec: PermutationSpec) -> Any:
    from fusekit.kernels.permutation.index import MoeIndex
    from fusekit.kernels.permutation.permute import MoePermute, MoeUnpermute, MoeUnpermuteBackward

    if spec.op == INDEX:
        return MoeIndex(spec.experts, spec.topk, spec.tokens)
    made = {PERMUTE: MoePermute, UNPERMUTE: MoeUnpermute}.get(spec.op, MoeUnpermuteBackward)
    return made(spec.topk, spec.dtype, spec.weighted, spec.scaled, spec.warps, _lines(spec))
