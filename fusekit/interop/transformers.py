"""fusekit as an experts backend of Transformers 5: `experts_implementation="fusekit"`.

    fusekit.interop.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", experts_implementation="fusekit")

Transformers keeps the router; fusekit runs the experts, forward and backward, on the model's own parameters. The layer
is found in the store by what the module computes: `kind = "moe"` with `router = { input = "choices" }`. FP8 checkpoints
with 128 x 128 scales run in layers with `weights = "fp8-block"`, MXFP4 checkpoints of gpt-oss in those with "mxfp4",
tokens in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from fusekit.errors import ArgumentError
from fusekit.interop.experts import Experts, given_parameters, layer_for
from fusekit.interop.torch_layer import DTYPES, casting, launch, operator_of, quantised
from fusekit.interop.torch_moe import main_grad
from fusekit.library import Library, open_library
from fusekit.plan.layer.options import MXFP4
from fusekit.plan.quant import BLOCK, MX_SIDE, PACKED, SIDE

NAMES = {"w1": ("gate_up_proj", "up_proj"), "w2": ("down_proj",) * 2, "b1": ("gate_up_proj_bias", "up_proj_bias"),
         "b2": ("down_proj_bias",) * 2}  # fmt: skip
"""A layer's parameters in an experts module: (gated, not gated)."""

SCALED = ("w1", "w2", "shared_w1", "shared_w2")
"""The parameters that are FP8 in an FP8 checkpoint, or MXFP4 in such a one."""

BLOCKS = "_blocks"
"""Added to the name of an MXFP4 weight."""

# Numbers that modules keep for their gate.
_NUMBERS = ("alpha", "limit", "swiglu_alpha", "swiglu_limit", "gate_softcap", "up_softcap")
_Names = tuple[str, ...]
_Found = tuple[str, _Names, _Names, _Names, _Names, _Names]  # an operator's name, inputs, their types, ...

_GATED, _PLAIN = ("swiglu", "geglu", "reglu"), ("silu", "gelu", "relu", "srelu")


def register(
    library: Library | None = None, name: str = "fusekit", layers: str = "*", recipe: str = "none",
    in_place: bool = False, blocks: bool = False,
) -> None:  # fmt: skip
    """Registers the experts backend `name`: `experts_implementation="fusekit"`.

    Under autocast the module's tensors are cast to the layer's dtypes. Indices outside the experts, as expert
    parallelism has them, add nothing.

    Parameters
    ----------
    library : Library, optional
        Default: the library of the environment, opened at the first call of a model.
    name : str
    layers : str
        Glob of the names of layers to choose from. If several fit, a layer is preferred that reads the weights as they
        are, then one without `accumulate`, one that keeps z, one that can be trained, and the first by name. With
        `accumulate`, each weight needs a float32 `main_grad`; see `fusekit.interop.torch.MoE`.
    recipe : str
        Of the layers, such as "fp8-block"; each call then quantises the weights, unless `hold_fp8` was called.
    in_place : bool
        As for `MoE`.
    blocks : bool
        Run whole blocks, from the router to the shared expert, in layers with `router = { input = "x" }`. Models that
        are made from then on compare each kind of block once with its own code. A block of which hooks watch a part
        runs the model's code, with its experts through fusekit; so does one whose model asks for router logits.

    Raises
    ------
    NotBuiltError
        From a call of a module that no layer fits. The message has the spec to build.
    ArgumentError
        From a call of a module for which fusekit has no kernels; with `blocks`, when such a model is made.
    """
    function = backend(library, layers, recipe, in_place)
    for interface in _interfaces():
        interface.register(name, function)
    try:
        from fusekit.interop.transformers_mxfp4 import install as install_mxfp4
    except ImportError:  # a version that has no MXFP4 checkpoints
        pass
    else:
        install_mxfp4(name)
    if blocks:
        from fusekit.interop.transformers_blocks import install

        install(name, library, layers, recipe, in_place)


def _interfaces() -> Iterator[Any]:
    """Transformers' registries of experts backends."""
    yield ExpertsInterface
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    except ImportError:  # a version that has none of its own for FP8 checkpoints
        return
    yield FP8ExpertsInterface


def fuse(
    model: Any, *, norms: bool = True, mlps: bool = False, residuals: bool = False, compiled: bool = False,
    library: Library | None = None, layers: str = "*",
) -> dict[str, int]:  # fmt: skip
    """Lets fusekit compute modules of a model, in place; for models with and without experts.

        model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16")
        fusekit.interop.transformers.fuse(model)

    Each class is compared once with its own code, and modules with other tensors than those it was fused for, such as
    float32 ones or adapters, run that code.

    Parameters
    ----------
    model : torch.nn.Module
    norms : bool
        RMSNorms in bf16 on a GPU, also those of heads, with the kernels of `fusekit build rms-norm`.
    mlps : bool
        Dense MLPs of a gate, an up and a down projection, in layers with `kind = "mlp"`. A call joins the first two.
    residuals : bool
        The residuals around whole blocks, of a model made with `register(blocks=True)`: the sum after the attention
        with the norm after it, the sum after the block in the block's layer, which has `residual = true`.
    compiled : bool
        Norms and MLPs under torch.compile, too, which by itself fuses norms with what is next to them.
    library : Library, optional
        Has the layers of MLPs. Default: that of the environment.
    layers : str
        Glob of the names of those layers.

    Returns
    -------
    dict
        How many modules of each sort.

    Raises
    ------
    NotBuiltError
        If no layer fits an MLP; with `residuals`, from a call of a block that no layer fits. The message has the spec
        to build.
    ArgumentError
        For a module whose code computes something else; for a model with none.
    """
    from fusekit.interop.transformers_decoders import fuse_residuals
    from fusekit.interop.transformers_modules import fuse_mlps, fuse_norms

    counts = {"norms": fuse_norms(model, compiled)} if norms else {}
    if mlps:
        counts["mlps"] = fuse_mlps(model, library, layers, compiled)
    if residuals:
        counts["residuals"] = fuse_residuals(model)
    if not any(counts.values()):
        raise ArgumentError(f"{type(model).__name__} has no module of {' or '.join(counts)} to fuse; leave fuse() out")
    return counts


def hold_fp8(model: Any, hold: bool = True) -> int:
    """Quantises the weights of a model's blocks now, and then once for each step of an optimiser instead of each call.

        fusekit.interop.transformers.register(recipe="fp8-block", blocks=True)
        model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", experts_implementation="fusekit").cuda()
        fusekit.interop.transformers.hold_fp8(model)

    A step of any torch.optim.Optimizer and load_state_dict quantise again, a step that is captured in a CUDA graph as
    part of that graph. Eager calls also notice every change whose tensor's version PyTorch raises. Not noticed are
    writes through `.data`, and by other code before a compiled call or a replay: call this again after those. The FP8
    values stay in the same memory, 2 bytes for each weight.

    Parameters
    ----------
    model : torch.nn.Module
        On its device. With `register(blocks=True)` and a recipe.
    hold : bool
        False: each call quantises the weights again.

    Returns
    -------
    int
        How many blocks.

    Raises
    ------
    ArgumentError
        For a model without such a block.
    """
    from fusekit.interop.transformers_blocks import hold_fp8

    count = hold_fp8(model, hold)
    if not count:
        raise _no_block(model)
    return count


def recompute_fp8(model: Any, blocks: int | None = 1) -> int:
    """Lets the backward passes of a model's first blocks make the FP8 weights that they read themselves, in memory that
    the weights' gradients take later; so these blocks keep no FP8 weights from forward to backward.

        fusekit.interop.transformers.register(recipe="fp8-block", blocks=True)
        model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", experts_implementation="fusekit").cuda()
        fusekit.interop.transformers.recompute_fp8(model)

    While the gradients of the first block are made, all others are there. So that block alone decides the peak, unless
    there is no room earlier, or gradients of earlier microbatches are there all the time. Results have the same bits.
    The layers have `recompute_fp8 = true` in their table, next to the others. Call this before torch.compile.

    Parameters
    ----------
    model : torch.nn.Module
        On its device. With `register(blocks=True)` and a recipe.
    blocks : int, optional
        How many, in the order of the model. None: all. 0: none any more.

    Returns
    -------
    int
        How many blocks do so.

    Raises
    ------
    NotBuiltError
        If no layer with `recompute_fp8` fits a block. The message has the spec to build.
    ArgumentError
        For a model without such a block.
    """
    from fusekit.interop.transformers_blocks import recompute_fp8

    if blocks is not None:
        blocks = ArgumentError.integer("blocks", blocks, "a number of blocks, 0 or more, or None for all", 0)
    count, found = recompute_fp8(model, blocks)
    if not found:
        raise _no_block(model)
    return count


def _no_block(model: Any) -> ArgumentError:
    return ArgumentError(
        f"{type(model).__name__} has no block that a layer with a recipe computes; call"
        ' register(recipe="fp8-block", blocks=True) before the model is made'
    )


def backend(
    library: Library | None = None, layers: str = "*", recipe: str = "none", in_place: bool = False
) -> Callable[..., Any]:
    """The function that `register` registers."""
    opened: list[Library] = [] if library is None else [library]
    known: dict[tuple[Any, ...], _Found] = {}

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def look_up(*key: Any) -> _Found:
        if key not in known:
            if not opened:
                opened.append(open_library())
            wanted = with_recipe(described(*key), recipe, key[0].__name__)
            layer = opened[0].layer(layer_for(opened[0], layers, wanted, key[0].__name__))
            operator, buffers = operator_of(layer, in_place=in_place), layer.record.buffers
            types = tuple(buffers[name].dtype for name in operator.inputs)
            known[key] = operator.name, operator.inputs, types, operator.summed, operator.weights, operator.fp8
        return known[key]

    def experts(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """Transformers' call: [T, H], [T, K] and [T, K] to [T, H]."""
        if _set_in(module, "has_post_expert_norm"):
            raise ArgumentError(
                f"{type(module).__name__}: it normalises what each expert gives, for which fusekit has no kernel; use"
                ' experts_implementation="grouped_mm" for this model'
            )
        device, w2 = hidden_states.device.type, getattr(module, path_in(module, "down_proj"))
        weight_dtype, shape = w2.dtype, w2.shape if w2.dim() == 3 else (*w2.shape[:2], w2.shape[2] * MX_SIDE)
        cast, scaled = casting(device), has_scales(module)
        dtype = hidden_states.dtype if scaled else weight_dtype
        if cast:
            dtype = torch.get_autocast_dtype(device)
        shape = (*shape, top_k_index.shape[-1])
        # As text: torch.compile would make symbols of floats.
        numbers = [_text(_set_in(module, attribute)) for attribute in _NUMBERS]
        flags = module.has_gate, module.has_bias, module.is_transposed
        kinds = type(module), type(getattr(module, "act_fn", None))
        name, inputs, types, summed, weights, fp8 = look_up(*kinds, dtype, weight_dtype, *shape, *flags, *numbers)
        tensors = {"x": hidden_states, "indices": top_k_index.to(torch.int32), "weights": top_k_weights.float()}
        for argument, (gated, plain) in NAMES.items():
            if argument in inputs:
                path = path_in(module, gated if module.has_gate else plain)
                tensors[argument] = getattr(module, path)
                if scaled and argument in SCALED:
                    tensors[f"{argument}_s"] = as_read(getattr(module, scales_of(path)))
        if cast:
            for argument, kind in zip(inputs, types, strict=True):
                if argument in ("x", *NAMES):
                    tensors[argument] = tensors[argument].to(DTYPES[kind])
        if fp8:
            tensors |= quantised(name, weights, fp8, tensors)
        sums = [main_grad(getattr(module, NAMES[weight][not module.has_gate]), weight) for weight in summed]
        return launch(name, [tensors[argument] for argument in inputs], sums)[0]

    return experts


def _set_in(module: Any, name: str) -> Any:
    """A plain attribute of a module or its class, or None; `nn.Module` itself is slow where there is none."""
    return vars(module)[name] if name in vars(module) else getattr(type(module), name, None)


def path_in(module: Any, name: str) -> str:
    """The name of a parameter of an experts module, which has MXFP4 weights by other names."""
    return f"{name}{BLOCKS}" if f"{name}{BLOCKS}" in module._parameters else name


def scales_of(path: str) -> str:
    """The name of the scales of an FP8 or MXFP4 weight."""
    return f"{path.removesuffix(BLOCKS)}_scales" if path.endswith(BLOCKS) else f"{path}_scale_inv"


def as_read(scales: Any) -> Any:
    """Scales as a layer reads them."""
    return scales if scales.dtype == torch.uint8 else scales.float()  # of e8m0 a copy


def has_scales(module: Any) -> bool:
    """Whether an experts module has FP8 or MXFP4 weights. Raises ArgumentError for those that no layer reads."""
    path = path_in(module, "down_proj")
    weights = getattr(module, path)
    if weights.element_size() > 1:
        return False
    if path.endswith(BLOCKS):
        return True
    block = getattr(module, "block_size", None)
    if weights.dtype == DTYPES["e4m3"] and block is not None and tuple(block) == (SIDE, SIDE):
        return True
    raise ArgumentError(
        f"{type(module).__name__}: its weights are {weights.dtype} with scales of blocks of {block}; fusekit reads"
        f' {DTYPES["e4m3"]} with scales of [{SIDE}, {SIDE}]; use experts_implementation="grouped_mm" for this model'
    )


def described(
    module: type, act_fn: type, dtype: Any, weight_dtype: Any, experts: int, rows: int, columns: int, topk: int,
    has_gate: bool, has_bias: bool, is_transposed: bool, *numbers: str | None,
) -> Experts:  # fmt: skip
    """The computation of an experts module, from its class and numbers. Raises ArgumentError if fusekit has no kernel.

    act_fn: the class of its activation. dtype: of the products. rows, columns: of an expert's down_proj. numbers: its
    `_NUMBERS`, as `float.hex` writes them.
    """
    intermediate, hidden = (rows, columns) if is_transposed else (columns, rows)
    kind, weights = map(_type_name, (dtype, weight_dtype))
    activation, layout = recognised(module, act_fn, has_gate, _numbers(numbers))
    major = "n" if is_transposed else "k"
    experts_ = Experts(hidden, intermediate, experts, topk, kind, given_parameters(activation), layout, has_bias, major)
    return replace(experts_, **_of_weights(kind, weights))


def described_layer(layer: Experts, dtype: Any, weight_dtype: Any, router_dtype: Any) -> Experts:
    """The layer with these types of PyTorch: of the products, of the experts' weights, of the router's."""
    kind, weights, router = map(_type_name, (dtype, weight_dtype, router_dtype))
    return replace(layer, dtype=kind, router_dtype=router, **_of_weights(kind, weights))


def with_recipe(experts: Experts, recipe: str, module: str) -> Experts:
    """The experts in layers with that recipe. Raises ArgumentError for FP8 weights, which no recipe quantises."""
    if recipe != "none" and experts.weights != "none":
        raise ArgumentError(
            f'{module}: recipe = "{recipe}" quantises weights, and these are FP8 values already; leave recipe out of'
            " fusekit.interop.transformers.register() for this model",
            argument="recipe",
        )
    return replace(experts, recipe=recipe)


def _of_weights(kind: str, weights: str) -> dict[str, Any]:
    """What is said of weights of a type, for products of `kind`."""
    if weights == "e4m3":
        return {"weights": BLOCK}
    if weights == PACKED:
        return {"weights": MXFP4, "b_major": "k"}
    return {"weight_dtype": "" if weights == kind else weights}


def _type_name(torch_dtype: Any) -> str:
    return next((name for name, known in DTYPES.items() if known == torch_dtype), str(torch_dtype))


# -- activations ------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str | None:
    return float(value).hex() if isinstance(value, (int, float)) else None


def _numbers(texts: tuple[str | None, ...]) -> dict[str, float]:
    return {name: float.fromhex(text) for name, text in zip(_NUMBERS, texts, strict=True) if text is not None}


def recognised(module: type, act_fn: type, has_gate: bool, numbers: dict[str, float]) -> tuple[dict[str, Any], str]:
    """The activation and GLU layout that give the same as the module's own code on test numbers in float64."""
    widest = max([20.0, *(2.0 * value for value in numbers.values())])
    z = torch.linspace(-widest, widest, 16 * 128, dtype=torch.float64, device="cpu")
    z = z[torch.randperm(z.numel(), generator=torch.Generator().manual_seed(0))].reshape(16, 128)
    try:
        stand_in = SimpleNamespace(**dict.fromkeys(_NUMBERS) | numbers, act_fn=act_fn())
        want = module._apply_gate(stand_in, z) if has_gate else stand_in.act_fn(z)  # type: ignore[attr-defined]
    except Exception as error:  # of whatever the module's code needs beyond
        raise ArgumentError(
            f"{module.__name__}: its activation cannot be looked at ({type(error).__name__}: {error}); use"
            ' experts_implementation="grouped_mm" for this model'
        ) from error
    for activation, layout in candidates(has_gate, numbers):
        result = activated(activation, layout, z)
        if result.shape == want.shape and torch.allclose(result, want, rtol=1e-9, atol=1e-12):
            return activation, layout
    raise ArgumentError(
        f"{module.__name__}: its activation is none of {', '.join(_GATED if has_gate else _PLAIN)} with its numbers"
        f' {numbers}; fusekit has no kernel for it; use experts_implementation="grouped_mm" for this model'
    )


def candidates(has_gate: bool, numbers: dict[str, float]) -> Iterator[tuple[dict[str, Any], str]]:
    """Activations and GLU layouts that kernels have, with a module's numbers."""
    alphas = [1.0, *(value for name, value in numbers.items() if name.endswith("alpha"))]
    limits = [None, *(value for name, value in numbers.items() if name.endswith("limit"))]
    approximations = ("none", "tanh")
    if not has_gate:
        for kind, approximate in product(_PLAIN, approximations):
            yield {"kind": kind, "approximate": approximate}, "none"
        return
    for kind, layout, limit, offset in product(_GATED, ("concat", "interleaved", "interleaved-32"), limits, (0.0, 1.0)):
        for alpha, approximate in product(alphas, approximations):
            settings = {"kind": kind, "alpha": alpha, "approximate": approximate}
            yield {**settings, "limit": limit, "up_offset": offset}, layout


def activated(activation: dict[str, Any], layout: str, z: Any) -> Any:
    """The definition of an activation, in PyTorch."""
    functional, kind = torch.nn.functional, activation["kind"]
    plain = {
        "silu": functional.silu, "relu": torch.relu, "srelu": lambda v: torch.relu(v).square(),
        "gelu": lambda v: functional.gelu(v, approximate=activation["approximate"]),
    }  # fmt: skip
    if kind in plain:
        return plain[kind](z)
    if layout == "concat":
        gate, up = z.chunk(2, dim=-1)
    else:
        blocks = z.unflatten(-1, (-1, 2, 1 if layout == "interleaved" else 32))
        gate, up = blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)
    if activation["limit"] is not None:
        gate, up = gate.clamp(max=activation["limit"]), up.clamp(-activation["limit"], activation["limit"])
    gates = {
        "swiglu": lambda v: v * torch.sigmoid(activation["alpha"] * v), "reglu": torch.relu, "geglu": plain["gelu"],
    }  # fmt: skip
    return gates[kind](gate) * (up + activation["up_offset"])
