"""torchtitan: the routed experts of gpt-oss through a layer, with torchtitan's own parameters as they lie.

The layer takes the place of dispatch, experts and combine, so this is for models without expert or tensor parallelism
(data parallelism and FSDP are fine). torchtitan's other models have the gate's and the up projection's weights in two
parameters, w1 and w3; a layer reads both from one.
"""

import copy

import torch
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

import fusekit
from fusekit.interop.torch_layer import operator_of


class FusedExperts(RoutedExperts):
    """Routed experts in one operator. Make them of a built module with `fuse`."""

    def forward(self, x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E):  # noqa: N803
        experts, topk = self.inner_experts, topk_scores_BLK.shape[-1]
        tensors = {
            "x": x_BLD.reshape(-1, x_BLD.shape[-1]),
            "indices": topk_expert_ids_BLK.reshape(-1, topk),
            "weights": topk_scores_BLK.reshape(-1, topk),
            "w1": experts.mlp1_weight_EGD, "b1": experts.mlp1_bias_EG,
            "w2": experts.mlp2_weight_EDF, "b2": experts.mlp2_bias_ED,
        }  # fmt: skip
        y = self.operator(self.operator.cast(tensors, everything=True))  # as torchtitan: parameters cast to bf16
        return y.reshape(x_BLD.shape).type_as(x_BLD)


def fuse(model, layer):
    """Every RoutedExperts of gpt-oss in `model` computes through `layer` from now on; parameters and names stay."""
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.__class__, module.operator = FusedExperts, operator_of(layer)
    return model


def check(layer, device):
    """Both ways on the same parameters: results and gradients."""
    o = layer.options
    torch.manual_seed(0)
    experts = GptOssGroupedExperts.Config(dim=o.hidden, hidden_dim=o.intermediate, num_experts=o.experts)
    dispatcher = LocalTokenDispatcher.Config(num_experts=o.experts, top_k=o.topk)
    theirs = RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher).build().to(device)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=o.hidden**-0.5)
    ours = fuse(copy.deepcopy(theirs), layer)
    x = torch.randn(2, 50, o.hidden, device=device, dtype=torch.bfloat16)
    scores, ids = torch.randn(2, 50, o.experts, device=device).softmax(-1).topk(o.topk)
    counts = torch.bincount(ids.reshape(-1), minlength=o.experts)
    results, wanted = (run(module, x, scores, ids, counts) for module in (ours, theirs))
    for name, right in wanted.items():
        error = ((results[name] - right).norm() / right.norm()).item()
        print(f"{name}: relative error {error:.2e}")
        assert error < 1.5e-2, name


def run(module, x, scores, ids, counts):
    x, scores = (tensor.detach().requires_grad_() for tensor in (x, scores))
    y = module(x, scores, ids, counts)
    torch.sin(3 * y.float()).sum().backward()
    results = {"y": y.detach(), "x": x.grad, "scores": scores.grad}
    results |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: tensor.float() for name, tensor in results.items()}


if __name__ == "__main__":
    check(fusekit.open_library().layer("experts/torchtitan-gpt-oss"), "cuda")
