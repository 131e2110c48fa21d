"""FP8 weights of a module that are kept between calls, and made again when its weights change."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from fusekit.interop.torch_layer import DTYPES, Operator
from fusekit.interop.torch_moe import at, joined

_HOLDERS: WeakSet[Any] = WeakSet()  # modules with a `_fusekit_fp8`


class HeldFp8:
    """FP8 weights of one module in memory that stays where it is, so that CUDA graphs and compiled code can read it.

    operator: the layer's. paths: of its weights from the module, by the layer's names; two are a gate and an up
    projection. tensors: `operator.fp8`, in order.
    """

    def __init__(self, operator: Operator, paths: Mapping[str, tuple[str, ...]], device: Any) -> None:
        self.operator, self.name = operator, operator.name
        self.paths = {name: paths[name] for name in operator.weights}
        self.tensors = operator.new_fp8(device)
        self._state: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the module, such as one of averaged weights, holds none

    def refresh(self, module: Any, *, anew: bool = False) -> bool:
        """Whether the tensors are those of the module's weights now. They are made again where a weight has changed as
        far as PyTorch sees it, or `anew`; but not inside a capture, where only a graph's replay would make them.
        """
        _HOLDERS.add(module)
        parts = {name: [at(module, path) for path in paths] for name, paths in self.paths.items()}
        state = [_version(part) for each in parts.values() for part in each]
        if state == self._state and not anew:
            return True
        device = next(iter(parts.values()))[0].device
        captured = self._is_captured(device)
        if captured and not anew:
            self._state = None
            return False
        if device != self.tensors[0].device:
            self.tensors = self.operator.new_fp8(device)
        buffers = self.operator.layer.record.buffers
        with torch.no_grad():
            weights = [
                (joined(each[0], each[1], "concat") if len(each) > 1 else each[0]).to(DTYPES[buffers[name].dtype])
                for name, each in parts.items()
            ]
        self.operator.quantise_into(weights, self.tensors)
        increment_version(self.tensors)
        if not captured or self._state is not None:  # else they are of older weights until a replay
            self._state = state
        return True

    @staticmethod
    def _is_captured(device: Any) -> bool:
        return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())

    def outdate(self) -> None:
        """The next call makes the tensors again."""
        self._state = None


def hold(module: Any, operator: Operator, paths: Mapping[str, tuple[str, ...]], device: Any) -> None:
    """Gives the module FP8 weights, made now, after each step of an optimiser and when a state dict is loaded."""
    _watch()
    held = getattr(module, "_fusekit_fp8", None)
    if held is None or held.operator is not operator:
        if not hasattr(module, "_fusekit_fp8"):
            module.register_load_state_dict_post_hook(_loaded)
        held = HeldFp8(operator, paths, device)
    held.refresh(module, anew=True)
    module._fusekit_fp8 = held


def _loaded(module: Any, _: Any) -> None:
    _changed(module)


def _version(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


@cache
def _watch() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Any, *_: Any) -> None:
    """After a step, also one that is captured: fused optimisers do not raise the versions of what they write."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in list(_HOLDERS):
        held = getattr(module, "_fusekit_fp8", None)
        paths = held.paths.values() if held is not None else ()
        if any(id(at(module, path)) in stepped for each in paths for path in each):
            _changed(module)


def _changed(module: Any) -> None:
    held = module._fusekit_fp8
    if held is None:
        return
    if all(
        type(at(module, path)) in (torch.Tensor, torch.nn.Parameter) for each in held.paths.values() for path in each
    ):
        held.refresh(module, anew=True)
    else:  # sharded, and whole in the next call
        held.outdate()
