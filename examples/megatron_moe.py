"""Megatron Core: GroupedMLP through a layer, with Megatron's own parameters as they lie.

The module gets rows that a dispatcher of Megatron's has sorted by expert, so any dispatcher and expert parallelism
work: to the layer each row is a token with one expert. TEGroupedMLP has a parameter for each expert; a layer reads
those of all experts from one.

    experts = ModuleSpec(module=FusedGroupedMLP, params={"layer": fusekit.open_library().layer("experts/megatron")})
"""

from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core.transformer.moe import experts as megatron
from megatron.core.transformer.transformer_config import TransformerConfig

import fusekit
from fusekit.interop.torch_layer import operator_of


class FusedGroupedMLP(megatron.GroupedMLP):
    """GroupedMLP without the package grouped_gemm, and without a wait for the counts."""

    def __init__(self, num_local_experts, config, pg_collection=None, *, layer):
        with mock.patch.object(megatron.gg, "assert_grouped_gemm_is_available"):
            super().__init__(num_local_experts, config, pg_collection)
        self.operator = operator_of(layer)

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        rows, count, hidden = permuted_local_hidden_states, self.num_local_experts, self.config.hidden_size
        experts = torch.arange(count, device=rows.device)
        tensors = {
            "x": rows,
            "indices": experts.repeat_interleave(tokens_per_expert.to(rows.device), output_size=len(rows))[:, None],
            "weights": permuted_probs[:, None],
            "w1": self.weight1.view(count, hidden, -1), "w2": self.weight2.view(count, -1, hidden),
        }  # fmt: skip
        return self.operator(self.operator.cast(tensors)), None


def check(layer, device):
    """Both ways on the same parameters; Megatron's forward with its grouped GEMM as a loop."""
    o = layer.options
    config = TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=o.hidden, moe_ffn_hidden_size=o.intermediate, bf16=True,
        num_moe_experts=o.experts, add_bias_linear=False, gated_linear_unit=True, params_dtype=torch.bfloat16,
        activation_func=torch.nn.functional.silu, use_cpu_initialization=True, perform_initialization=False,
    )  # fmt: skip
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(ep=alone, expt_tp=alone, expt_dp=alone)
    module = FusedGroupedMLP(o.experts, config, groups, layer=layer).to(device)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=o.hidden**-0.5)
    counts = torch.tensor([30, 0, 17, 1, 40, 0, 9, 3])
    rows = torch.randn(100, o.hidden, device=device, dtype=torch.bfloat16)
    probs = torch.rand(100, device=device)
    results = run(module, rows, counts, probs)
    with mock.patch.object(megatron.gg, "ops", SimpleNamespace(gmm=loop), create=True):
        wanted = run(module, rows, counts, probs, megatron.GroupedMLP.forward)
    for name, right in wanted.items():
        error = ((results[name] - right).norm() / right.norm()).item()
        print(f"{name}: relative error {error:.2e}")
        assert error < 1.5e-2, name


def loop(rows, w, counts, trans_b):
    return torch.cat([part @ w[expert] for expert, part in enumerate(rows.split(counts.tolist()))])


def run(module, rows, counts, probs, forward=FusedGroupedMLP.forward):
    rows, probs = (tensor.detach().requires_grad_() for tensor in (rows, probs))
    module.zero_grad()
    y, _ = forward(module, rows, counts, probs)
    torch.sin(3 * y.float()).sum().backward()
    results = {"y": y.detach(), "x": rows.grad, "probs": probs.grad}
    results |= {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    return {name: tensor.float() for name, tensor in results.items()}


if __name__ == "__main__":
    check(fusekit.open_library().layer("experts/megatron"), "cuda")
