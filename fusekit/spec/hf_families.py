"""How each model type's config is read: the MLPs of its layers and their router, as the class of that name in
Transformers computes them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fusekit.spec.config_fields import Fields
from fusekit.spec.hf_deepseek import deepseek, deepseek_router, deepseek_v4
from fusekit.spec.hf_model import FUSED, GATED, LINEARS, NUMBERED, SEPARATE, STACKED, TRANSPOSED, UNGATED, Mlp, Router
from fusekit.spec.hf_readers import (
    ACT,
    MAX_LAYERS,
    TANH,
    TWO_LAYERS,
    Parts,
    activation_of,
    checked,
    layer_count,
    mlp_of,
    softmax_router,
)
from fusekit.spec.values import show


def _dense(
    fields: Fields,
    *,
    gated: bool = True,
    act: tuple[str, str] = ACT,
    bias: bool | tuple[str, bool] = False,
    weights: str = SEPARATE,
) -> Parts:
    """Every layer has the same MLP. act, bias: the field and its default; a bool: no field decides."""
    activation, why = activation_of(fields, gated, *act)
    has_bias = bias if isinstance(bias, bool) else fields.flag(bias[0], default=bias[1])
    mlp = Mlp("dense", fields.size("intermediate_size"), activation, gated, bias=has_bias, weights=weights, why=why)
    return (mlp,), None


def _mixtral(fields: Fields, noise: str = "router_jitter_noise") -> tuple[tuple[Mlp], Router]:
    """Softmax over the chosen. noise: the field that says by how much noise x is multiplied in training."""
    if fields.number(noise, default=0.0, quiet=True):
        fields.notes.append(
            f"{noise} = {show(fields.values[noise])}: in training x is multiplied by noise, which is not covered"
        )
    mlp = mlp_of(fields, "experts", fields.size("intermediate_size"), weights=NUMBERED)
    experts, topk = fields.size("num_local_experts", "num_experts"), fields.size("num_experts_per_tok")
    return (mlp,), softmax_router(fields, experts, topk, normalised=True)


def _qwen_moe(fields: Fields, *, expert_size: str, normalised: bool = False, shared: bool = False) -> Parts:
    """Qwen's and OLMoE's: softmax, with norm_topk_prob or without; some have a shared expert and dense layers."""
    size = fields.size(expert_size)
    total = fields.size("num_hidden_layers", most=MAX_LAYERS)
    step = fields.size("decoder_sparse_step", default=1, quiet=True)
    alone = set(fields.layers("mlp_only_layers"))
    sparse = [layer for layer in range(total) if layer not in alone and (layer + 1) % step == 0]
    mlps = [mlp_of(fields, "experts", size, weights=STACKED, layers=layer_count(len(sparse), total))]
    if shared and (width := fields.size("shared_expert_intermediate_size", minimum=0)):
        mlps.append(mlp_of(fields, "shared", width, layers=layer_count(len(sparse), total), scaled=True))
    if len(sparse) < total:
        width = fields.size("intermediate_size")
        mlps.append(mlp_of(fields, "dense", width, layers=layer_count(total - len(sparse), total)))
    norm = fields.flag("norm_topk_prob", default=normalised)
    experts, topk = fields.size("num_experts", "num_local_experts"), fields.size("num_experts_per_tok")
    return tuple(mlps), softmax_router(fields, experts, topk, norm)


_deepseek_v3 = partial(deepseek, dense=3, shared=1, factor=2.5, groups=(8, 4))


def _hunyuan_moe(fields: Fields) -> Parts:
    """Softmax over the chosen, and a shared MLP as wide as an expert; the numbers may be lists, one for each layer."""
    for name in ("num_experts", "moe_topk", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert"):
        listed = fields.values.get(name)
        if isinstance(listed, list) and listed:
            if any(item != listed[0] for item in listed):
                raise fields.error(f"{name} differs from layer to layer; give the config of one kind of layer")
            fields.values = {**fields.values, name: listed[0]}
    size = fields.size("intermediate_size", "moe_intermediate_size")
    experts, topk = fields.size("num_experts", "num_local_experts"), fields.size("moe_topk", "num_experts_per_tok")
    mlps = mlp_of(fields, "experts", size, weights=STACKED), mlp_of(fields, "shared", size)
    return mlps, checked(fields, Router(experts, topk, {"score_function": "softmax"}))


def _lfm2_moe(fields: Fields) -> Parts:
    """Sigmoid scores, with a bias or without; the first layers are dense."""
    size, total = fields.size("moe_intermediate_size"), fields.size("num_hidden_layers", most=MAX_LAYERS)
    dense = min(fields.size("num_dense_layers", default=2, minimum=0), total)
    mlps = [Mlp("experts", size, GATED["silu"], weights=NUMBERED, layers=layer_count(total - dense, total))]
    if dense:
        weights = NUMBERED.replace(" of expert e", "").replace("[e]", "")
        width = fields.size("intermediate_size")
        mlps.append(Mlp("dense", width, GATED["silu"], weights=weights, layers=layer_count(dense, total)))
    topk = fields.size("num_experts_per_tok")
    keys: dict[str, Any] = {"score_function": "sigmoid"}
    keys |= {"expert_bias": True} if fields.flag("use_expert_bias", default=True) else {}
    factor = fields.number("routed_scaling_factor", default=1.0)
    keys |= {"scaling_factor": factor} if factor != 1.0 else {}
    norm = fields.flag("norm_topk_prob", default=True) or topk == 1
    why = "" if norm else "norm_topk_prob is false, and router-topk divides sigmoid scores by their sum"
    return tuple(mlps), checked(fields, Router(fields.size("num_experts"), topk, keys, why=why))


def _gemma4(fields: Fields) -> Parts:
    """A dense MLP in every layer; some models add experts, whose router has a norm and scales."""
    mlps, router = [], None
    if fields.flag("enable_moe_block", default=False):
        size = fields.size("moe_intermediate_size")
        mlps.append(mlp_of(fields, "experts", size, TANH, weights=FUSED))
        why = "it normalises and scales x before the logits, and scales the weights of each expert"
        router = Router(fields.size("num_experts"), fields.size("top_k_experts"), {}, why=why)
    mlps.append(mlp_of(fields, "dense", fields.size("intermediate_size"), TANH))
    wide = fields.size("num_kv_shared_layers", default=0, minimum=0, quiet=True)
    if fields.flag("use_double_wide_mlp", default=False) and wide:
        fields.notes.append(f"use_double_wide_mlp: the MLP of the last {wide} layers has twice the intermediate size")
    return tuple(mlps), router if router is None else checked(fields, router)


def _nemotron_h(fields: Fields) -> Parts:
    """MLPs without a gate in some layers, DeepSeek's router over such MLPs and a shared one in others."""
    kinds = fields.peek("layers_block_type", fields.peek("layer_types"))
    if kinds is None:
        marks = {"E": "moe", "-": "mlp"}
        kinds = [marks.get(mark, "other") for mark in fields.word("hybrid_override_pattern")]
    if not isinstance(kinds, list):
        raise fields.error(f"layers_block_type = {show(kinds)}: it must be a list of the layers' types")
    total, sparse, dense = len(kinds), kinds.count("moe"), kinds.count("mlp")
    plain = partial(mlp_of, fields, act=("mlp_hidden_act", "relu2"), gated=False)
    bias = fields.flag("mlp_bias", default=False)
    mlps, router = [], None
    if sparse:
        latent = fields.peek("moe_latent_size")
        why = f"moe_latent_size = {show(latent)}: its experts take a projection of x, which is not covered"
        size, layers = fields.size("moe_intermediate_size"), layer_count(sparse, total)
        mlps.append(plain("experts", size, weights=UNGATED, layers=layers, why=why if latent else ""))
        width, weights = fields.size("moe_shared_expert_intermediate_size"), TWO_LAYERS.format("up_proj", "down_proj")
        mlps.append(plain("shared", width, bias=bias, weights=weights, layers=layers))
        experts, topk = fields.size("n_routed_experts", "num_local_experts"), fields.size("num_experts_per_tok")
        fields.peek("n_shared_experts")
        keys, why = deepseek_router(fields, "sigmoid", topk)
        router = checked(fields, Router(experts, topk, keys, why=why))
    if dense:
        weights = TWO_LAYERS.format("up_proj", "down_proj")
        layers = layer_count(dense, total)
        mlps.append(plain("dense", fields.size("intermediate_size"), bias=bias, weights=weights, layers=layers))
    if not mlps:
        raise fields.error("it has no layer of type moe or mlp; give the config.json of a model with an MLP")
    return tuple(mlps), router


def _minimax(fields: Fields) -> Parts:
    """As Mixtral; MiniMax-M2, which chooses by sigmoid scores, has the same name in some files."""
    mlps, router = _mixtral(fields)
    scoring = fields.peek("scoring_func", "softmax")
    why = "" if scoring == "softmax" else (
        f"scoring_func = {show(scoring)}, and this model type computes softmax; give --family minimax_m2 for MiniMax-M2"
    )  # fmt: skip
    return mlps, replace(router, why=why)


def _phimoe(fields: Fields) -> Parts:
    """Mixtral's experts; the router draws lots while it is trained."""
    mlps, router = _mixtral(fields, "input_jitter_noise")
    why = "sparsemixer masks experts far below the best, and samples in training; router-topk takes the best"
    return mlps, replace(router, keys={}, why=why)


def _granite_moe(fields: Fields, *, shared: int | None = None) -> Parts:
    """Softmax over the chosen; all but the first kind add a shared MLP, whose default width is `shared`."""
    size, experts = fields.size("intermediate_size"), fields.size("num_local_experts", minimum=shared is None)
    mlps, router = [], None
    if experts:
        mlps.append(mlp_of(fields, "experts", size, weights=LINEARS.format("block_sparse_moe")))
        router = softmax_router(fields, experts, fields.size("num_experts_per_tok"), normalised=True)
    if shared is not None and (width := fields.size("shared_intermediate_size", default=shared, minimum=0)):
        role = "shared" if experts else "dense"
        mlps.append(mlp_of(fields, role, width, weights=LINEARS.format("shared_mlp")))
    return tuple(mlps), router


def _jamba(fields: Fields) -> Parts:
    """Softmax over all experts; dense MLPs of the same width in the other layers."""
    size, total = fields.size("intermediate_size"), fields.size("num_hidden_layers", most=MAX_LAYERS)
    experts, topk = fields.size("num_experts", default=16), fields.size("num_experts_per_tok", default=2)
    period = fields.size("expert_layer_period", default=2)
    first = fields.size("expert_layer_offset", default=1, minimum=0)
    sparse = sum(layer % period == first for layer in range(total)) if experts > 1 else 0
    mlps = [mlp_of(fields, "experts", size, weights=STACKED, layers=layer_count(sparse, total))] if sparse else []
    if sparse < total:
        mlps.append(mlp_of(fields, "dense", size, layers=layer_count(total - sparse, total)))
    return tuple(mlps), softmax_router(fields, experts, topk, normalised=False) if sparse else None


def _ernie(fields: Fields) -> Parts:
    """Chosen by softmax scores and a bias."""
    size, total = fields.size("moe_intermediate_size"), fields.size("num_hidden_layers", most=MAX_LAYERS)
    first, step = (
        fields.size("moe_layer_start_index", default=1, minimum=0),
        fields.size("moe_layer_interval", default=1),
    )
    last = fields.number("moe_layer_end_index", default=-1)
    last = total - 1 if last == -1 else last
    sparse = sum((layer + 1) % step == 0 and first <= layer <= last for layer in range(total))
    bias = fields.flag("use_bias", default=False)
    mlps = [mlp_of(fields, "experts", size, bias=bias, weights=STACKED, layers=layer_count(sparse, total))]
    if shared := fields.size("moe_num_shared_experts", default=2, minimum=0):
        mlps.append(mlp_of(fields, "shared", shared * size, bias=bias, layers=layer_count(sparse, total)))
    if sparse < total:
        width = fields.size("intermediate_size")
        mlps.append(mlp_of(fields, "dense", width, bias=bias, layers=layer_count(total - sparse, total)))
    experts, topk = fields.size("moe_num_experts"), fields.size("moe_k")
    why = "it adds a bias to softmax scores, and router-topk adds one to sigmoid and sqrtsoftplus alone"
    return tuple(mlps), checked(fields, Router(experts, topk, {}, why=why))


def _minimax_m2(fields: Fields) -> Parts:
    """Sigmoid scores with a bias in the selection, normalised; every layer sparse."""
    mlp = mlp_of(fields, "experts", fields.size("intermediate_size"), weights=NUMBERED)
    keys = {"score_function": "sigmoid", "expert_bias": True}
    scoring = fields.peek("scoring_func", "sigmoid")
    why = "" if scoring == "sigmoid" else f"scoring_func = {show(scoring)}, and this model type computes sigmoid"
    experts, topk = fields.size("num_local_experts", "num_experts"), fields.size("num_experts_per_tok")
    return (mlp,), checked(fields, Router(experts, topk, keys, why=why))


def _gpt_oss(fields: Fields) -> Parts:
    """Clamped SwiGLU with biases, gate and up interleaved; softmax over the chosen."""
    activation, why = activation_of(fields, gated=True)
    alpha, limit = fields.number("swiglu_alpha", default=1.702, quiet=True), fields.number("swiglu_limit", default=7.0)
    if activation is not None:
        activation = {"kind": "swiglu", "alpha": alpha, "limit": limit, "up_offset": 1.0}
        if fields.word("hidden_act", default="silu") not in ("silu", "swish"):
            activation, why = None, f"hidden_act = {show(fields.values['hidden_act'])}, and this model type has SwiGLU"
    size = fields.size("intermediate_size")
    mlp = Mlp("experts", size, activation, True, "interleaved", True, TRANSPOSED, why=why)
    experts = fields.size("num_local_experts", "num_experts")
    topk = fields.size("num_experts_per_tok", "experts_per_token")
    return (mlp,), replace(softmax_router(fields, experts, topk, normalised=True), bias=True)


def _llama4(fields: Fields) -> Parts:
    """Sigmoid of the chosen logits, which scale the experts' input; a shared expert in each such layer."""
    size, total = fields.size("intermediate_size"), fields.size("num_hidden_layers", most=MAX_LAYERS)
    if "moe_layers" in fields.values:
        sparse = len(fields.layers("moe_layers"))
        fields.peek("interleave_moe_layer_step")  # the list follows from it
    else:
        step = fields.size("interleave_moe_layer_step", default=1)
        sparse = len(range(step - 1, total, step))
    mlps = [mlp_of(fields, "experts", size, weights=TRANSPOSED, layers=layer_count(sparse, total))]
    mlps.append(mlp_of(fields, "shared", size, layers=layer_count(sparse, total)))
    if sparse < total:
        width = fields.size("intermediate_size_mlp")
        mlps.append(mlp_of(fields, "dense", width, layers=layer_count(total - sparse, total)))
    experts, topk = fields.size("num_local_experts"), fields.size("num_experts_per_tok")
    why = "" if topk == 1 else "several sigmoid scores a token are not divided by their sum, and router-topk does that"
    router = Router(experts, topk, {"score_function": "sigmoid"}, scales_input=True, why=why)
    return tuple(mlps), checked(fields, router)


FAMILIES: Mapping[str, Callable[[Fields], Parts]] = {
    "llama": partial(_dense, bias=("mlp_bias", False)),
    "granite": partial(_dense, bias=("mlp_bias", False)),
    "smollm3": partial(_dense, bias=("mlp_bias", False)),
    "mistral": _dense,
    "qwen2": _dense,
    "qwen3": _dense,
    "olmo2": _dense,
    "olmo3": _dense,
    "qwen3_5": _dense,
    "qwen3_5_text": _dense,
    "gemma2": partial(_dense, act=TANH),
    "gemma3_text": partial(_dense, act=TANH),
    "gemma4": _gemma4,
    "gemma4_text": _gemma4,
    "glm4": partial(_dense, weights=FUSED),
    "phi3": partial(_dense, weights=FUSED),
    "starcoder2": partial(
        _dense, gated=False, act=("hidden_act", "gelu_pytorch_tanh"), bias=("use_bias", True),
        weights=TWO_LAYERS.format("c_fc", "c_proj"),
    ),
    "nemotron": partial(
        _dense, gated=False, act=("hidden_act", "relu2"), bias=("mlp_bias", False),
        weights=TWO_LAYERS.format("up_proj", "down_proj"),
    ),
    "nemotron_h": _nemotron_h,
    "gpt_neox": partial(
        _dense, gated=False, act=("hidden_act", "gelu"), bias=True,
        weights=TWO_LAYERS.format("dense_h_to_4h", "dense_4h_to_h"),
    ),
    "mixtral": _mixtral,
    "olmoe": partial(_qwen_moe, expert_size="intermediate_size"),
    "qwen2_moe": partial(_qwen_moe, expert_size="moe_intermediate_size", shared=True),
    "qwen3_moe": partial(_qwen_moe, expert_size="moe_intermediate_size"),
    "qwen3_vl_moe_text": partial(_qwen_moe, expert_size="moe_intermediate_size", normalised=True),
    "qwen3_next": partial(_qwen_moe, expert_size="moe_intermediate_size", normalised=True, shared=True),
    "qwen3_5_moe": partial(_qwen_moe, expert_size="moe_intermediate_size", normalised=True, shared=True),
    "qwen3_5_moe_text": partial(_qwen_moe, expert_size="moe_intermediate_size", normalised=True, shared=True),
    "qwen3_omni_moe": partial(_qwen_moe, expert_size="moe_intermediate_size", normalised=True),
    "qwen3_omni_moe_talker_text": partial(_qwen_moe, expert_size="moe_intermediate_size", shared=True),
    "qwen3_omni_moe_text": partial(_qwen_moe, expert_size="moe_intermediate_size", normalised=True),
    "deepseek_v2": partial(deepseek, score="softmax", shared=2),
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "deepseek_v4": deepseek_v4,
    "glm4_moe": partial(deepseek, dense=1, shared=1),
    "glm4_moe_lite": partial(deepseek, dense=1, shared=1, factor=1.8),
    "glm_moe_dsa": partial(deepseek, dense=3, shared=1, factor=2.5),
    "dots1": partial(deepseek, norm=False),
    "kimi_linear": partial(deepseek, dense=1, shared=1, factor=2.446),
    "mimo_v2_flash": partial(deepseek, dense=1),
    "bailing_moe_v2": deepseek,
    "mistral4": partial(deepseek, score="softmax", norm=True, shared=1),
    "hunyuan_v1_moe": _hunyuan_moe,
    "lfm2_moe": _lfm2_moe,
    "minimax": _minimax,
    "minimax_m2": _minimax_m2,
    "phimoe": _phimoe,
    "granitemoe": _granite_moe,
    "granitemoeshared": partial(_granite_moe, shared=0),
    "granitemoehybrid": partial(_granite_moe, shared=1024),
    "jamba": _jamba,
    "ernie4_5_moe": _ernie,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "llama4_text": _llama4,
}  # fmt: skip
