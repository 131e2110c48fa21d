"""The MLPs and the router of a model, read from its Hugging Face `config.json`.

Each model type that `FAMILIES` lists is read as the class of that name in Transformers computes it. A model type
outside the list, a field of the wrong type and fields that contradict each other are errors. What the file leaves out
takes the default of that class, and is said in `Model.notes`; so are fields that such a class does not read.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from fusekit.errors import SpecError
from fusekit.spec.config_fields import Fields
from fusekit.spec.values import show, type_name

MAX_BYTES = 2**22  # of a config.json; real ones have a few kilobytes
MAX_LAYERS = 10_000

# hidden_act -> the activation of a gated MLP, and of a plain one.
GATED: dict[str, dict[str, Any]] = {
    "silu": {"kind": "swiglu"},
    "swish": {"kind": "swiglu"},
    "quick_gelu": {"kind": "swiglu", "alpha": 1.702},
    "gelu": {"kind": "geglu"},
    "gelu_pytorch_tanh": {"kind": "geglu", "approximate": "tanh"},
    "gelu_new": {"kind": "geglu", "approximate": "tanh"},
    "gelu_fast": {"kind": "geglu", "approximate": "tanh"},
    "relu": {"kind": "reglu"},
}
PLAIN = {
    "silu": {"kind": "silu"},
    "swish": {"kind": "silu"},
    "gelu": {"kind": "gelu"},
    "gelu_pytorch_tanh": {"kind": "gelu", "approximate": "tanh"},
    "gelu_new": {"kind": "gelu", "approximate": "tanh"},
    "gelu_fast": {"kind": "gelu", "approximate": "tanh"},
    "relu": {"kind": "relu"},
    "relu2": {"kind": "srelu"},
}

SEPARATE = "w1 is gate_proj.weight over up_proj.weight, stacked once; w2 is down_proj.weight"
STACKED = "w1[e] is gate_proj.weight over up_proj.weight of expert e, w2[e] its down_proj.weight; both stacked once"
UNGATED = "w1[e] is up_proj.weight of expert e, w2[e] its down_proj.weight; both stacked once"
NUMBERED = "w1[e] is w1.weight over w3.weight of expert e, stacked once; w2[e] is its w2.weight"
FUSED = "w1 is gate_up_proj.weight and w2 is down_proj.weight, as the checkpoint has them"
LINEARS = "w1 is {0}.input_linear.weight and w2 is {0}.output_linear.weight, as the checkpoint has them"
AS_STORED = "w1 is gate_up_proj [X, H, 2 I] and w2 is down_proj [X, I, H], as the checkpoint has them"
TRANSPOSED = (
    "w1 and w2 are the transposes, made once, of gate_up_proj [E, H, 2 I] and down_proj [E, I, H]. To use those as "
    'they are, exchange b_major = "k", the default, and "n" in the GEMMs, and dy and x in a launch of grouped-wgrad, '
    "which then sums no gradient of a bias"
)


@dataclass(frozen=True, slots=True)
class Mlp:
    """One kind of MLP of the model: w2[H, I], and w1[2 I, H] where it is gated, else [I, H].

    role: "experts", "shared" (experts that every token goes through) or "dense". activation: a spec's table; None
    where fusekit has no such activation, and `why` then says so. weights: where w1 and w2 are in the checkpoint.
    layers: which layers have it. apart: whether something is done to its output before it is added to that of the
    routed experts.
    """

    role: str
    intermediate: int
    activation: Mapping[str, Any] | None
    gated: bool = True
    glu_layout: str = "concat"
    bias: bool = False
    weights: str = SEPARATE
    layers: str = "every layer"
    why: str = ""
    apart: bool = False

    @property
    def b_major(self) -> str:
        """Which dimension of its weights is contiguous in the checkpoint, as a spec says it."""
        return "n" if self.weights == TRANSPOSED else "k"


@dataclass(frozen=True, slots=True)
class Router:
    """How a token's experts are chosen; the fields are those of `router-topk`.

    scales_input: the weight multiplies the expert's input, not its output. aux_loss: coefficient of the load-balancing
    loss, 0 where the model has none; aux_note: how the model's loss differs. why: what the kernels cannot do of it.
    bias: of the logits. by_sequence: whether that loss is one of each sequence.
    """

    experts: int
    topk: int
    keys: Mapping[str, Any]
    scales_input: bool = False
    aux_loss: float = 0.0
    aux_note: str = ""
    why: str = ""
    bias: bool = False
    by_sequence: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """The properties of a model that its kernels depend on. hidden: H. dtype: "bf16" or "fp16"."""

    model_type: str
    hidden: int
    mlps: tuple[Mlp, ...]
    router: Router | None = None
    dtype: str = "bf16"
    notes: tuple[str, ...] = ()


Parts = tuple[tuple[Mlp, ...], Router | None]
"""A family's reader: the MLPs of its layers, and their router."""


def read_model(text: str, source: str, family: str | None = None) -> Model:
    """The model of a `config.json`.

    source: what errors call the file. family: the model type to read it as, instead of its own. Raises SpecError for
    what is not a config, a model type that is not known, and fields that are missing or contradict each other.
    """
    try:
        document = json.loads(text.removeprefix("\ufeff"))  # some editors write a byte order mark
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SpecError(f"{source}: not JSON: {reason}; give the config.json of a Hugging Face model") from None
    if not isinstance(document, dict):
        raise SpecError(f"{source}: it holds {type_name(document)}; a config.json holds one object")
    outer = Fields(document, source)
    thinker = outer.values.get("thinker_config")  # of the "omni" models, which speak with other layers
    inner = (thinker if isinstance(thinker, dict) else outer.values).get("text_config")
    fields = outer
    if isinstance(inner, dict) and "hidden_size" not in outer.values:
        shared = ("model_type", "dtype", "torch_dtype", "quantization_config")
        above = {name: outer.values.get(name) for name in shared}
        fields = Fields(above | {name: value for name, value in inner.items() if value is not None}, source)
        fields.notes.append("only text_config is read: other parts of the model, such as vision, have no kernels here")
    model_type = fields.word("model_type")
    name = family or model_type
    if name not in FAMILIES:
        near = ", ".join(get_close_matches(name[:100], FAMILIES, 3, 0.0))
        if family:
            raise fields.error(f"--family {show(family)} is not known; the nearest are {near}; completion lists all")
        raise fields.error(
            f"model_type = {show(name)}: how its MLPs are computed is not known; by name, the nearest that are known "
            f"are {near}; if its MLPs and router are those of a known one, name that with --family"
        )
    mlps, router = FAMILIES[name](fields)
    hidden = fields.size("hidden_size")
    if family and family != model_type:
        fields.check_activations(family)
        fields.notes.insert(
            0, f"the config's model_type is {show(model_type)}; it is read as {family}, as was asked for"
        )
    dtype = _dtype(fields)
    return Model(model_type, hidden, mlps, router, dtype, (*fields.notes, *fields.unread(), *_quantised(fields)))


def _dtype(fields: Fields) -> str:
    value = fields.values.get("dtype", fields.values.get("torch_dtype", "bfloat16"))
    if value == "float16":
        return "fp16"
    if value != "bfloat16":
        fields.notes.append(f"torch_dtype is {show(value)}: the kernels take 16-bit operands, here bf16")
    return "bf16"


def _quantised(fields: Fields) -> list[str]:
    config = fields.values.get("quantization_config")
    if not config:
        return []
    method = config.get("quant_method", config) if isinstance(config, dict) else config
    if isinstance(config, dict) and method == "fp8" and config.get("weight_block_size") == [128, 128]:
        return [
            'the checkpoint has e4m3 values with 128x128 scales: a layer with recipe = "fp8-block" takes them as they '
            "are; without it, dequantise them when loading"
        ]
    return [
        f"the checkpoint is quantised ({show(method)}): these kernels take 16-bit weights; dequantise them when loading"
    ]


ACT = ("hidden_act", "silu")  # the field of the activation, and its default


TANH = ("hidden_activation", "gelu_pytorch_tanh")


def _activation(fields: Fields, gated: bool, name: str = ACT[0], default: str = ACT[1]) -> tuple[Any, str]:
    """The activation's table, or None and why there is none."""
    value = fields.word(name, default=default)
    table = (GATED if gated else PLAIN).get(value)
    if table is not None:
        return table, ""
    known = ", ".join(GATED if gated else PLAIN)
    kind = "gated" if gated else "plain"
    return None, f"{name} = {show(value)} is no activation of a {kind} MLP that fusekit computes; it computes {known}"


def _mlp(
    fields: Fields, role: str, intermediate: int, act: tuple[str, str] = ACT, why: str = "", **rest: Any
) -> Mlp:  # fmt: skip
    activation, unknown = _activation(fields, rest.get("gated", True), *act)
    return Mlp(role, intermediate, activation, why=why or unknown, **rest)


def _dense(
    fields: Fields,
    *,
    gated: bool = True,
    act: tuple[str, str] = ACT,
    bias: bool | tuple[str, bool] = False,
    weights: str = SEPARATE,
) -> Parts:
    """Every layer has the same MLP. act, bias: the field and its default; a bool: no field decides."""
    activation, why = _activation(fields, gated, *act)
    has_bias = bias if isinstance(bias, bool) else fields.flag(bias[0], default=bias[1])
    mlp = Mlp("dense", fields.size("intermediate_size"), activation, gated, bias=has_bias, weights=weights, why=why)
    return (mlp,), None


def _softmax(fields: Fields, experts: int, topk: int, normalised: bool) -> Router:
    """Softmax over all experts, divided by the sum of the chosen where `normalised`: then it is over those alone."""
    keys: dict[str, Any] = {"score_function": "softmax"}
    if not normalised:
        keys["pre_softmax"] = True
    aux = fields.number("router_aux_loss_coef", default=0.001)
    note = "Transformers' load_balancing_loss_func gives K times what aux-loss gives, over all layers at once"
    return _router(fields, Router(experts, topk, keys, aux_loss=aux, aux_note=note))


def _router(fields: Fields, router: Router) -> Router:
    if router.topk > router.experts:
        raise fields.error(
            f"num_experts_per_tok = {router.topk}: there are {router.experts} experts; correct one of the two numbers"
        )
    return router


def _mixtral(fields: Fields, noise: str = "router_jitter_noise") -> tuple[tuple[Mlp], Router]:
    """Softmax over the chosen. noise: the field that says by how much noise x is multiplied in training."""
    if fields.number(noise, default=0.0, quiet=True):
        fields.notes.append(
            f"{noise} = {show(fields.values[noise])}: in training x is multiplied by noise, which is not covered"
        )
    mlp = _mlp(fields, "experts", fields.size("intermediate_size"), weights=NUMBERED)
    experts, topk = fields.size("num_local_experts", "num_experts"), fields.size("num_experts_per_tok")
    return (mlp,), _softmax(fields, experts, topk, normalised=True)


def _qwen_moe(fields: Fields, *, expert_size: str, normalised: bool = False, shared: bool = False) -> Parts:
    """Qwen's and OLMoE's: softmax, with norm_topk_prob or without; some have a shared expert and dense layers."""
    size = fields.size(expert_size)
    total = fields.size("num_hidden_layers", most=MAX_LAYERS)
    step = fields.size("decoder_sparse_step", default=1, quiet=True)
    alone = set(fields.layers("mlp_only_layers"))
    sparse = [layer for layer in range(total) if layer not in alone and (layer + 1) % step == 0]
    mlps = [_mlp(fields, "experts", size, weights=STACKED, layers=_count(len(sparse), total))]
    if shared and (width := fields.size("shared_expert_intermediate_size", minimum=0)):
        mlps.append(_mlp(fields, "shared", width, layers=_count(len(sparse), total), apart=True))
        fields.notes.append(
            "the shared expert's output is multiplied by sigmoid(x . shared_expert_gate), which is not covered"
        )
    if len(sparse) < total:
        width = fields.size("intermediate_size")
        mlps.append(_mlp(fields, "dense", width, layers=_count(total - len(sparse), total)))
    norm = fields.flag("norm_topk_prob", default=normalised)
    experts, topk = fields.size("num_experts", "num_local_experts"), fields.size("num_experts_per_tok")
    return tuple(mlps), _softmax(fields, experts, topk, norm)


def _deepseek(
    fields: Fields, *, score: str = "sigmoid", dense: int = 0, norm: bool | None = None, shared: int = 0,
    factor: float = 1.0,
) -> Parts:  # fmt: skip
    """DeepSeek's, Kimi's, GLM's and others': sigmoid scores and a bias (V2: softmax), groups, shared experts.

    Defaults of the config: dense, the layers without experts; norm, whether weights are divided by their sum (None:
    what Transformers always does); shared, experts; factor, of the weights.
    """
    size, total = fields.size("moe_intermediate_size"), fields.size("num_hidden_layers", most=MAX_LAYERS)
    sparse = _sparse(fields, total, dense)
    mlps = [_mlp(fields, "experts", size, weights=STACKED, layers=_count(sparse, total))]
    if shared := fields.size("n_shared_experts", "num_shared_experts", default=shared, minimum=0):
        mlps.append(_mlp(fields, "shared", shared * size, layers=_count(sparse, total)))
    if sparse < total:
        width = fields.size("intermediate_size")
        mlps.append(_mlp(fields, "dense", width, layers=_count(total - sparse, total)))
    experts = fields.size("n_routed_experts", "num_experts", "num_local_experts")
    topk = fields.size("num_experts_per_tok", "num_experts_per_token")
    keys, why = _deepseek_router(fields, score, topk, norm, factor)
    aux = fields.number("aux_loss_alpha", default=0.0, quiet=True)
    note, by_sequence = "", fields.peek("seq_aux") is True
    if by_sequence:
        note = "seq_aux is true: the loss is that of each sequence; launch the loss's four kernels for each of them"
    router = Router(experts, topk, keys, aux_loss=aux, aux_note=note, why=why, by_sequence=by_sequence)
    return tuple(mlps), _router(fields, router)


def _sparse(fields: Fields, total: int, dense: int) -> int:
    """How many layers have experts."""
    kinds, every = fields.peek("mlp_layer_types"), fields.peek("moe_layer_freq")
    for name, listed in (("mlp_layer_types", kinds), ("moe_layer_freq", every)):
        if isinstance(listed, list):
            if len(listed) != total:
                raise fields.error(f"{name} has {len(listed)} items: there are {total} layers; give one for each")
            return sum(kind not in ("dense", 0) for kind in listed)
    first = fields.size("first_k_dense_replace", default=dense, minimum=0)
    every = fields.size("moe_layer_freq", default=1, quiet=True)
    return sum(layer >= first and layer % every == 0 for layer in range(total))


def _deepseek_router(
    fields: Fields, score: str, topk: int, norm_default: bool | None = None, factor: float = 1.0
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """The keys of the router, and what of it the kernels cannot do."""
    scoring = next((name for name in _SCORING if name in fields.values), "scoring_func")
    given = fields.peek(scoring, score)
    method = fields.peek("topk_method", "noaux_tc" if score == "sigmoid" else "greedy")
    methods = ("noaux_tc",) if score == "sigmoid" else ("greedy", "group_limited_greedy")
    if given != score or method not in methods:
        why = f"{scoring} = {show(given)} with topk_method = {show(method)} is not what this model type computes"
        return {}, f"{why}, {score} with {' or '.join(methods)}"
    name = "moe_renormalize" if "moe_renormalize" in fields.values else "norm_topk_prob"
    norm = fields.flag(name, default=score == "sigmoid" if norm_default is None else norm_default)
    keys: dict[str, Any] = {"score_function": score}
    why = ""
    if score == "sigmoid":
        keys["expert_bias"] = True
        if not norm and topk > 1:
            why = f"{name} is false, and router-topk divides sigmoid scores by their sum"
    elif norm and norm_default is None:
        why = "Transformers ignores norm_topk_prob for this model type, and the model's own code does not"
    elif not norm:
        keys["pre_softmax"] = True
    groups, kept = fields.size("n_group", "num_expert_group", default=1), fields.size("topk_group", default=1)
    by_two = score == "sigmoid" or norm_default is not None
    if (method != "greedy" or by_two) and groups > 1:
        keys |= {"num_groups": groups, "group_topk": kept}
        summed = 2 if by_two else 1
        if topk != summed * kept:
            why = (
                f"a group's score is the sum of its best {summed}, and router-topk sums the best topk / group_topk = "
                f"{topk} / {kept}"
            )
    factor = fields.number("routed_scaling_factor", default=factor)
    return keys | ({"scaling_factor": factor} if factor != 1.0 else {}), why


_SCORING = ("scoring_func", "score_function", "moe_router_activation_func")


def _deepseek_v4(fields: Fields) -> Parts:
    """Clamped SwiGLU; square roots of softplus scores and a bias; in the first layers experts by token id."""
    size, total = fields.size("moe_intermediate_size"), fields.size("num_hidden_layers", most=MAX_LAYERS)
    limit = fields.number("swiglu_limit", default=10.0)
    activation, why = _activation(fields, gated=True)
    if activation is not None and activation["kind"] == "swiglu":
        activation = {**activation, "limit": limit}
    bias = fields.peek("mlp_bias", False) is True
    experts = Mlp("experts", size, activation, weights=STACKED, why=why)
    shared = Mlp("shared", size, activation, bias=bias, why=why)
    kinds = fields.peek("mlp_layer_types")
    hashed = fields.size("num_hash_layers", default=3, minimum=0, quiet=True)
    hashed = kinds.count("hash_moe") if isinstance(kinds, list) else min(hashed, total)
    if hashed:
        fields.notes.append(
            f"{hashed} of {total} layers choose experts by a table of token ids, which is not covered: for these, copy"
            ' the layer with router = { input = "choices" }'
        )
    fields.peek("n_shared_experts")
    fields.peek("topk_method")
    scoring = fields.peek("scoring_func", "sqrtsoftplus")
    keys: dict[str, Any] = {"score_function": scoring, "expert_bias": True}
    why = "" if scoring in ("sqrtsoftplus", "sigmoid") else f"scoring_func = {show(scoring)} is no score with a bias"
    factor = fields.number("routed_scaling_factor", default=1.5)
    keys |= {"scaling_factor": factor} if factor != 1.0 else {}
    fields.peek("norm_topk_prob")
    count, topk = fields.size("n_routed_experts", "num_local_experts"), fields.size("num_experts_per_tok")
    return (experts, shared), _router(fields, Router(count, topk, {} if why else keys, why=why))


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
    mlps = _mlp(fields, "experts", size, weights=STACKED), _mlp(fields, "shared", size)
    return mlps, _router(fields, Router(experts, topk, {"score_function": "softmax"}))


def _lfm2_moe(fields: Fields) -> Parts:
    """Sigmoid scores, with a bias or without; the first layers are dense."""
    size, total = fields.size("moe_intermediate_size"), fields.size("num_hidden_layers", most=MAX_LAYERS)
    dense = min(fields.size("num_dense_layers", default=2, minimum=0), total)
    mlps = [Mlp("experts", size, GATED["silu"], weights=NUMBERED, layers=_count(total - dense, total))]
    if dense:
        weights = NUMBERED.replace(" of expert e", "").replace("[e]", "")
        width = fields.size("intermediate_size")
        mlps.append(Mlp("dense", width, GATED["silu"], weights=weights, layers=_count(dense, total)))
    topk = fields.size("num_experts_per_tok")
    keys: dict[str, Any] = {"score_function": "sigmoid"}
    keys |= {"expert_bias": True} if fields.flag("use_expert_bias", default=True) else {}
    factor = fields.number("routed_scaling_factor", default=1.0)
    keys |= {"scaling_factor": factor} if factor != 1.0 else {}
    norm = fields.flag("norm_topk_prob", default=True) or topk == 1
    why = "" if norm else "norm_topk_prob is false, and router-topk divides sigmoid scores by their sum"
    return tuple(mlps), _router(fields, Router(fields.size("num_experts"), topk, keys, why=why))


def _gemma4(fields: Fields) -> Parts:
    """A dense MLP in every layer; some models add experts, whose router has a norm and scales."""
    mlps, router = [], None
    if fields.flag("enable_moe_block", default=False):
        size = fields.size("moe_intermediate_size")
        mlps.append(_mlp(fields, "experts", size, TANH, weights=FUSED))
        why = "it normalises and scales x before the logits, and scales the weights of each expert"
        router = Router(fields.size("num_experts"), fields.size("top_k_experts"), {}, why=why)
    mlps.append(_mlp(fields, "dense", fields.size("intermediate_size"), TANH))
    if fields.flag("use_double_wide_mlp", default=False):
        wide = fields.size("num_kv_shared_layers", default=0, minimum=0)
        fields.notes.append(f"use_double_wide_mlp: the MLP of the last {wide} layers has twice the intermediate size")
    return tuple(mlps), router if router is None else _router(fields, router)


def _nemotron_h(fields: Fields) -> Parts:
    """MLPs without a gate in some layers, DeepSeek's router over such MLPs and a shared one in others."""
    kinds = fields.peek("layers_block_type", fields.peek("layer_types"))
    if kinds is None:
        marks = {"E": "moe", "-": "mlp"}
        kinds = [marks.get(mark, "other") for mark in fields.word("hybrid_override_pattern")]
    if not isinstance(kinds, list):
        raise fields.error(f"layers_block_type = {show(kinds)}: it must be a list of the layers' types")
    total, sparse, dense = len(kinds), kinds.count("moe"), kinds.count("mlp")
    plain = partial(_mlp, fields, act=("mlp_hidden_act", "relu2"), gated=False)
    bias = fields.flag("mlp_bias", default=False)
    mlps, router = [], None
    if sparse:
        latent = fields.peek("moe_latent_size")
        why = f"moe_latent_size = {show(latent)}: its experts take a projection of x, which is not covered"
        size, layers = fields.size("moe_intermediate_size"), _count(sparse, total)
        mlps.append(plain("experts", size, weights=UNGATED, layers=layers, why=why if latent else ""))
        width, weights = fields.size("moe_shared_expert_intermediate_size"), TWO_LAYERS.format("up_proj", "down_proj")
        mlps.append(plain("shared", width, bias=bias, weights=weights, layers=layers))
        experts, topk = fields.size("n_routed_experts", "num_local_experts"), fields.size("num_experts_per_tok")
        fields.peek("n_shared_experts")
        keys, why = _deepseek_router(fields, "sigmoid", topk)
        router = _router(fields, Router(experts, topk, keys, why=why))
    if dense:
        weights = TWO_LAYERS.format("up_proj", "down_proj")
        layers = _count(dense, total)
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
        mlps.append(_mlp(fields, "experts", size, weights=LINEARS.format("block_sparse_moe")))
        router = _softmax(fields, experts, fields.size("num_experts_per_tok"), normalised=True)
    if shared is not None and (width := fields.size("shared_intermediate_size", default=shared, minimum=0)):
        role = "shared" if experts else "dense"
        mlps.append(_mlp(fields, role, width, weights=LINEARS.format("shared_mlp")))
    return tuple(mlps), router


def _jamba(fields: Fields) -> Parts:
    """Softmax over all experts; dense MLPs of the same width in the other layers."""
    size, total = fields.size("intermediate_size"), fields.size("num_hidden_layers", most=MAX_LAYERS)
    experts, topk = fields.size("num_experts", default=16), fields.size("num_experts_per_tok", default=2)
    period = fields.size("expert_layer_period", default=2)
    first = fields.size("expert_layer_offset", default=1, minimum=0)
    sparse = sum(layer % period == first for layer in range(total)) if experts > 1 else 0
    mlps = [_mlp(fields, "experts", size, weights=STACKED, layers=_count(sparse, total))] if sparse else []
    if sparse < total:
        mlps.append(_mlp(fields, "dense", size, layers=_count(total - sparse, total)))
    return tuple(mlps), _softmax(fields, experts, topk, normalised=False) if sparse else None


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
    mlps = [_mlp(fields, "experts", size, bias=bias, weights=STACKED, layers=_count(sparse, total))]
    if shared := fields.size("moe_num_shared_experts", default=2, minimum=0):
        mlps.append(_mlp(fields, "shared", shared * size, bias=bias, layers=_count(sparse, total)))
    if sparse < total:
        width = fields.size("intermediate_size")
        mlps.append(_mlp(fields, "dense", width, bias=bias, layers=_count(total - sparse, total)))
    experts, topk = fields.size("moe_num_experts"), fields.size("moe_k")
    why = "it adds a bias to softmax scores, and router-topk adds one to sigmoid and sqrtsoftplus alone"
    return tuple(mlps), _router(fields, Router(experts, topk, {}, why=why))


def _minimax_m2(fields: Fields) -> Parts:
    """Sigmoid scores with a bias in the selection, normalised; every layer sparse."""
    mlp = _mlp(fields, "experts", fields.size("intermediate_size"), weights=NUMBERED)
    keys = {"score_function": "sigmoid", "expert_bias": True}
    scoring = fields.peek("scoring_func", "sigmoid")
    why = "" if scoring == "sigmoid" else f"scoring_func = {show(scoring)}, and this model type computes sigmoid"
    experts, topk = fields.size("num_local_experts", "num_experts"), fields.size("num_experts_per_tok")
    return (mlp,), _router(fields, Router(experts, topk, keys, why=why))


def _gpt_oss(fields: Fields) -> Parts:
    """Clamped SwiGLU with biases, gate and up interleaved; softmax over the chosen."""
    activation, why = _activation(fields, gated=True)
    alpha, limit = fields.number("swiglu_alpha", default=1.702, quiet=True), fields.number("swiglu_limit", default=7.0)
    if activation is not None:
        activation = {"kind": "swiglu", "alpha": alpha, "limit": limit, "up_offset": 1.0}
        if fields.word("hidden_act", default="silu") not in ("silu", "swish"):
            activation, why = None, f"hidden_act = {show(fields.values['hidden_act'])}, and this model type has SwiGLU"
    size = fields.size("intermediate_size")
    mlp = Mlp("experts", size, activation, True, "interleaved", True, TRANSPOSED, why=why)
    experts = fields.size("num_local_experts", "num_experts")
    topk = fields.size("num_experts_per_tok", "experts_per_token")
    return (mlp,), replace(_softmax(fields, experts, topk, normalised=True), bias=True)


def _llama4(fields: Fields) -> Parts:
    """Sigmoid of the chosen logits, which scale the experts' input; a shared expert in each such layer."""
    size, total = fields.size("intermediate_size"), fields.size("num_hidden_layers", most=MAX_LAYERS)
    if "moe_layers" in fields.values:
        sparse = len(fields.layers("moe_layers"))
    else:
        step = fields.size("interleave_moe_layer_step", default=1)
        sparse = len(range(step - 1, total, step))
    mlps = [_mlp(fields, "experts", size, weights=TRANSPOSED, layers=_count(sparse, total))]
    mlps.append(_mlp(fields, "shared", size, layers=_count(sparse, total)))
    if sparse < total:
        width = fields.size("intermediate_size_mlp")
        mlps.append(_mlp(fields, "dense", width, layers=_count(total - sparse, total)))
    experts, topk = fields.size("num_local_experts"), fields.size("num_experts_per_tok")
    why = "" if topk == 1 else "several sigmoid scores a token are not divided by their sum, and router-topk does that"
    router = Router(experts, topk, {"score_function": "sigmoid"}, scales_input=True, why=why)
    return tuple(mlps), _router(fields, router)


def _count(some: int, total: int) -> str:
    return "every layer" if some == total else f"{some} of {total} layers"


TWO_LAYERS = "w1 is {}.weight and w2 is {}.weight, as the checkpoint has them"
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
    "qwen3_omni_moe_text": partial(_qwen_moe, expert_size="moe_intermediate_size", normalised=True),
    "deepseek_v2": partial(_deepseek, score="softmax"),
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "kimi_k2": _deepseek,
    "deepseek_v4": _deepseek_v4,
    "glm4_moe": _deepseek,
    "glm4_moe_lite": partial(_deepseek, dense=1, shared=1, factor=1.8),
    "glm_moe_dsa": partial(_deepseek, dense=3, shared=1, factor=2.5),
    "dots1": partial(_deepseek, norm=False),
    "kimi_linear": partial(_deepseek, dense=1, shared=1, factor=2.446),
    "mimo_v2_flash": partial(_deepseek, dense=1),
    "bailing_moe_v2": _deepseek,
    "mistral4": partial(_deepseek, score="softmax", norm=True, shared=1),
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
