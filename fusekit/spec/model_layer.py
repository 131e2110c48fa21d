"""The layers of a model, each as one table: its experts with router and shared experts, and its dense MLPs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fusekit.errors import SpecError
from fusekit.plan.layer.options import DECODED, MXFP4
from fusekit.plan.quant import MX_SIDE, SIDE
from fusekit.spec.hf_model import AS_STORED, IN_BLOCKS, Mlp, Model, Router
from fusekit.spec.model_kernels import Kernel, Request, Sizes, mlp_title, router_section, sections

_LAYER_ROUTER = ("score_function", "pre_softmax", "expert_bias", "num_groups", "group_topk", "scaling_factor")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the file. instead: sections of single kernels, for a layer that cannot be built."""

    title: str
    kernels: list[Kernel]
    instead: list[tuple[str, list[Kernel]]] = field(default_factory=list)


def parts(model: Model, sizes: Sizes, request: Request) -> Iterator[Part]:
    """Every layer of the model. The experts of one rank of several take choices, so that the router is separate."""
    listed = list(sections(model, sizes, request))
    routing, listed = (listed[:2], listed[2:]) if model.router is not None else ([], listed)
    instead = {mlp.role: section for mlp, section in zip(model.mlps, listed, strict=True)}
    router, shared = model.router, next((mlp for mlp in model.mlps if mlp.role == "shared"), None)
    joined = shared if shared is not None and _joins(model, shared, request) else None
    if (door := request.outside) is not None:
        routed = next((mlp for mlp in model.mlps if mlp.role == "experts"), None)
        if routed is None or router is None:
            raise SpecError(f"--for {request.door}: this model has no experts; leave it out")
        if routed.bias and not door.biases:
            raise SpecError(f"--for {request.door}: this model's experts have biases, which that door does not take")
        layer = _experts(model, router, routed, None, sizes, request)
        yield Part(f"{mlp_title(model, routed)}, as {door.package} calls them", [layer])
        return
    for mlp in model.mlps:
        if mlp.role == "experts" and router is not None:
            layer = _experts(model, router, mlp, joined, sizes, request)
            apart = [router_section(router, sizes, request)] if request.ranks > 1 else []
            others = [] if joined is None else [instead[joined.role]]
            yield Part(_title(model, mlp, request), [layer], [*routing[len(apart) :], instead[mlp.role], *others])
            yield from (Part(*section) for section in apart)
        elif mlp is not joined:
            yield Part(_title(model, mlp, request), [_mlp(model, mlp, request)], [instead[mlp.role]])


def _joins(model: Model, shared: Mlp, request: Request) -> bool:
    """Whether the shared experts are a part of the layer of the routed ones."""
    routed = next(mlp for mlp in model.mlps if mlp.role == "experts")
    alike = (shared.activation, shared.glu_layout) == (routed.activation, routed.glu_layout)
    return alike and not shared.bias and request.ranks == 1


def _title(model: Model, mlp: Mlp, request: Request) -> str:
    stored = mlp.weights if mlp.b_major == "k" else AS_STORED
    if model.weights == MXFP4 and not request.training and _reads(model, mlp, request):
        stored = IN_BLOCKS
    return f"{mlp_title(model, mlp)}; {stored}"


def _common(model: Model, mlp: Mlp, request: Request) -> dict[str, Any]:
    """The keys of any layer, of which those with usual values are left out."""
    keys: dict[str, Any] = {"hidden": model.hidden, "intermediate": mlp.intermediate}
    keys["activation"] = dict(mlp.activation or {})
    if mlp.gated:
        keys["glu_layout"] = mlp.glu_layout
    if mlp.bias:
        keys["bias"] = True
    if not request.training:
        keys |= {"keep": "none"} | ({"weights": model.weights} if _reads(model, mlp, request) else {})
    door, major = request.outside, "k" if "weights" in keys else mlp.b_major
    if door is not None:
        keys |= {name: value for name, value in (door.keys or {}).items() if request.training and name != "keep"}
        if door.package != "transformers":  # which alone has weights as the checkpoint stores them
            major = "k"
        if mlp.gated and door.glu_layout:
            keys["glu_layout"] = door.glu_layout
    return keys | ({"b_major": major} if major != "k" else {})


def _reads(model: Model, mlp: Mlp, request: Request) -> bool:
    """Whether a layer for inference reads the checkpoint's quantised weights as they are."""
    if model.weights == MXFP4:
        layout = request.outside is None or request.outside.glu_layout in ("", mlp.glu_layout)
        return layout and not model.hidden % (2 * MX_SIDE) and not mlp.intermediate % (2 * MX_SIDE)
    return model.weights != "none" and not mlp.intermediate % SIDE  # else a block of scales has rows of gate and of up


def _experts(
    model: Model, router: Router, mlp: Mlp, shared: Mlp | None, sizes: Sizes, request: Request
) -> Kernel:  # fmt: skip
    door = request.outside
    given = request.ranks > 1 or bool(router.why) or door is not None
    rows = request.ranks > 1 or (door is not None and door.rows)
    topk, tokens = (1, sizes.rows) if rows else (router.topk, sizes.tokens)
    logits = not given and bool(router.experts % 8)  # the product that makes them has a multiple of 8 columns
    routing: dict[str, Any] = {"input": "choices"} if given else {
        **({"input": "logits"} if logits else {"bias": True} if router.bias else {}),
        **{key: value for key, value in router.keys.items() if key in _LAYER_ROUTER},
    }  # fmt: skip
    if router.scales_input:
        routing["scale"] = "input"
    loss = router.aux_loss and request.training and not given and not router.by_sequence
    if loss:
        routing["aux_loss"] = True
    keys: dict[str, Any] = {"kind": "moe", **_common(model, mlp, request)}
    keys |= {"experts": sizes.groups, "topk": topk, "router": routing}
    if shared is not None:
        keys["shared"] = shared.intermediate
        keys |= {"shared_gate": True} if shared.scaled else {}
        if shared.intermediate % SIDE:
            keys.pop("weights", None)
    text = "y[T, H] from x[T, H]"
    if given:
        text += ", indices[T, K] and weights[T, K]"
    if router.why and request.ranks == 1 and door is None:
        text += f". The router is not covered: {router.why}"
    if logits:
        text = (
            f"{text} and logits[T, X], x . Wr^T{' + b' if router.bias else ''}. These are not covered: the layer makes "
            f"them for a multiple of 8 experts"
        )
    if loss:
        text += f". The load-balancing loss takes its coefficient, here {router.aux_loss:g}, at launch"
    if shared is not None:
        text += f". Of the shared experts, {shared.weights}"
        text += "; shared_gate[1, H] is shared_expert_gate.weight" if shared.scaled else ""
    what = "experts" if given else "router and experts"
    summary = f"One layer, {_passes(request)}: {what}{', and the shared experts' if shared is not None else ''}"
    why = mlp.why or ("" if shared is None else shared.why)
    return Kernel("moe", summary, text, {**keys, "problem": _problem(request, tokens)}, why)


def _mlp(model: Model, mlp: Mlp, request: Request) -> Kernel:
    name = "mlp" if model.router is None else mlp.role
    keys = {"kind": "mlp", **_common(model, mlp, request), "problem": _problem(request, request.tokens)}
    return Kernel(name, f"The MLP, {_passes(request)}", "y[T, H] from x[T, H]", keys, mlp.why)


def _problem(request: Request, tokens: int) -> dict[str, Any]:
    """The tokens that variants are chosen for: of inference, those of decoding as well."""
    return {"T": tokens if request.training else [*(few for few in DECODED if few < tokens), tokens]}


def _passes(request: Request) -> str:
    return "forward and backward" if request.training else "for inference"
