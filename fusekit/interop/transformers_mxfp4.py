"""MXFP4 checkpoints of gpt-oss in Transformers, with blocks and scales kept as they are.

Transformers dequantises such a checkpoint, or reorders its blocks for kernels of its own. A model with fusekit's
experts backend keeps them, by their names in the checkpoint, so that it also saves as it was loaded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from fusekit.errors import ArgumentError
from fusekit.interop.transformers import BLOCKS, scales_of
from fusekit.plan.quant import MX_SIDE

_METHOD = "mxfp4"  # of a checkpoint's quantization_config


def install(name: str) -> None:
    """Models whose experts implementation is `name` keep an MXFP4 checkpoint's blocks and scales."""
    _names().add(name)
    theirs = AUTO_QUANTIZER_MAPPING[_METHOD]
    if not issubclass(theirs, _Quantizer) and issubclass(_Quantizer, theirs):
        AUTO_QUANTIZER_MAPPING[_METHOD] = _Quantizer


@cache
def _names() -> set[str]:
    """The experts implementations."""
    return set()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _serves(name: str) -> bool:
    return name in _names()


class Mxfp4Experts(GptOssExperts):  # type: ignore[misc]
    """Experts of gpt-oss whose weights are blocks and scales: w1 [X, 2 I, H / 32, 16] and w2 [X, H, I / 32, 16]."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' call."""
        given = self.config._experts_implementation
        if not _serves(given):
            raise ArgumentError(
                f'experts_implementation is "{given}", and the model keeps MXFP4 weights for fusekit; load it again'
                " with quantization_config=Mxfp4Config(dequantize=True)"
            )
        return super().forward(*args, **kwargs)


class _Quantizer(Mxfp4HfQuantizer):  # type: ignore[misc]
    """Transformers' own, but for such models."""

    _keeps = False
    _given: tuple[Any, Any] = ((), {})

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        self._given = args, kwargs  # what it asks for depends on the model

    def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
        wanted = self.pre_quantized and not self.quantization_config.dequantize
        if not wanted or model.config._experts_implementation not in _names():
            super().validate_environment(*self._given[0], **self._given[1])
            super()._process_model_before_weight_loading(model, *args, **kwargs)
            return
        self._keeps = True
        apart = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        for path, module in model.named_modules():
            if isinstance(module, GptOssExperts) and should_convert_module(path, apart):
                _keep(module)

    def get_weight_conversions(self) -> Any:
        return [] if self._keeps else super().get_weight_conversions()

    def update_weight_conversions(self, weight_conversions: Any, *args: Any) -> Any:
        return weight_conversions if self._keeps else super().update_weight_conversions(weight_conversions, *args)

    def get_state_dict_and_metadata(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._keeps:
            return model.state_dict(), {}
        return super().get_state_dict_and_metadata(model, *args, **kwargs)


def _keep(module: Any) -> None:
    """Gives an experts module blocks and scales in the place of weights."""
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name)  # [X, K, N]
        shape = weight.shape[0], weight.shape[2], weight.shape[1] // MX_SIDE
        delattr(module, name)
        blocks = f"{name}{BLOCKS}"
        for path, extents in ((blocks, (*shape, MX_SIDE // 2)), (scales_of(blocks), shape)):
            tensor = torch.empty(extents, dtype=torch.uint8, device=weight.device)
            module.register_parameter(path, nn.Parameter(tensor, requires_grad=False))
    module.__class__, module.is_transposed = Mxfp4Experts, False
    module._is_hf_initialized = True  # by the checkpoint alone
