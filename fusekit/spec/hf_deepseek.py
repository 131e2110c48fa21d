"""Model types with the router of DeepSeek: sigmoid scores with a bias, groups, shared experts."""

from typing import Any

from fusekit.spec.config_fields import Fields
from fusekit.spec.hf_model import STACKED, Mlp, Router
from fusekit.spec.hf_readers import MAX_LAYERS, Parts, activation_of, checked, layer_count, mlp_of
from fusekit.spec.values import show


def deepseek(
    fields: Fields, *, score: str = "sigmoid", dense: int = 0, norm: bool | None = None, shared: int = 0,
    factor: float = 1.0, groups: tuple[int, int] = (1, 1),
) -> Parts:  # fmt: skip
    """DeepSeek's, Kimi's, GLM's and others': sigmoid scores and a bias (V2: softmax), groups, shared experts.

    Defaults of the config: dense, the layers without experts; norm, whether weights are divided by their sum (None:
    what Transformers always does); shared, experts; factor, of the weights; groups, all and those kept.
    """
    size, total = fields.size("moe_intermediate_size"), fields.size("num_hidden_layers", most=MAX_LAYERS)
    sparse = _sparse(fields, total, dense)
    mlps = [mlp_of(fields, "experts", size, weights=STACKED, layers=layer_count(sparse, total))]
    if shared := fields.size("n_shared_experts", "num_shared_experts", default=shared, minimum=0):
        mlps.append(mlp_of(fields, "shared", shared * size, layers=layer_count(sparse, total)))
    if sparse < total:
        width = fields.size("intermediate_size")
        mlps.append(mlp_of(fields, "dense", width, layers=layer_count(total - sparse, total)))
    experts = fields.size("n_routed_experts", "num_experts", "num_local_experts")
    topk = fields.size("num_experts_per_tok", "num_experts_per_token")
    keys, why = deepseek_router(fields, score, topk, norm, factor, groups)
    aux = fields.number("aux_loss_alpha", default=0.0, quiet=True)
    note, by_sequence = "", fields.peek("seq_aux") is True
    if by_sequence:
        note = "seq_aux is true: the loss is that of each sequence; launch the loss's four kernels for each of them"
    router = Router(experts, topk, keys, aux_loss=aux, aux_note=note, why=why, by_sequence=by_sequence)
    return tuple(mlps), checked(fields, router)


def _sparse(fields: Fields, total: int, dense: int) -> int:
    """How many layers have experts."""
    kinds, every = fields.peek("mlp_layer_types"), fields.peek("moe_layer_freq")
    for name, listed in (("mlp_layer_types", kinds), ("moe_layer_freq", every)):
        if isinstance(listed, list):
            if len(listed) != total:
                raise fields.error(f"{name} has {len(listed)} items: there are {total} layers; give one for each")
            fields.peek("first_k_dense_replace")  # the list follows from it
            return sum(kind not in ("dense", 0) for kind in listed)
    first = fields.size("first_k_dense_replace", default=dense, minimum=0)
    every = fields.size("moe_layer_freq", default=1, quiet=True)
    return sum(layer >= first and layer % every == 0 for layer in range(total))


def deepseek_router(
    fields: Fields, score: str, topk: int, norm_default: bool | None = None, factor: float = 1.0,
    default_groups: tuple[int, int] = (1, 1),
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
    groups = fields.size("n_group", "num_expert_group", default=default_groups[0])
    kept = fields.size("topk_group", default=default_groups[1])
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


def deepseek_v4(fields: Fields) -> Parts:
    """Clamped SwiGLU; square roots of softplus scores and a bias; in the first layers experts by token id."""
    size, total = fields.size("moe_intermediate_size"), fields.size("num_hidden_layers", most=MAX_LAYERS)
    limit = fields.number("swiglu_limit", default=10.0)
    activation, why = activation_of(fields, gated=True)
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
    return (experts, shared), checked(fields, Router(count, topk, {} if why else keys, why=why))
