"""fusekit's experts in torchtitan 0.3, by its override mechanism: no class is patched.

    --override.imports fusekit.interop.torchtitan.routed      # without expert and tensor parallelism
    --override.imports fusekit.interop.torchtitan.grouped     # after any of torchtitan's dispatchers
    --override.imports 'fusekit.interop.torchtitan.routed={"layer": "qwen3/moe"}'

`routed` runs dispatch, experts and combination in one layer; `grouped` the experts on rows that are sorted already.
State dicts stay those of torchtitan's own modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.overrides.fused_swiglu import FusedGroupedExperts, fused_grouped_experts

from fusekit.errors import ArgumentError
from fusekit.interop.experts import Experts, given_parameters, layer_for
from fusekit.interop.torch_layer import Operator, operator_of
from fusekit.library import open_library


@dataclass(frozen=True, slots=True)
class _Weights:
    """The parameters of an experts module as a layer reads them."""

    tensors: dict[str, Any]
    activation: dict[str, Any]

    @classmethod
    def of(cls, module: Any) -> _Weights:
        if isinstance(module, GptOssGroupedExperts):
            names = {"w1": "mlp1_weight_EGD", "b1": "mlp1_bias_EG", "w2": "mlp2_weight_EDF", "b2": "mlp2_bias_ED"}
            activation = {"kind": "swiglu", "alpha": 1.702, "limit": module.swiglu_limit, "up_offset": 1.0}
            return cls({name: _local(getattr(module, path)) for name, path in names.items()}, activation)
        w13 = _local(module.w13)  # [E, F, 2, D]: gate and up interleaved row by row
        return cls({"w1": w13.flatten(1, 2), "w2": _local(module.w2_EDF)}, {"kind": "swiglu"})

    def operator(self, layer: str, topk: int, module: str) -> Operator:
        """The operator of the layer that computes them. Raises ArgumentError, NotBuiltError."""
        experts, hidden, intermediate = self.tensors["w2"].shape
        given, bias = given_parameters(self.activation), "b1" in self.tensors
        wanted = Experts(hidden, intermediate, experts, topk, "bf16", given, "interleaved", bias, "k")
        library = open_library()
        if not layer:
            layer = layer_for(library, "*", wanted, module)
        opened = library.layer(layer, device=None if self.tensors["w2"].is_cuda else "cpu")
        computed = Experts.of(opened.options)
        for field in computed.__slots__:
            if (is_ := getattr(computed, field)) != (should := getattr(wanted, field)):
                raise ArgumentError(
                    f"{opened.name} computes other experts than {module}: {field} is {is_!r}, not {should!r}",
                    argument="layer",
                )
        return operator_of(opened)


class FusedRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """torchtitan's RoutedExperts in one operator. The layer has the model's `topk`."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """layer: its name; default: one that fits."""

        layer: str = ""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layer, self.topk = config.layer, config.token_dispatcher.top_k
        self.operator: Operator | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Raises ArgumentError for a mesh over which experts are spread."""
        for name in ("ep", "tp"):
            if parallel_dims.get_optional_mesh(name) is not None:
                raise ArgumentError(
                    f"the mesh has {name}, and routed has all experts in one process; use --override.imports"
                    " fusekit.interop.torchtitan.grouped",
                    argument=name,
                )
        super().parallelize(parallel_dims)

    def forward(
        self, x_BLD: Any, topk_scores_BLK: Any, topk_expert_ids_BLK: Any, num_local_tokens_per_expert_E: Any
    ) -> Any:
        """As torchtitan calls it, whose shardings go by these names: [B, L, D], [B, L, K] twice, [E] to [B, L, D]."""
        weights = _Weights.of(self.inner_experts)
        if self.operator is None:
            self.operator = weights.operator(self.layer, self.topk, type(self).__name__)
        given = {
            "x": x_BLD.flatten(0, 1), "indices": topk_expert_ids_BLK.flatten(0, 1),
            "weights": topk_scores_BLK.flatten(0, 1),
        }  # fmt: skip
        y = self.operator(self.operator.cast(given | weights.tensors, everything=True))
        return y.view(x_BLD.shape).type_as(x_BLD)


class _Rows:
    """The forward pass on sorted rows; to the layer, whose `topk` is 1, each row is a token with one expert."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.layer: str = config.layer
        self.operator: Operator | None = None

    def forward(self, x_RD: Any, num_tokens_per_expert_E: Any) -> Any:
        """As torchtitan calls it: [R, D] and [E] to [R, D]. Rows beyond the counts give 0. Nothing waits for the
        device.
        """
        weights = _Weights.of(self)
        if self.operator is None:
            self.operator = weights.operator(self.layer, 1, type(self).__name__)
        ends, count = num_tokens_per_expert_E.cumsum(0), x_RD.shape[0]
        expert = torch.searchsorted(ends, torch.arange(count, device=ends.device, dtype=ends.dtype), right=True)
        ones = torch.ones(count, 1, dtype=torch.float32, device=x_RD.device)
        given = {"x": x_RD, "indices": expert[:, None], "weights": ones, **weights.tensors}
        return self.operator(self.operator.cast(given, everything=True)).type_as(x_RD)


class FusedRows(_Rows, FusedGroupedExperts):  # type: ignore[misc]
    """torchtitan's GroupedExperts, with w1 and w3 in one parameter w13 [E, F, 2, D], which is read without a copy."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedGroupedExperts.Config):  # type: ignore[misc]
        """layer: its name; default: one that fits."""

        layer: str = ""


class FusedGptOssRows(_Rows, GptOssGroupedExperts):  # type: ignore[misc]
    """torchtitan's GptOssGroupedExperts, with its own parameters."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):  # type: ignore[misc]
        """layer: its name; default: one that fits."""

        layer: str = ""

    def parallelize(self, parallel_dims: Any) -> None:
        """Raises ArgumentError under tensor parallelism, of which each process would add the whole bias."""
        if parallel_dims.get_optional_mesh("tp") is not None:
            raise ArgumentError(
                "gpt-oss's experts under tensor parallelism have a bias that the layer would add in each process; set"
                " --parallelism.tensor_parallel_degree 1",
                argument="tp",
            )
        super().parallelize(parallel_dims)


@override(  # type: ignore[untyped-decorator]
    target=RoutedExperts.Config, exact=True, description="fusekit: dispatch, experts and combination in a layer"
)
def routed(config: Any, layer: str = "") -> Any:
    """The override of RoutedExperts. layer: its name; default: one that fits."""
    inner = config.inner_experts
    _known(inner)
    inner = fused_grouped_experts(inner) if type(inner) is GroupedExperts.Config else inner
    return derive(config, FusedRoutedExperts.Config, inner_experts=inner, layer=layer)


@override(  # type: ignore[untyped-decorator]
    target=GroupedExperts.Config, description="fusekit: experts on sorted rows in a layer"
)
def grouped(config: Any, layer: str = "") -> Any:
    """The override of GroupedExperts and gpt-oss's. layer: its name; default: one that fits."""
    _known(config)
    if type(config) is GptOssGroupedExperts.Config:
        return derive(config, FusedGptOssRows.Config, layer=layer)
    return derive(fused_grouped_experts(config), FusedRows.Config, layer=layer)


def _known(config: Any) -> None:
    """Raises ArgumentError for experts that are none of torchtitan's in bf16."""
    if type(config) not in (GroupedExperts.Config, FusedGroupedExperts.Config, GptOssGroupedExperts.Config):
        kind = type(config).__qualname__
        raise ArgumentError(
            f"{kind}: fusekit's override is for GroupedExperts and GptOssGroupedExperts in bf16; leave the converter or"
            " the other override out"
        )


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
