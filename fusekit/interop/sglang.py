"""fusekit as an MoE runner of SGLang 0.5.23: a plugin, by the entry point `sglang.srt.plugins`.

SGLang keeps routing and communication. Where its runner for bf16 experts, or for FP8 experts with 128 x 128 scales,
would be Triton's, or for MXFP4 experts that of triton_kernels, and a layer of the store computes these experts, fusekit
runs them, on SGLang's weights and scales as they are; elsewhere SGLang's choice stays.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from fusekit.interop.experts import Experts, given_parameters
from fusekit.interop.serving import Chooser
from fusekit.library import Library

NAME = "fusekit"
"""Of the runner: --moe-runner-backend fusekit, which differs from auto in what a refusal says alone."""

TOKENS = 8192
"""Most tokens of a step that kernels are loaded for before the first."""

_METHOD = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod"
_FP8_METHOD = "sglang.srt.layers.quantization.fp8.Fp8MoEMethod"
_MXFP4_METHOD = "sglang.srt.layers.quantization.mxfp4.Mxfp4MoEMethod"
_FP8, _MXFP4 = "fp8-block", "mxfp4"  # of a layer's weights
_GATED: dict[str, dict[str, Any]] = {"gelu": {"kind": "geglu"}, "gelu_tanh": {"kind": "geglu", "approximate": "tanh"}}
_PLAIN: dict[str, dict[str, Any]] = {"silu": {"kind": "silu"}, "gelu": {"kind": "gelu"}, "relu2": {"kind": "srelu"}}


def register(library: Library | None = None, layers: str = "*") -> None:
    """Lets SGLang's unquantized, FP8 and MXFP4 experts choose fusekit. The entry point calls it in each process.

    Parameters
    ----------
    library : Library, optional
        Default: the library of the environment, opened when the first MoE layer is made.
    layers : str
        Glob of the names of layers to choose from. If several fit, one without a backward pass is taken, then the
        first by name.
    """
    if NAME in MOE_RUNNER_BACKEND_CHOICES:
        return
    MOE_RUNNER_BACKEND_CHOICES.append(NAME)
    chooser = Chooser(library, layers, logging.getLogger("sglang.fusekit"))

    def create_moe_runner(original: Any, method: Any, layer: Any, moe_runner_config: Any) -> None:
        original(method, layer, moe_runner_config)
        _replace(chooser, method, layer, moe_runner_config)

    def create_mxfp4_runner(original: Any, method: Any, layer: Any, moe_runner_config: Any) -> None:
        from sglang.srt.layers.moe.utils import get_moe_runner_backend

        if get_moe_runner_backend().value == NAME:  # a name that the method does not know
            _use_triton(method, moe_runner_config, mxfp4=getattr(layer, "moe_ep_size", 1) == 1)
        else:
            original(method, layer, moe_runner_config)
        _replace(chooser, method, layer, moe_runner_config)

    def process_mxfp4(original: Any, method: Any, layer: Any) -> None:
        if not _is_served(method):  # else blocks and scales stay as they are
            original(method, layer)

    def apply(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
        if not _is_served(method):
            return original(method, layer, dispatch_output)
        return method.runner.run(dispatch_output, method.get_triton_quant_info(layer))

    def apply_mxfp4(original: Any, method: Any, layer: Any, dispatch_output: Any) -> Any:
        if not _is_served(method):
            return original(method, layer, dispatch_output)
        return method.runner.run(dispatch_output, _mxfp4_info(layer))

    for target, hook in (
        (f"{_METHOD}.create_moe_runner", create_moe_runner),
        (f"{_FP8_METHOD}.create_moe_runner", create_moe_runner),
        (f"{_FP8_METHOD}.apply", apply),  # which knows its own runners alone
        (f"{_MXFP4_METHOD}.create_moe_runner", create_mxfp4_runner),
        (f"{_MXFP4_METHOD}.process_weights_after_loading", process_mxfp4),
        (f"{_MXFP4_METHOD}.apply", apply_mxfp4),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


def described(config: Any, bias: bool, weights: str = "none") -> Experts | None:
    """SGLang's experts as keys of a spec; None if fusekit has no kernels for their activation or dtype."""
    import torch

    activation, layout = _GATED.get(config.activation), "concat"
    if not config.is_gated:
        activation, layout = _PLAIN.get(config.activation), "none"
    elif config.activation == "silu":
        activation = {"kind": "swiglu", "limit": config.gemm1_clamp_limit}
        if config.gemm1_alpha is not None:  # that of gpt-oss, whose up projection has 1 added to it
            activation |= {"alpha": config.gemm1_alpha, "up_offset": 1.0}
            layout = "interleaved" if config.gate_up_interleaved else "concat"
        elif config.gemm1_clamp_limit is None:
            activation["limit"] = config.swiglu_limit
    if activation is None or config.params_dtype is not torch.bfloat16:
        return None
    return Experts(
        config.hidden_size, config.intermediate_size_per_partition, config.num_local_experts, config.top_k, "bf16",
        given_parameters(activation), layout, bias, "k", weights=weights,
    )  # fmt: skip


def _refusal(config: Any, experts: Experts | None) -> str:
    """Why experts are not fusekit's; empty if they can be."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend
    from sglang.srt.runtime_context import get_lora

    if experts is None:
        return f"no kernels for {config.activation} (is_gated = {config.is_gated}) of {config.params_dtype}"
    if not get_moe_a2a_backend().is_none():
        return f"none for the layout of --moe-a2a-backend {get_moe_a2a_backend().value}"
    if get_lora().enable_lora or get_lora().lora_paths:
        return "none for LoRA"
    if config.apply_router_weight_on_input or config.no_combine:
        return "none for weights on the input or rows that are not combined"
    return ""


def _replace(chooser: Chooser, method: Any, layer: Any, config: Any) -> None:
    """Gives a method of Triton's the runner of fusekit, if there is a layer."""
    from sglang.srt.layers.moe.moe_runner import MoeRunner
    from sglang.srt.layers.moe.utils import get_moe_runner_backend

    wanted = get_moe_runner_backend()
    if method.runner is None and wanted.value == NAME:  # a name that the method for FP8 experts does not know
        _use_triton(method, config)
        method._owns_moe_runner = True
    weights = _weights(method)
    if method.runner is None:
        return
    runner = method.runner.runner_backend
    if not (runner.is_triton() or (runner.is_triton_kernels() and weights == _MXFP4)):
        return
    if not (wanted.is_auto() or wanted.value == NAME or (runner.is_triton_kernels() and _was_auto())):
        return
    if weights is None:
        chooser.refuse("no kernels for FP8 weights other than a checkpoint's e4m3 with 128 x 128 scales")
        return
    experts = described(config, method.with_bias, weights)
    if experts is not None and weights == _MXFP4:  # the method fills up with zeros
        experts = replace(experts, hidden=method.hidden_size, intermediate=method.intermediate_size_per_partition)
    if why := _refusal(config, experts):
        chooser.refuse(why)
        return
    assert experts is not None
    served = chooser.served(experts, TOKENS, layer.w13_weight.device.type == "cpu")
    if served is not None:
        method.runner = MoeRunner(_backend(), config)
        method.runner.runner_core.served = served


def _was_auto() -> bool:
    """Whether SGLang chose the runner of triton_kernels itself, as it does for gpt-oss."""
    from sglang.srt.runtime_context import get_server_args

    return bool(get_server_args().moe_runner_backend == "auto")  # as it was given


def _use_triton(method: Any, config: Any, mxfp4: bool = False) -> None:
    """Gives a method the runner that runs where fusekit's does not. mxfp4: that of triton_kernels, if it is there."""
    from sglang.srt.layers.moe.moe_runner import MoeRunner
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.utils import is_triton_kernels_available

    backend = MoeRunnerBackend.TRITON
    if mxfp4 and is_triton_kernels_available():
        backend, method.use_triton_kernels = MoeRunnerBackend.TRITON_KERNELS, True
    method.moe_runner_config, method.runner = config, MoeRunner(backend, config)


def _is_served(method: Any) -> bool:
    return method.runner is not None and method.runner.runner_backend.value == NAME


def _mxfp4_info(layer: Any) -> Any:
    """What a layer's runner is given: two values a byte, [X, N, K / 32, 16]."""
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

    w13, w2 = (weight.unflatten(-1, (-1, 16)) for weight in (layer.w13_weight, layer.w2_weight))
    return TritonMoeQuantInfo(
        w13_weight=w13, w2_weight=w2, w13_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale,
        b13=getattr(layer, "w13_weight_bias", None), b2=getattr(layer, "w2_weight_bias", None),
    )  # fmt: skip


def _weights(method: Any) -> str | None:
    """A layer's `weights` for those of a method, or None."""
    if type(method).__name__ == _MXFP4_METHOD.rpartition(".")[2]:
        return _MXFP4
    quant = getattr(method, "quant_config", None)
    if quant is None:
        return "none"
    plain = method.block_quant and not method.use_mxfp8 and not method.is_fp4_expert
    blocks = [*(method.weight_block_size or ())] == [128, 128]
    return _FP8 if plain and blocks and quant.is_checkpoint_fp8_serialized else None


def _backend() -> Any:
    """The runner backend of this name, with its core."""
    from sglang.srt.layers.moe.moe_runner import runner
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    try:
        return resolve_moe_runner_backend(NAME)
    except ValueError:
        runner.register_moe_runner_core(NAME, _core_class())
    return resolve_moe_runner_backend(NAME)


def _core_class() -> Any:
    import torch
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    from fusekit.interop.torch_layer import stream_of

    class FusekitRunnerCore(DispatchMoeRunnerCore):  # type: ignore[misc]
        served: Any = None

        @property
        def runner_backend(self) -> Any:
            return _backend()

        def run_from_dispatch(
            self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
        ) -> Any:
            x: Any = dispatch_output.hidden_states
            weights, indices = dispatch_output.topk_output[:2]
            y = torch.empty_like(x)
            if len(x):
                if (factor := runner_config.routed_scaling_factor) not in (None, 1.0):
                    weights = weights * factor
                biases = [None if bias is None else bias.to(x.dtype) for bias in (quant_info.b13, quant_info.b2)]
                scratch = torch.empty(self.served.scratch_bytes(len(x)), dtype=torch.uint8, device=x.device)
                parameters = {
                    "w1": quant_info.w13_weight, "w2": quant_info.w2_weight, "w1_s": quant_info.w13_scale,
                    "w2_s": quant_info.w2_scale, "b1": biases[0], "b2": biases[1],
                }  # fmt: skip
                self.served(y, x, indices, weights, parameters, scratch, stream_of(x))
            return StandardCombineInput(hidden_states=y)

    return FusekitRunnerCore
