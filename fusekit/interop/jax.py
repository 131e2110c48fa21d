"""Kernels and layers inside jax.jit: calls through the XLA FFI, without a copy and in the order of XLA's stream.

    fc1 = fusekit.interop.jax.operator(library.load("quickstart/moe-fc1"), "fc1")
    y = jax.jit(fc1)(x=x, w=w, offsets=offsets)

    moe = fusekit.interop.jax.moe(library.layer("qwen3-30b-a3b/moe"), "moe")
    gradients = jax.jit(jax.grad(lambda params, x: moe(x, params).sum()))(params, x)

XLA hands the launcher the addresses of its own buffers and its stream, on one of its threads; the launches are queued
and the thread goes on. Calls may become part of XLA's command buffers (CUDA graphs).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fusekit.dtypes import DTYPES
from fusekit.errors import ArgumentError
from fusekit.interop import xla
from fusekit.interop.jax_calls import Arrays, axes_of, check_names, operator, register, shape_of, tensors_of, varying
from fusekit.interop.jax_ragged import grouped_mlp, ragged_dot, tokamax_ragged_dot
from fusekit.interop.jax_ranks import TIMEOUT, Placed
from fusekit.layers import Layer
from fusekit.layers.arguments import untrained

__all__ = ["grouped_mlp", "moe", "operator", "ragged_dot", "tokamax_ragged_dot"]

_LEAD = {"forward": "x", "inference": "x", "backward": "dy"}  # whose rows are the tokens
_QUANTISE, _USED = "quantise", "used"  # "used": the kept memory after a backward pass in place
_CONSTANTS = ("aux_coefficient", "total_tokens")
_MOST = 2**31 - 1  # of an int32


def moe(
    layer: Layer, name: str, *, mesh: Any = None, axis: str | None = None, timeout: int = TIMEOUT, gather: Any = None,
    in_place: bool = False, platform: str | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Registers `layer` with XLA and returns a function that jax.jit and jax.grad see through.

    The forward pass is one call into the stream, the backward pass another. Gradients are computed only for what is
    differentiated, and have its dtypes. Without a derivative nothing is kept. The layer works on the arrays of one
    device; shard with jax.shard_map.

    A layer over ranks allocates its windows (IPC buffers) here, on all processes together. Every device has its own
    tokens and the parameters of its own experts. If a rank is missing, y and dx become NaN, and the computation an
    error, a second or so after `timeout`; `f.check()` raises PeerTimeoutError at once. `f.close(alone=False)` frees the
    windows, once all that used them is done.

    Parameters
    ----------
    layer : Layer
    name : str
        Unique in the process.
    mesh, axis : jax.sharding.Mesh and str, optional
        For a layer over ranks: the mesh of jax.shard_map, and its axis along which the experts are spread; rank r is
        the device at index r.
    timeout, gather
        As for `fusekit.interop.jax_ranks.ranks_of`.
    in_place : bool
        The backward pass writes dz over z, which saves as much memory as z takes. XLA copies it before if something
        else still needs it.
    platform : str, optional
        XLA's name of the platform. Default: "CUDA", or "cpu" for a layer with ``device="cpu"``.

    Returns
    -------
    callable
        `f(x, params, **more)` with x [..., H]; params and more: the layer's other inputs by name
        (`layer.inputs("forward")`), of which logits, indices and weights have x's leading dims. It returns y [..., H];
        with `router.aux_loss` (y, loss), loss a float32 scalar, for which f takes aux_coefficient and total_tokens
        (default: the tokens of x), both constants to a derivative. The value of a JAX array total_tokens is not
        checked. With a recipe, f quantises the weights in each call; `f.quantise(params)` returns them as a dict for
        several calls: `f(x, {**params, **quantised})`.

    Raises
    ------
    ArgumentError
        For a layer that accumulates gradients, and for a mesh that does not fit the layer; from f, for arguments that
        do not fit. Loading a kernel raises what `Library.load` raises.
    """
    if layer.options.accumulate:
        raise ArgumentError(
            f"{layer.name} adds to its weights' gradients in place (accumulate = true), which arrays of JAX's do not"
            " allow; build it with accumulate = false and add in JAX",
            argument="accumulate",
        )
    platform = platform or ("cpu" if layer.on_cpu else "CUDA")
    placed = Placed(layer, mesh, axis, timeout, gather, platform)
    layer, inputs = placed.layer, _inputs(layer)
    gradients = {f"d{input}" for input in inputs} & layer.outputs("backward").keys()
    which_passes = [*_LEAD, _QUANTISE] if layer.outputs(_QUANTISE) else [*_LEAD]
    passes = {which: _Pass(placed, which, f"{name}.{which}", platform, in_place) for which in which_passes}

    def inference(given: Arrays) -> Arrays:
        return passes["inference"](given, layer.outputs("inference"))

    def forward(given: Arrays) -> tuple[Arrays, Any]:
        if not layer.options.trained:
            raise ArgumentError(untrained(layer.options))
        asked = gradients & {f"d{arg_name}" for arg_name, leaf in given.items() if leaf.perturbed}
        arrays = {arg_name: leaf.value for arg_name, leaf in given.items()}
        results = passes["forward"](arrays, layer.outputs("forward"))
        arrays["kept"] = results.pop("kept")
        stays = [arg_name for arg_name in passes["backward"].reads(asked) if arg_name in arrays]
        # The names asked for stay as a dict's keys: a residual's structure is constant, and its leaves are arrays.
        return results, ({arg_name: arrays[arg_name] for arg_name in stays}, dict.fromkeys(sorted(asked), ()))

    def backward(residual: Any, cotangents: Arrays) -> tuple[Arrays]:
        arrays, asked = residual
        gradients: Arrays = {}
        if asked:
            arrays = {**arrays, **{f"d{arg_name}": _instantiate(value) for arg_name, value in cotangents.items()}}
            gradients = passes["backward"](arrays, asked)
        if "residual" in inputs:
            gradients["dresidual"] = _instantiate(cotangents["y"])
        types = {arg_name: DTYPES[buffer.dtype].array for arg_name, buffer in inputs.items()}
        return (
            {
                arg_name: gradients[f"d{arg_name}"].astype(types[arg_name]) if f"d{arg_name}" in gradients else None
                for arg_name in inputs
            },
        )

    run = jax.custom_vjp(inference)
    run.defvjp(forward, backward, symbolic_zeros=True)

    return _calls(placed, name, run, passes)


def _calls(
    placed: Placed, name: str, run: Callable[[Arrays], Arrays], passes: Mapping[str, _Pass]
) -> Callable[..., Any]:
    """The function that `moe` returns. run: the passes on every input by name, with a derivative."""
    layer = placed.layer
    weights, fp8 = layer.inputs(_QUANTISE), layer.outputs(_QUANTISE)
    inputs = {arg_name: buffer for arg_name, buffer in _inputs(layer).items() if arg_name not in fp8}

    def coded(params: Mapping[str, Any]) -> Arrays:
        if not fp8:
            return {}
        return passes[_QUANTISE]({each: jax.lax.stop_gradient(params[each]) for each in weights}, fp8)

    def quantise(params: Mapping[str, Any]) -> Arrays:
        """The weights among `params`, quantised, by name."""
        placed.load()
        return coded(params)

    def call(x: Any, params: Mapping[str, Any], **more: Any) -> Any:
        held = {arg_name: params[arg_name] for arg_name in fp8 if arg_name in params}
        given = {arg_name: array for arg_name, array in params.items() if arg_name not in held}
        given = _arguments(layer, name, inputs, {"x": x, **given, **more})
        placed.load(given["x"].shape[0])  # not in a handler: XLA may be capturing then
        given |= held or coded(given)
        results = run(varying(given, axes_of(given)))  # what is the same everywhere has summed gradients
        y = results["y"].reshape(jnp.shape(x))
        return (y, results["loss"][0]) if "loss" in results else y

    call.quantise = quantise  # type: ignore[attr-defined]
    call.check, call.close = placed.check, placed.close  # type: ignore[attr-defined]
    return call


def _inputs(layer: Layer) -> dict[str, Any]:
    """The inputs of the forward pass; with a recipe also the weights, quantised and not."""
    return {**layer.inputs("forward"), **layer.inputs(_QUANTISE), **layer.outputs(_QUANTISE)}


class _Pass:
    """A pass of a layer as a call of XLA's: operands are the inputs, then what is kept; results are the outputs, what
    is kept, and scratch memory, which XLA may use for others before and after. Of a backward pass in place what is kept
    is a result, too, in the same memory.
    """

    def __init__(self, placed: Placed, which: str, name: str, platform: str, in_place: bool) -> None:
        self.placed, self.layer, self.which, self.name = placed, placed.layer, which, name
        self.in_place = in_place and which == "backward"
        self.inputs, self.outputs = self.layer.inputs(which), self.layer.outputs(which)
        self._names = functools.cache(self._of)
        register(name, self._launch, platform, streams=not self.layer.on_cpu)

    def reads(self, asked: Collection[str]) -> list[str]:
        """The operands that these outputs need, by name."""
        steps = self.layer.record.passes[self.which].queued(asked)
        needed = {arg_name for step in steps for arg_name in step.reads}
        needed_inputs = [
            arg_name for arg_name in self.inputs if arg_name in needed or arg_name == _LEAD.get(self.which)
        ]
        return [*needed_inputs, "kept"] if self.which == "backward" else needed_inputs

    def __call__(self, arrays: Arrays, asked: Collection[str]) -> Arrays:
        """The outputs `asked` by name, and what the forward pass keeps; arrays: by name, `reads` at least."""
        chosen = sum(1 << index for index, output in enumerate(self.outputs) if output in asked)
        operands, results = self._names(chosen)
        tokens = arrays[_LEAD[self.which]].shape[0] if self.which in _LEAD else 0
        sizes = self.layer.sizes(tokens, asked if self.which == "backward" else None, in_place=self.in_place)
        dims = self.layer.dims(tokens)
        memory = {"kept": sizes.kept, _USED: sizes.kept, "scratch": getattr(sizes, self.which, 0)}
        shapes = [
            shape_of((memory[result],), "u8")
            if result in memory
            else shape_of(self.outputs[result].extents(dims), self.outputs[result].dtype)
            for result in results
        ]
        given = [arrays[operand] for operand in operands]
        same = {operands.index("kept"): results.index(_USED)} if self.in_place else {}
        call = jax.ffi.ffi_call(self.name, shapes, input_output_aliases=same)
        results_by_order = varying(call(*given, outputs=jnp.dtype("int32").type(chosen)), axes_of(given))
        return {
            result: array
            for result, array in zip(results, results_by_order, strict=True)
            if result not in ("scratch", _USED)
        }

    def _of(self, chosen: int) -> tuple[list[str], list[str]]:
        """Operands and results by name; chosen: a bit for each output."""
        asked = [each for index, each in enumerate(self.outputs) if chosen >> index & 1]
        more = {"forward": ["kept", "scratch"], _QUANTISE: []}.get(self.which, ["scratch"])
        return self.reads(asked), [*asked, *([_USED] if self.in_place else []), *more]

    def _launch(self, buffers: list[xla.Buffer], given: dict[str, float | int], stream: int) -> None:
        operands, results = self._names(int(given["outputs"]))
        known = {**self.inputs, **self.outputs}
        types = {each: known[each].dtype if each in known else "u8" for each in (*operands, *results)}
        device, layer = self.placed.here()
        tensors = tensors_of(buffers, types, device)
        if self.in_place:
            tensors["kept"], tensors["in_place"] = tensors.pop(_USED), True
        run: Any = {"backward": layer.backward, _QUANTISE: layer.quantise}.get(self.which, layer.forward)
        run(**tensors, stream=stream)


def _arguments(layer: Layer, name: str, inputs: Mapping[str, Any], given: Arrays) -> Arrays:
    """`inputs` by name, each with one row for each token. Raises ArgumentError."""
    if "total_tokens" in inputs and given.get("total_tokens") is None:
        given["total_tokens"] = math.prod(_array(name, "x", given["x"]).shape[:-1])
    check_names(name, list(inputs), given)
    arrays = {}
    for arg_name, buffer in inputs.items():
        array = _array(name, arg_name, given[arg_name])
        if arg_name in _CONSTANTS:
            kind = DTYPES[buffer.dtype].array
            if array.size != 1 or not jnp.can_cast(array.dtype, kind, "same_kind") or array.dtype == bool:
                is_ = f"{given[arg_name]!r}, {array.dtype} {list(array.shape)}"
                raise ArgumentError(f"{name}: {arg_name} is {is_}; it must be one {kind} number", argument=arg_name)
            if arg_name == "total_tokens":
                _check_count(name, arg_name, given[arg_name])
            arrays[arg_name] = array.astype(kind).reshape(1)
        elif buffer.shape[0] == "T" and array.shape[-1:] != (0,):
            arrays[arg_name] = array.reshape(-1, *array.shape[-1:])
        else:
            arrays[arg_name] = array
    tokens = arrays["x"].shape[0]
    for arg_name, buffer in inputs.items():
        wanted = shape_of(buffer.extents(layer.dims(tokens)), buffer.dtype)
        if arrays[arg_name].shape != wanted.shape or arrays[arg_name].dtype != wanted.dtype:
            raise ArgumentError(
                f"{name}: {arg_name} is {arrays[arg_name].dtype} {list(jnp.shape(given[arg_name]))}; for"
                f" {tokens} tokens it must be {wanted.dtype} {list(wanted.shape)}",
                argument=arg_name,
            )
    return arrays


def _check_count(name: str, argument: str, value: Any) -> None:
    """Raises ArgumentError for a number of the host's that is no count. Asking a device for its own would wait."""
    (number,) = jax.tree.leaves(value)
    known = not isinstance(number, jax.Array)
    if known and not 0 <= (number.item() if hasattr(number, "item") else number) <= _MOST:
        raise ArgumentError(
            f"{name}: {argument} is {value!r}; it must be a number from 0 to {_MOST}", argument=argument
        )


def _array(name: str, argument: str, value: Any) -> Any:
    """`value` as an array of JAX's, or a tracer of one. Raises ArgumentError."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"{name}: {argument} is a {type(value).__name__}, of which JAX makes no array: {error}", argument=argument
        ) from error


def _instantiate(cotangent: Any) -> Any:
    """An array, also of a gradient that is known to be 0."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent
