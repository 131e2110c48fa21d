"""fusekit in Transformer Engine 2.20: a fused operation for GroupedLinear, scaled activation, GroupedLinear in bf16.

    fusekit.interop.transformer_engine.register()

From then on Transformer Engine's operation fuser (`transformer_engine.pytorch.ops`, Megatron's
`use_transformer_engine_op_fuser`) gives such a sequence to a layer of the store, forward and backward, where one fits.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformer_engine.pytorch.ops import (
    FusedOperation,
    GroupedLinear,
    ScaledClampedQGeGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    register_forward_backward_fusion,
)

from fusekit.errors import FusekitError
from fusekit.interop.experts import Experts, given_parameters, layer_for
from fusekit.interop.torch_layer import Operator, operator_of
from fusekit.library import Library, open_library

_LAYOUTS = {None: "concat", 1: "interleaved", 32: "interleaved-32"}
_LOGGER = logging.getLogger(__name__)


def register(library: Library | None = None, layers: str = "*") -> None:
    """Registers the fused operation with Transformer Engine, before those that it has.

    Call it once, before the first forward pass.

    Parameters
    ----------
    library : Library, optional
        Default: the library of the environment, opened at the first sequence that could be fused.
    layers : str
        Glob of the names of layers to choose from; see `fusekit.interop.transformers.register`.
    """
    opened: list[Library] = [] if library is None else [library]
    known: dict[tuple[Experts, bool], Operator | None] = {}

    def operator_for(experts: Experts, cpu: bool) -> Operator | None:
        key = experts, cpu
        if key not in known:
            known[key] = None
            try:
                if not opened:
                    opened.append(open_library())
                name = layer_for(opened[0], layers, experts, experts.size())
                layer = opened[0].layer(name, device="cpu") if cpu else opened[0].layer(name)
                layer.load(1)
                known[key] = operator_of(layer)
                _LOGGER.info("the layer %s runs %s", name, experts.size())
            except FusekitError as error:
                _LOGGER.warning("Transformer Engine's own operations run: %s", error)
        return known[key]

    def fuse(ops: list[Any], *, recipe: Any) -> list[Any]:
        fused = list(ops)
        position = 0
        while recipe is None and position + 2 < len(fused):
            three = fused[position : position + 3]
            experts = described(*three)
            operator = operator_for(experts, _weights(three[0])[0].device.type == "cpu") if experts else None
            if operator is not None:
                fused[position : position + 3] = [FusekitGroupedMLP(three, operator)]
            position += 1
        return fused

    register_forward_backward_fusion(fuse, prepend=True)


def described(fc1: Any, activation: Any, fc2: Any) -> Experts | None:
    """Three operations as keys of a spec; None if fusekit has no kernels for them."""
    if not (isinstance(fc1, GroupedLinear) and isinstance(fc2, GroupedLinear)):
        return None
    settings: dict[str, Any]
    layout = _LAYOUTS.get(getattr(activation, "glu_interleave_size", None))
    if type(activation) is ScaledSwiGLU:
        settings = {"kind": "swiglu"}
    elif type(activation) is ScaledClampedQGeGLU:
        numbers = activation._clamped
        settings = {
            "kind": "swiglu", "alpha": numbers.alpha, "limit": numbers.limit, "up_offset": numbers.glu_linear_offset,
        }  # fmt: skip
    elif type(activation) is ScaledSReLU:
        settings, layout = {"kind": "srelu"}, "none"
    else:
        return None
    intermediate = fc1.out_features // (1 if layout == "none" else 2)
    plain = not any(
        fc.has_bias or fc._accumulate_into_main_grad or fc.wgrad_store.delay_wgrad_compute() for fc in (fc1, fc2)
    )
    fits = (fc1.num_groups, intermediate, fc1.in_features) == (fc2.num_groups, fc2.in_features, fc2.out_features)
    if (
        layout is None
        or not plain
        or not fits
        or any(w.dtype != torch.bfloat16 for w in (*_weights(fc1), *_weights(fc2)))
    ):
        return None
    return Experts(
        fc1.in_features, intermediate, fc1.num_groups, 1, "bf16", given_parameters(settings), layout, False, "k"
    )  # fmt: skip


def _weights(linear: Any) -> list[Any]:
    """The parameters: one, or one a group."""
    if linear.single_grouped_weight:
        return [linear.weight]
    return [getattr(linear, f"weight{group}") for group in range(linear.num_groups)]


def _stacked(linear: Any) -> Any:
    """[groups, out, in]: a view where the weights lie one after the other, a copy elsewhere."""
    weights = [weight.detach() for weight in _weights(linear)]
    shape = linear.num_groups, linear.out_features, linear.in_features
    if linear.single_grouped_weight:
        return linear.weight.rowwise_data.detach().view(shape)
    size = weights[0].nbytes
    storage = weights[0].untyped_storage()
    if all(
        weight.is_contiguous() and weight.untyped_storage().data_ptr() == storage.data_ptr()
        and weight.data_ptr() == weights[0].data_ptr() + group * size
        for group, weight in enumerate(weights)
    ):  # fmt: skip
        return weights[0].as_strided(shape, (shape[1] * shape[2], shape[2], 1))
    return torch.stack(weights)


class FusekitGroupedMLP(FusedOperation):  # type: ignore[misc]
    """Three operations of Transformer Engine as one layer: each row is a token with one expert."""

    def __init__(self, ops: list[Any], operator: Operator) -> None:
        super().__init__(tuple(ops))
        self._operator = operator

    def fuser_forward(
        self, basic_op_ctxs: list[Any], input_: Any, *, basic_op_extra_inputs: list[Any],
        prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any, basic_op_kwargs: list[Any],
    ) -> tuple[Any, list[Any]]:  # fmt: skip
        fc1, _, fc2 = self.basic_ops
        splits, scales = basic_op_extra_inputs[0][0], basic_op_extra_inputs[1][0]
        rows = input_.reshape(-1, input_.shape[-1])
        groups = torch.arange(fc1.num_groups, dtype=torch.int32, device=rows.device)
        indices = groups.repeat_interleave(splits.to(rows.device), output_size=len(rows))[:, None]
        keep = basic_op_ctxs[0].requires_grad
        inputs = [rows.detach(), scales.detach(), _stacked(fc1), _stacked(fc2)]
        wanted = [True, True, *(any(weight.requires_grad for weight in _weights(fc)) for fc in (fc1, fc2))]
        with torch.set_grad_enabled(keep):
            inputs = [tensor.requires_grad_(keep and asked) for tensor, asked in zip(inputs, wanted, strict=True)]
            x, weights, w1, w2 = inputs
            given = {"x": x, "indices": indices, "weights": weights.reshape(-1, 1), "w1": w1, "w2": w2}
            y = self._operator(self._operator.cast(given))
        basic_op_ctxs[0].graph = y, inputs
        return y.detach().reshape(*input_.shape[:-1], -1), [(), (), ()]

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        y, inputs = basic_op_ctxs[0].graph
        basic_op_ctxs[0].graph = None
        asked = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(y, asked, grad_output.reshape(y.shape)))
        gradients: list[Any] = [next(found) if tensor.requires_grad else None for tensor in inputs]
        dx, dscales, dw1, dw2 = gradients
        dws = [
            [None] * len(_weights(fc)) if dw is None else [dw] if fc.single_grouped_weight else list(dw.unbind())
            for fc, dw in ((self.basic_ops[0], dw1), (self.basic_ops[2], dw2))
        ]
        return dx.reshape(*grad_output.shape[:-1], -1), [dws[0], [], dws[1]], [(None,), (dscales,), (None,)]
