"""Whole blocks of Transformers in one layer: router, experts and shared expert.

    fusekit.interop.transformers.register(blocks=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", experts_implementation="fusekit")

A block is a module with `experts` and a router, `gate` or `router`. Which layer computes it is read from the model's
config, as `fusekit new` reads it, and compared once with the block's own code, in float64 on a small copy of the block.
A block whose router or experts somebody watches by hooks, as `output_router_logits` does, runs the model's own code,
with its experts through fusekit.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, wraps
from math import prod
from typing import Any

import torch
from transformers import PreTrainedModel

from fusekit.errors import ArgumentError, FusekitError
from fusekit.interop import torch_fp8
from fusekit.interop.experts import Experts, layer_for
from fusekit.interop.torch_layer import DTYPES, Operator, casting, launch, operator_of, operators, quantised
from fusekit.interop.torch_moe import at, joined, main_grad
from fusekit.interop.transformers import (
    BLOCKS,
    NAMES,
    SCALED,
    as_read,
    described_layer,
    has_scales,
    path_in,
    scales_of,
    with_recipe,
)
from fusekit.library import Library, open_library

ROUTERS = ("gate", "router")
"""Names of a block's router."""

_SHARED = ("shared_experts", "shared_expert")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HIDDEN, _INTERMEDIATE, _TOKENS = 64, 32, 24  # of the copy that is compared
_CLOSE = 1e-4  # relative Frobenius error of that comparison: routers compute in float32
_Paths = tuple[tuple[str, tuple[str, ...]], ...]  # an argument of a layer, and where the tensors of it lie


@dataclass(frozen=True, slots=True)
class Block:
    """The computation of a block. layer: as keys of a spec. paths: of its tensors from the block, by a layer's names;
    two are a gate and an up projection. is_tuple: whether the block gives (y, the router's weights).
    """

    layer: Experts
    paths: _Paths
    is_tuple: bool


def install(name: str, library: Library | None, layers: str, recipe: str, in_place: bool) -> None:
    """Blocks of models whose experts implementation is `name` run as one layer; see `transformers.register`."""
    _backends()[name] = Backend(library, layers, recipe, in_place)
    for method in ("post_init", "set_experts_implementation"):
        original = getattr(PreTrainedModel, method)
        if not hasattr(original, "_fusekit_blocks"):
            setattr(PreTrainedModel, method, _describing(original))


def _describing(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a model, after which its blocks are looked at."""

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for block in blocks_of(self):
            if block.experts.config._experts_implementation in _backends():
                describe(block)
        return result

    method._fusekit_blocks = True  # type: ignore[attr-defined]
    return method


def blocks_of(model: Any) -> Iterator[Any]:
    """The modules of a model that are whole blocks: experts of Transformers' interface, and a router."""
    for module in model.modules():
        experts = module._modules.get("experts")
        if hasattr(experts, "is_transposed") and any(name in module._modules for name in ROUTERS):
            yield module


class Backend:
    """Where layers of blocks are looked up. The arguments are those of `transformers.register`."""

    def __init__(self, library: Library | None, layers: str, recipe: str, in_place: bool) -> None:
        self._opened = [] if library is None else [library]
        self._layers, self._recipe, self._in_place = layers, recipe, in_place
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def look_up(self, *key: Any) -> tuple[Any, ...]:
        """An operator's name, inputs, their types, summed parameters, weights, FP8 weights.

        key: a key of `_blocks()`, dtype of the products, of the experts' weights, of the router's weight, whether a
        residual is added, and whether the layer recomputes FP8 weights.
        """
        if key not in self._known:
            if not self._opened:
                self._opened.append(open_library())
            which, dtype, weight_dtype, router_dtype, residual, again = key
            wanted = described_layer(_blocks()[which].layer, dtype, weight_dtype, router_dtype)
            module = which.partition(" ")[0]
            wanted = replace(with_recipe(wanted, self._recipe, module), residual=residual, recompute_fp8=again)
            layer = self._opened[0].layer(layer_for(self._opened[0], self._layers, wanted, module))
            operator, buffers = operator_of(layer, in_place=self._in_place), layer.record.buffers
            types = tuple(buffers[name].dtype for name in operator.inputs)
            self._known[key] = operator.name, operator.inputs, types, operator.summed, operator.weights, operator.fp8
        return self._known[key]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _look_up(name: str, *key: Any) -> tuple[Any, ...]:
    return _backends()[name].look_up(*key)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _serves(name: str) -> bool:
    return name in _backends()


@cache
def _backends() -> dict[str, Backend]:
    """By the name of the experts implementation."""
    return {}


@cache
def _blocks() -> dict[str, Block]:
    """What is known of blocks, by class and config."""
    return {}


# -- a call -----------------------------------------------------------------------------------------------------------


def _take_over(kind: type) -> None:
    """Lets modules of the class ask first whether a layer computes them."""
    original: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]
    if hasattr(original, "_fusekit_blocks"):
        return

    @wraps(original)
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not is_served(self):
            return original(self, hidden_states, *args, **kwargs)
        y = run(self, hidden_states)
        return (y, None) if self._fusekit_tuple else y

    forward._fusekit_blocks = True  # type: ignore[attr-defined]
    kind.forward = forward  # type: ignore[attr-defined]


def is_served(module: Any) -> bool:
    """Whether a layer computes the block."""
    experts = module.experts
    expert_parallel = getattr(experts, "_is_expert_parallel", False)
    return _serves(experts.config._experts_implementation) and not expert_parallel and not is_watched(module)


def is_watched(module: Any) -> bool:
    """Whether somebody asked to see what a part of the block takes or gives."""
    return any(has_hooks(child) for child in module._modules.values())


def has_hooks(module: Any) -> bool:
    """Whether somebody asked to see what the module takes or gives."""
    return any(getattr(module, hooks) for hooks in _HOOKS)


def run(module: Any, x: Any, residual: Any = None) -> Any:
    """The block's output from its layer, which adds the residual if the block was fused with one."""
    known = _paths_in(module)
    parameters = {argument: _tensor(module, paths) for argument, paths in known}
    name = module.experts.config._experts_implementation
    cast, scaled = casting(x.device.type), has_scales(module.experts)
    key = _key(module, x.device.type, cast, x.dtype if scaled else None, parameters)
    operator, inputs, types, summed, weights, fp8 = _look_up(name, *key)
    tensors = {"x": x, **parameters}
    if scaled:
        for argument, paths in known:
            if argument in SCALED:
                tensors[f"{argument}_s"] = as_read(_tensor(module, tuple(scales_of(path) for path in paths)))
    for argument, kind in zip(inputs, types, strict=True):
        if argument in parameters and (cast or argument in ("router", "router_bias", "expert_bias")):
            tensors[argument] = tensors[argument].to(DTYPES[kind])
    if cast:
        tensors["x"] = x.to(DTYPES[types[0]])
    if "residual" in inputs:
        tensors["residual"] = torch.zeros_like(tensors["x"]) if residual is None else residual
    if "total_tokens" in inputs:  # of the layer's own loss, which is of no use here
        tensors["total_tokens"] = torch.full((1,), prod(x.shape[:-1]), dtype=torch.int32, device=x.device)
        tensors["aux_coefficient"] = torch.zeros(1, dtype=torch.float32, device=x.device)
    if fp8:
        held = getattr(module, "_fusekit_fp8", None)
        if held is not None and held.name == operator and (torch.compiler.is_compiling() or held.refresh(module)):
            tensors |= dict(zip(fp8, held.tensors, strict=True))
        else:
            tensors |= quantised(operator, weights, fp8, tensors)
    sums = [main_grad(parameters[weight], weight) for weight in summed]
    return launch(operator, [tensors[argument] for argument in inputs], sums)[0]


def _key(
    module: Any, device: str, cast: bool, dtype: Any = None, parameters: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    """The arguments of `Backend.look_up`. dtype: of the products; default: that of the experts' weights. parameters:
    the block's by a layer's names, if they are at hand.
    """
    parameters = parameters or {name: _tensor(module, paths) for name, paths in _paths_in(module)}
    of_experts, of_router = parameters["w2"].dtype, parameters["router"].dtype
    dtype = torch.get_autocast_dtype(device) if cast else dtype or of_experts
    residual = vars(module).get("_fusekit_residual", False)
    return module._fusekit_block, dtype, of_experts, of_router, residual, module._fusekit_recompute


def _paths_in(module: Any) -> _Paths:
    """Where the tensors of the block lie."""
    return _stored(module, module._fusekit_paths)


def _stored(module: Any, known: _Paths) -> _Paths:
    """The paths as the block has them; MXFP4 weights have other names than those that they are described by."""
    if path_in(module.experts, "down_proj") == "down_proj":
        return known
    return tuple((name, (f"{paths[0]}{BLOCKS}",) if name in ("w1", "w2") else paths) for name, paths in known)


def hold_fp8(model: Any, hold: bool) -> int:
    """See `fusekit.interop.transformers.hold_fp8`."""
    modules = [*_with_recipe(model)]
    for module in modules:
        if hold:
            _hold(module)
        else:
            module._fusekit_fp8 = None
    return len(modules)


def recompute_fp8(model: Any, blocks: int | None) -> tuple[int, int]:
    """(blocks that do so, blocks with a recipe); see `fusekit.interop.transformers.recompute_fp8`."""
    modules = [*_with_recipe(model)]
    count = len(modules) if blocks is None else min(blocks, len(modules))
    for index, module in enumerate(modules):
        before, module._fusekit_recompute = module._fusekit_recompute, index < count
        try:
            _operator(module)
        except FusekitError:
            module._fusekit_recompute = before
            raise
        if getattr(module, "_fusekit_fp8", None) is not None:
            _hold(module)
    return count, len(modules)


def _with_recipe(model: Any) -> Iterator[Any]:
    """The blocks of a model that layers with a recipe compute."""
    for module in blocks_of(model):
        name = module.experts.config._experts_implementation
        known = "_fusekit_block" in vars(module) and name in _backends() and not has_scales(module.experts)
        if known and _operator(module).fp8:
            yield module


def _operator(module: Any) -> Operator:
    """That of a block's layer."""
    device = module.experts.down_proj.device.type
    name = module.experts.config._experts_implementation
    return operators()[_backends()[name].look_up(*_key(module, device, casting(device)))[0]]


def _hold(module: Any) -> None:
    torch_fp8.hold(module, _operator(module), dict(module._fusekit_paths), module.experts.down_proj.device)


def _tensor(module: Any, paths: tuple[str, ...]) -> Any:
    first, *second = [at(module, path) for path in paths]
    return joined(first, second[0], "concat") if second else first


# -- what a block computes --------------------------------------------------------------------------------------------


def describe(module: Any) -> None:
    """Finds the computation of a block, and lets its layer run it from now on.

    Raises ArgumentError for a block that is no layer of fusekit, or computes something else than its config says.
    """
    config, kind = module.experts.config, type(module)
    if "_fusekit_block" in vars(module):
        return
    key = f"{kind.__name__} {kind.__module__} {json.dumps(config.to_dict(), default=str, sort_keys=True)}"
    known = _blocks()
    if key not in known:
        known[key] = _described(module, config)
    block = known[key]
    module._fusekit_block, module._fusekit_paths, module._fusekit_tuple = key, block.paths, block.is_tuple
    module._fusekit_recompute = False
    _take_over(kind)


def _described(module: Any, config: Any) -> Block:
    from fusekit.plan.layer import Options
    from fusekit.spec.hf_config import read_model
    from fusekit.spec.model_kernels import Request
    from fusekit.spec.new_spec import new_spec
    from fusekit.spec.parse import parse_text

    name = type(module).__name__
    text = json.dumps(config.to_dict(), default=str)
    try:
        spec = new_spec(read_model(text, f"the config of {name}"), Request("block"))
    except FusekitError as error:
        raise _refused(name, str(error)) from error
    if why := spec.missing_layers.get("moe"):
        raise _refused(name, why)
    with warnings.catch_warnings(action="ignore"):
        known = [getattr(each, "layer", None) for each in parse_text(spec.text, "block")]
    options: Options = next(each for each in known if each is not None and each.kind == "moe")
    if options.router["input"] != "x":
        raise _refused(name, f"its {options.experts} experts are no multiple of 8, and a layer makes logits for such")
    paths = _paths(module, options)
    is_tuple = _compared(module, config, options, paths)
    return Block(Experts.of(options), tuple(paths.items()), is_tuple)


def _paths(module: Any, options: Any) -> dict[str, tuple[str, ...]]:
    """Where the tensors of the block lie, by a layer's names. Raises ArgumentError where one is missing."""
    router = next(name for name in ROUTERS if name in module._modules)
    gated = module.experts.has_gate
    paths: dict[str, tuple[str, ...]]
    paths = {argument: (f"experts.{names[not gated]}",) for argument, names in NAMES.items()}
    if not options.bias:
        del paths["b1"], paths["b2"]
    paths["router"] = (f"{router}.weight",)
    if options.router["bias"]:
        paths["router_bias"] = (f"{router}.bias",)
    if options.router["expert_bias"]:
        paths["expert_bias"] = (f"{router}.e_score_correction_bias",)
    if options.shared:
        shared = next((name for name in _SHARED if name in module._modules), _SHARED[0])
        first = ("gate_proj", "up_proj") if options.gated else ("up_proj",)
        paths["shared_w1"] = tuple(f"{shared}.{each}.weight" for each in first)
        paths["shared_w2"] = (f"{shared}.down_proj.weight",)
    if options.shared_gate:
        paths["shared_gate"] = ("shared_expert_gate.weight",)
    for path in (path for _, each in _stored(module, tuple(paths.items())) for path in each):
        try:
            at(module, path)
        except AttributeError:
            raise _refused(type(module).__name__, f"it has no {path}, which its config leads to") from None
    return paths


def _compared(module: Any, config: Any, options: Any, paths: dict[str, tuple[str, ...]]) -> bool:
    """Whether the block gives a tuple. Raises ArgumentError where its code and the definition differ."""
    from fusekit.cpu import defined

    kind = type(module)
    small = copy.deepcopy(config)
    small._experts_implementation_internal = "eager"
    small.hidden_size = _HIDDEN
    for name in [name for name in small.to_dict() if name.endswith("intermediate_size")]:
        setattr(small, name, _INTERMEDIATE)
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            copied = kind(small).double().train(module.training)
            generator = torch.Generator().manual_seed(0)  # not that of PyTorch, from which the model's weights come
            with torch.no_grad():
                for tensor in (*copied.parameters(), *copied.buffers()):
                    tensor.normal_(std=0.3, generator=generator)
                x = torch.randn(2, _TOKENS // 2, _HIDDEN, dtype=torch.float64, generator=generator)
                own = copied(x.clone())
                tensors = {name: _tensor(copied, each).numpy() for name, each in paths.items()}
    except Exception as error:  # of whatever the module's code needs beyond
        raise _refused(kind.__name__, f"its code cannot be looked at ({type(error).__name__}: {error})") from error
    want = own[0] if isinstance(own, tuple) else own
    asked = replace(
        options, hidden=_HIDDEN, intermediate=tensors["w2"].shape[1 if options.b_major == "n" else 2],
        shared=tensors["shared_w2"].shape[1] if options.shared else 0,
    )  # fmt: skip
    got = torch.from_numpy(defined(asked, x.reshape(-1, _HIDDEN).numpy(), tensors)).reshape(want.shape)
    apart = ((got - want.double()).norm() / want.double().norm()).item()
    if not apart <= _CLOSE:
        raise _refused(
            kind.__name__, f"its own code gives something else than its config says, relative error {apart:.2g}"
        )
    return isinstance(own, tuple)


def _refused(name: str, why: str) -> ArgumentError:
    return ArgumentError(
        f"{name}: {why}; leave blocks out of fusekit.interop.transformers.register() for this model, which then runs"
        " its experts alone"
    )
