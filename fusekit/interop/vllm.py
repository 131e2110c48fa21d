"""fusekit as an experts kernel of vLLM 0.33: a plugin, by the entry point `vllm.general_plugins`.

vLLM keeps routing, expert maps and communication. Where its automatic choice for bf16 experts, for FP8 experts with
128 x 128 scales or for MXFP4 experts of gpt-oss is Triton, for the last also Marlin, and a layer of the store computes
these experts, fusekit runs them, on vLLM's weights and scales as they are; elsewhere vLLM's choice stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp4, unquantized
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization import mxfp4 as mxfp4_methods
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kMxfp4Static,
)
from vllm.platforms import current_platform

from fusekit.errors import NotBuiltError
from fusekit.interop.experts import Experts, given_parameters
from fusekit.interop.serving import Chooser, Served
from fusekit.interop.torch_layer import DTYPES, stream_of
from fusekit.library import Library

NAME = "FusekitExperts"
_FP8, _MXFP4 = "fp8-block", "mxfp4"  # of a layer's weights
_MXFP4_SIDE = 64  # such a layer's intermediate is a multiple of it; vLLM fills up with zeros
_GATED: dict[str, dict[str, Any]] = {
    "silu": {"kind": "swiglu"},
    "gelu": {"kind": "geglu"},
    "gelu_tanh": {"kind": "geglu", "approximate": "tanh"},
    "swigluoai": {"kind": "swiglu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0},
    "swigluoai_uninterleave": {"kind": "swiglu"},
}
_PLAIN: dict[str, dict[str, Any]] = {
    "silu_no_mul": {"kind": "silu"},
    "gelu_no_mul": {"kind": "gelu"},
    "gelu_tanh_no_mul": {"kind": "gelu", "approximate": "tanh"},
    "relu2_no_mul": {"kind": "srelu"},
}


def register(library: Library | None = None, layers: str = "*") -> None:
    """Lets vLLM's unquantized, FP8 and MXFP4 experts choose fusekit. The entry point calls it in each process of vLLM.

    Parameters
    ----------
    library : Library, optional
        Default: the library of the environment, opened when the first MoE layer is made.
    layers : str
        Glob of the names of layers to choose from. If several fit, one without a backward pass is taken, then the
        first by name.
    """
    theirs, theirs_fp8 = unquantized.select_unquantized_moe_backend, fp8.select_fp8_moe_backend
    if getattr(theirs, "fusekit", False):  # vLLM may load plugins more than once
        return
    experts_class = _experts_class(Chooser(library, layers, init_logger("vllm.fusekit")))

    def choose(selected: tuple[Any, Any], backends: tuple[Any, ...], moe_config: Any, *keys: Any) -> tuple[Any, Any]:
        backend, kernel = selected
        if backend in backends and moe_config.moe_backend == "auto":
            standard = mk.FusedMoEActivationFormat.Standard
            supported, why = experts_class.is_supported_config(experts_class, moe_config, *keys, standard)
            if supported:
                return backend, experts_class
            if why is not None:
                experts_class.chooser.refuse(why)
        return backend, kernel

    def select(moe_config: Any) -> tuple[Any, Any]:
        return choose(theirs(moe_config), (unquantized.UnquantizedMoeBackend.TRITON,), moe_config, None, None)

    def select_fp8(config: Any, weight_key: Any, activation_key: Any, allow_vllm_cutlass: bool = False) -> Any:
        selected = theirs_fp8(config, weight_key, activation_key, allow_vllm_cutlass)
        return choose(selected, (fp8.Fp8MoeBackend.TRITON,), config, weight_key, activation_key)

    theirs_mxfp4, backends = mxfp4_methods.select_mxfp4_moe_backend, mxfp4.Mxfp4MoeBackend

    def select_mxfp4(config: Any, activation_key: Any = None) -> Any:
        selected = theirs_mxfp4(config, activation_key)
        if activation_key is not None:
            return selected
        backend, kernel = choose(selected, (backends.TRITON, backends.MARLIN), config, kMxfp4Static, None)
        # The backend says how vLLM lays weights out after it has loaded them: for that of XPUs, as they are.
        return (backends.XPU if kernel is experts_class else backend), kernel

    select.fusekit = True  # type: ignore[attr-defined]
    replace("select_unquantized_moe_backend", theirs, select)
    replace("select_fp8_moe_backend", theirs_fp8, select_fp8)
    mxfp4_methods.select_mxfp4_moe_backend = select_mxfp4  # of gpt-oss; other formats ask the oracle itself


def replace(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Puts a function of vLLM's in the place of another, in each of its modules that has imported that."""
    for module in [module for path, module in sys.modules.items() if path.partition(".")[0] == "vllm"]:
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def described(moe_config: Any, quant_config: Any, weights: str = "none") -> Experts | None:
    """vLLM's experts as keys of a spec; None if fusekit has no kernels for their activation or dtype."""
    name = moe_config.activation.value
    activation = _GATED.get(name) or _PLAIN.get(name)
    dtypes = [dtype for dtype, known in DTYPES.items() if known == moe_config.in_dtype]
    if activation is None or dtypes != ["bf16"]:
        return None
    numbers = ApplyMoEActivationConfig.from_configs(moe_config, quant_config)
    if name in ("silu", "swigluoai_uninterleave"):
        activation = {**activation, "limit": numbers.clamp_limit}
    if name == "swigluoai_uninterleave":
        activation |= {"alpha": numbers.alpha, "up_offset": numbers.beta}
    layout = "none" if name in _PLAIN else "interleaved" if name == "swigluoai" else "concat"
    intermediate = moe_config.intermediate_size_per_partition
    if weights == _MXFP4:
        intermediate += -intermediate % _MXFP4_SIDE
    return Experts(
        moe_config.hidden_dim, intermediate, moe_config.num_local_experts, moe_config.experts_per_token, dtypes[0],
        given_parameters(activation), layout, moe_config.has_bias, "k", weights=weights,
    )  # fmt: skip


def _experts_class(chooser_: Chooser) -> Any:
    """vLLM's experts with layers that the chooser finds."""

    class FusekitExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
        chooser = chooser_

        def __init__(self, moe_config: Any, quant_config: Any, **more: Any) -> None:
            super().__init__(moe_config, quant_config, **more)
            weights = {None: "none", _MXFP4: _MXFP4}.get(quant_config.weight_quant_dtype, _FP8)
            served = _served(self.chooser, moe_config, quant_config, weights)
            if served is None:  # the numbers of the activation came after the choice, and are others
                experts = described(moe_config, quant_config, weights)
                wanted = "" if experts is None else f"\n\n{experts.table(inference=True)}"
                raise NotBuiltError(
                    f"no layer of the store computes these experts of vLLM, with the activation's numbers"
                    f" {self.activation_config}; build one, or serve with --moe-backend triton{wanted}"
                )
            self._served = served

        @property
        def expects_unquantized_inputs(self) -> bool:
            return self.quant_config.weight_quant_dtype is not None  # tokens stay bf16

        @staticmethod
        def is_supported_config(
            cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
        ) -> tuple[bool, str | None]:
            given = moe_config, weight_key, activation_key, activation_format
            supported, why = mk.FusedMoEExperts.is_supported_config(cls, *given)
            if not supported:
                return False, why
            quant_config = FusedMoEQuantConfig.make()
            if described(moe_config, quant_config) is None:
                return False, f"kernel does not support {moe_config.activation} of {moe_config.in_dtype}"
            weights = {None: "none", kMxfp4Static: _MXFP4}.get(weight_key, _FP8)
            return _served(cls.chooser, moe_config, quant_config, weights) is not None, None

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        @staticmethod
        def _supports_current_device() -> bool:
            return bool(current_platform.is_cuda() or current_platform.is_cpu())

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return True

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            known = (None, None), (kFp8Static128BlockSym, kFp8Dynamic128Sym), (kMxfp4Static, None)
            return (weight_key, activation_key) in known

        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            return activation.value in _GATED or activation.value in _PLAIN

        @staticmethod
        def _supports_parallel_config(moe_parallel_config: Any) -> bool:
            return not (
                moe_parallel_config.use_fi_nvl_two_sided_kernels or moe_parallel_config.use_fi_nvl_one_sided_kernels
            )

        @staticmethod
        def _supports_batch_invariance() -> bool:
            return True

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()  # y is weighted and summed

        def workspace_shapes(
            self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,  # noqa: N803
            expert_tokens_meta: Any, activation: Any,
        ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
            # The output lies in the first workspace. In elements of two bytes.
            return (0,), (M, -(-self._served.scratch_bytes(M) // (2 * M))), (M, K)

        def apply(
            self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any,
            activation: Any, global_num_experts: int, expert_map: Any, a1q_scale: Any, a2_scale: Any,
            workspace13: Any, workspace2: Any, expert_tokens_meta: Any, apply_router_weight_on_input: bool,
        ) -> None:  # fmt: skip
            if expert_map is not None:  # another rank's experts are -1, as is a choice that counts for nothing
                topk_ids = expert_map[topk_ids].where(topk_ids >= 0, -1)
            if apply_router_weight_on_input:  # vLLM has multiplied x by them
                topk_weights = topk_weights.new_ones(topk_weights.shape)
            if self.quant_config.weight_quant_dtype == _MXFP4:  # two values a byte, [X, N, K / 2]
                w1, w2 = (weights.unflatten(-1, (-1, 16)) for weights in (w1, w2))
            parameters = {"w1": w1, "w2": w2, "b1": self.w1_bias, "b2": self.w2_bias, "w1_s": self.w1_scale,
                          "w2_s": self.w2_scale}  # fmt: skip
            self._served(
                output, hidden_states, topk_ids, topk_weights, parameters, workspace2, stream_of(hidden_states)
            )

    FusekitExperts.__qualname__ = NAME
    return FusekitExperts


def _served(chooser: Chooser, moe_config: Any, quant_config: Any, weights: str) -> Served | None:
    experts = described(moe_config, quant_config, weights)
    cpu = "cpu" in str(moe_config.device)
    return None if experts is None else chooser.served(experts, moe_config.max_num_tokens, cpu)
