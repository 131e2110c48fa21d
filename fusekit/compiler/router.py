"""The router family: what `kernels.router` is traced with, and what the arguments of its operations are."""

from __future__ import annotations

from typing import Any

from fusekit.abi import Dim, Expr, ScalarArgument, TensorArgument
from fusekit.compiler.hostfunction import Signature, TracePlan, token_wise
from fusekit.dtypes import DTYPES
from fusekit.spec.router import AUX, AUX_BACKWARD, AUX_LOSS, AUX_LOSS_BACKWARD, BACKWARD, FORWARD, RouterSpec

VECTOR_BYTES = 16  # the widest access of a lane
MOST_TOKENS = 2**31 - 2**7  # token numbers of the last block stay below 2**31
# Every tensor of an operation, in the order of its host function; a spec takes those that `_tensor` knows for it.
OPERANDS = {
    FORWARD: ("logits", "expert_bias", "probs", "routing_map", "indices", "weights"),
    BACKWARD: ("logits", "routing_map", "grad_probs", "indices", "grad_weights", "grad_logits"),
    AUX: ("logits", "scores", "score_sum", "routing_map"),
    AUX_BACKWARD: ("scores", "score_sum", "grad_scores", "grad_logits"),
    AUX_LOSS: ("scores", "counts", "loss"),
    AUX_LOSS_BACKWARD: ("counts", "grad_loss", "grad_scores"),
}
OUTPUTS = {
    FORWARD: ("probs", "routing_map", "indices", "weights"),
    BACKWARD: ("grad_logits",),
    AUX: ("scores", "score_sum", "routing_map"),
    AUX_BACKWARD: ("grad_logits",),
    AUX_LOSS: ("loss",),
    AUX_LOSS_BACKWARD: ("grad_scores",),
}


def plan(spec: RouterSpec) -> TracePlan:
    """Trace plan of a router operation. Imports the DSL."""
    return token_wise(_function(spec), OPERANDS[spec.op], signature(spec))


def signature(spec: RouterSpec) -> Signature:
    """What the callers of `spec` pass."""
    return Signature(
        arch=spec.arch,
        arguments=(*_tensors(spec), *_scalars(spec)),
        dims=(Dim("T", maximum=MOST_TOKENS),),
        skip_if_zero=() if spec.op == AUX_LOSS else ("T",),
    )


def _scalars(spec: RouterSpec) -> tuple[ScalarArgument, ...]:
    if spec.op in (AUX_LOSS, AUX_LOSS_BACKWARD):
        return ScalarArgument("coefficient", "f32"), ScalarArgument("total_tokens", "i32")
    return (ScalarArgument("scaling_factor", "f32"),) if spec.scaled else ()


def _tensors(spec: RouterSpec) -> tuple[TensorArgument, ...]:
    made = (_tensor(spec, name) for name in OPERANDS[spec.op])
    return tuple(tensor for tensor in made if tensor is not None)


def _tensor(spec: RouterSpec, name: str) -> TensorArgument | None:
    """The tensor called `name`; None where the spec has none."""
    role = "output" if name in OUTPUTS[spec.op] else "input"
    columns: int | None = spec.experts
    dtype = spec.out_dtype
    if name in ("logits", "grad_logits"):
        dtype = spec.dtype
    elif name in ("probs", "grad_probs"):
        columns = spec.experts if spec.outputs == "dense" else None
    elif name == "routing_map":
        bits = spec.routing_map == "bits"
        dtype, columns = ("i32", -(-spec.experts // 32)) if bits else ("u8", spec.experts)
        columns = None if spec.routing_map == "none" else columns
    elif name in ("indices", "weights", "grad_weights"):
        dtype, columns = "i32" if name == "indices" else "f32", spec.topk if spec.outputs == "compact" else None
    elif name == "expert_bias":
        dtype, columns = "f32", spec.experts if spec.expert_bias else None
    elif name == "score_sum":
        dtype, columns = "f32", None if spec.score_function == "softmax" else 1
    if name in ("counts", "loss", "grad_loss"):
        size, dtype = (spec.experts, "i32") if name == "counts" else (1, "f32")
        return TensorArgument(name, role, dtype, (size,), (1,), alignment=min(VECTOR_BYTES, 4 * size & -4 * size))
    if columns is None:
        return None
    if name == "score_sum":
        return TensorArgument(name, role, dtype, ("T",), (1,), alignment=4)
    shape: tuple[Expr, ...] = (columns,) if name == "expert_bias" else ("T", columns)
    strides: tuple[Expr, ...] = (1,) if name == "expert_bias" else (columns, 1)
    row_bytes = columns * DTYPES[dtype].bytes
    return TensorArgument(name, role, dtype, shape, strides, alignment=min(VECTOR_BYTES, row_bytes & -row_bytes))


def _function(spec: RouterSpec) -> Any:
    from fusekit.kernels.router.aux_loss import MoeAuxLoss, MoeAuxLossBackward
    from fusekit.kernels.router.aux_score import RouterAuxScore, RouterAuxScoreBackward
    from fusekit.kernels.router.config import RouterConfig
    from fusekit.kernels.router.topk import RouterTopK
    from fusekit.kernels.router.topk_bwd import RouterTopKBackward

    made = {
        FORWARD: RouterTopK,
        BACKWARD: RouterTopKBackward,
        AUX: RouterAuxScore,
        AUX_BACKWARD: RouterAuxScoreBackward,
        AUX_LOSS: MoeAuxLoss,
        AUX_LOSS_BACKWARD: MoeAuxLossBackward,
    }
    config = RouterConfig(
        experts=spec.experts,
        topk=spec.topk,
        dtype=spec.dtype,
        out_dtype=spec.out_dtype,
        score_function=spec.score_function,
        pre_softmax=spec.pre_softmax,
        expert_bias=spec.expert_bias,
        num_groups=spec.num_groups,
        group_topk=spec.group_topk,
        outputs=spec.outputs,
        routing_map=spec.routing_map,
        warps=spec.warps,
    )
    return made[spec.op](config)
