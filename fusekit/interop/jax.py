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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fusekit.abi import ScalarArgument, evaluate
from fusekit.dtypes import DTYPES, by
from fusekit.errors import ArgumentError
from fusekit.interop import xla
from fusekit.interop.jax_ranks import TIMEOUT, Placed, devices_of
from fusekit.interop.shapes import dims_of
from fusekit.layers import Layer
from fusekit.layers.arguments import untrained
from fusekit.layers.memory import Slice
from fusekit.runtime import Kernel
from fusekit.runtime.binding import check_scalar

_XLA = by("xla")
_LEAD = {"forward": "x", "inference": "x", "backward": "dy"}  # whose rows are the tokens
_QUANTISE, _USED = "quantise", "used"  # the latter: what was kept, behind a backward pass that wrote to it
_CONSTANTS = ("aux_coefficient", "total_tokens")
_MOST = 2**31 - 1  # of an int32
Arrays = dict[str, Any]


def operator(
    kernel: Kernel, name: str, *, cluster_margin: int | None = None, platform: str = "CUDA", **scalars: Any
) -> Callable[..., Any]:
    """Registers `kernel` with XLA under `name`, unique in the process, and returns a function for use inside jax.jit.

    The function takes the kernel's inputs by name, row-major as JAX has them, and returns its outputs, newly allocated:
    one array, or a tuple in the record's order. Arrays of e2m1x2 are uint8, two codes in each. A call queues every
    launch of the record. scalars: of the kernel; a call may give others, numbers that jax.jit does not trace. Raises
    ArgumentError for a kernel with an `inout` argument, or (when called) for a scalar that is no number and for inputs
    that do not determine the outputs' shapes.
    """
    record = kernel.record
    if any(tensor.role == "inout" for tensor in record.tensors):
        raise ArgumentError(f"{kernel.name} changes an argument in place, which an array of JAX's does not allow")
    if record.peers:
        raise ArgumentError(f"{kernel.name} takes the windows of other ranks, which are no arrays; call it directly")
    inputs = [tensor for tensor in record.tensors if not tensor.written]
    outputs = [tensor for tensor in record.tensors if tensor.written]
    types = {tensor.name: tensor.dtype for tensor in (*inputs, *outputs)}
    numbers = {scalar.name: scalar for scalar in record.scalars}

    def launch(buffers: list[xla.Buffer], given: dict[str, float | int], stream: int) -> None:
        tensors = _tensors(buffers, types, kernel.current_device())
        kernel(**tensors, **{**scalars, **given}, stream=stream, cluster_margin=cluster_margin)

    _register(name, launch, platform)

    def call(**given: Any) -> Any:
        attributes = {key: _attribute(numbers[key], value) for key, value in given.items() if key in numbers}
        arrays = {key: value for key, value in given.items() if key not in numbers}
        _check_names(name, [tensor.name for tensor in inputs], arrays, numbers)
        for device in devices_of(platform, kernel.device):  # not in the handler: XLA may be capturing then
            kernel.prepare(device)
        dims = dims_of(record, {key: array.shape for key, array in arrays.items()})
        shapes = [_shape([evaluate(extent, dims) for extent in output.shape], output.dtype) for output in outputs]
        found = jax.ffi.ffi_call(name, shapes)(*(arrays[tensor.name] for tensor in inputs), **attributes)
        found = _varying(found, _axes(arrays))
        return found[0] if len(found) == 1 else tuple(found)

    return call


def moe(
    layer: Layer, name: str, *, mesh: Any = None, axis: str | None = None, timeout: int = TIMEOUT, gather: Any = None,
    in_place: bool = False, platform: str = "CUDA",
) -> Callable[..., Any]:  # fmt: skip
    """Registers `layer` with XLA under `name`, unique in the process, and returns `f(x, params, **more)`, which jax.jit
    and jax.grad see through: one call into the stream for the forward pass and one for the backward pass.

    x [..., H]. params and more: the layer's other inputs by their names (`layer.inputs("forward")`); logits, indices
    and weights have x's leading dims. Returns y like x; with `router.aux_loss` (y, loss), the loss a float32 scalar,
    for which f takes aux_coefficient and total_tokens (default: the tokens of x), both constants to a derivative; what
    an array of JAX's says in total_tokens is not looked at.

    A layer with a recipe takes its weights, and makes codes of them in each call; `f.quantise(params)` gives these as a
    dict, for several calls: `f(x, {**params, **codes})`.

    Gradients are computed of what is differentiated, no more, and have the types of what they are of. Without a
    derivative nothing is kept. The layer works on the arrays that a device has; shard with jax.shard_map.

    mesh, axis: of a layer over ranks, the mesh of that jax.shard_map, and the axis along which the experts are; rank r
    is the device at place r. Every device has its own tokens and its own experts' parameters. The windows are made
    here, by all processes together. timeout, gather: as of `fusekit.interop.jax_ranks.ranks_of`. A rank that is missing
    makes y and dx NaN, and the computation an error, a second or so after `timeout`; `f.check()` raises
    PeerTimeoutError at once. `f.close(alone=False)` gives the windows back, once all that used them is done.

    in_place: the backward pass writes dz over z, which saves as much memory as z takes; XLA copies what is kept before
    where something else still needs it.

    Raises ArgumentError for a layer that adds to gradients, for a mesh that does not fit the layer, and (when called)
    for arguments that do not fit; and what loading the kernels raises.
    """
    if layer.options.accumulate:
        raise ArgumentError(
            f"{layer.name} adds to its weights' gradients in place (accumulate = true), which arrays of JAX's do not"
            " allow; build it with accumulate = false and add in JAX",
            argument="accumulate",
        )
    placed = Placed(layer, mesh, axis, timeout, gather, platform)
    layer, inputs = placed.layer, _inputs(layer)
    gradients = {f"d{each}" for each in inputs} & layer.outputs("backward").keys()
    own = [*_LEAD, _QUANTISE] if layer.outputs(_QUANTISE) else [*_LEAD]
    passes = {which: _Pass(placed, which, f"{name}.{which}", platform, in_place) for which in own}

    def inference(given: Arrays) -> Arrays:
        return passes["inference"](given, layer.outputs("inference"))

    def forward(given: Arrays) -> tuple[Arrays, Any]:
        if not layer.options.trained:
            raise ArgumentError(untrained(layer.options))
        asked = gradients & {f"d{each}" for each, leaf in given.items() if leaf.perturbed}
        arrays = {each: leaf.value for each, leaf in given.items()}
        made = passes["forward"](arrays, layer.outputs("forward"))
        arrays["kept"] = made.pop("kept")
        stays = [each for each in passes["backward"].reads(asked) if each in arrays]
        # The names asked for stay as a dict's keys: a residual's structure is constant, and its leaves are arrays.
        return made, ({each: arrays[each] for each in stays}, dict.fromkeys(sorted(asked), ()))

    def backward(residual: Any, cotangents: Arrays) -> tuple[Arrays]:
        arrays, asked = residual
        found: Arrays = {}
        if asked:
            arrays = {**arrays, **{f"d{each}": _instantiate(value) for each, value in cotangents.items()}}
            found = passes["backward"](arrays, asked)
        types = {each: DTYPES[buffer.dtype].array for each, buffer in inputs.items()}
        return ({each: found[f"d{each}"].astype(types[each]) if f"d{each}" in found else None for each in inputs},)

    run = jax.custom_vjp(inference)
    run.defvjp(forward, backward, symbolic_zeros=True)

    return _calls(placed, name, run, passes)


def _calls(
    placed: Placed, name: str, run: Callable[[Arrays], Arrays], passes: Mapping[str, _Pass]
) -> Callable[..., Any]:
    """What `moe` returns. run: the passes on every input by name, with a derivative."""
    layer = placed.layer
    weights, codes = layer.inputs(_QUANTISE), layer.outputs(_QUANTISE)
    inputs = {each: buffer for each, buffer in _inputs(layer).items() if each not in codes}

    def coded(params: Mapping[str, Any]) -> Arrays:
        if not codes:
            return {}
        return passes[_QUANTISE]({each: jax.lax.stop_gradient(params[each]) for each in weights}, codes)

    def quantise(params: Mapping[str, Any]) -> Arrays:
        """Codes of the weights among `params`, by name."""
        placed.load()
        return coded(params)

    def call(x: Any, params: Mapping[str, Any], **more: Any) -> Any:
        held = {each: params[each] for each in codes if each in params}
        given = {each: array for each, array in params.items() if each not in held}
        given = _arguments(layer, name, inputs, {"x": x, **given, **more})
        placed.load(given["x"].shape[0])  # not in a handler: XLA may be capturing then
        given |= held or coded(given)
        made = run(_varying(given, _axes(given)))  # so that what is the same everywhere has the sum of its gradients
        y = made["y"].reshape(jnp.shape(x))
        return (y, made["loss"][0]) if "loss" in made else y

    call.quantise = quantise  # type: ignore[attr-defined]
    call.check, call.close = placed.check, placed.close  # type: ignore[attr-defined]
    return call


def _inputs(layer: Layer) -> dict[str, Any]:
    """What the forward pass reads; with a recipe the weights and all of their codes, too."""
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
        _register(name, self._launch, platform)

    def reads(self, asked: Collection[str]) -> list[str]:
        """The operands that these outputs need, by name."""
        needed = {each for step in self.layer.program.needed(self.which, asked) for each in step.reads.values()}
        found = [each for each in self.inputs if each in needed or each == _LEAD.get(self.which)]
        return [*found, "kept"] if self.which == "backward" else found

    def __call__(self, arrays: Arrays, asked: Collection[str]) -> Arrays:
        """The outputs `asked` by name, and what the forward pass keeps; arrays: by name, `reads` at least."""
        chosen = sum(1 << index for index, each in enumerate(self.outputs) if each in asked)
        operands, results = self._names(chosen)
        tokens = arrays[_LEAD[self.which]].shape[0] if self.which in _LEAD else 0
        sizes = self.layer.sizes(tokens, asked if self.which == "backward" else None, in_place=self.in_place)
        dims = self.layer.program.dims(tokens)
        memory = {"kept": sizes.kept, _USED: sizes.kept, "scratch": getattr(sizes, self.which, 0)}
        shapes = [
            _shape((memory[each],), "u8")
            if each in memory
            else _shape(self.outputs[each].extents(dims), self.outputs[each].dtype)
            for each in results
        ]
        given = [arrays[each] for each in operands]
        same = {operands.index("kept"): results.index(_USED)} if self.in_place else {}
        call = jax.ffi.ffi_call(self.name, shapes, input_output_aliases=same)
        found = _varying(call(*given, outputs=jnp.dtype("int32").type(chosen)), _axes(given))
        return {each: array for each, array in zip(results, found, strict=True) if each not in ("scratch", _USED)}

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
        tensors = _tensors(buffers, types, device)
        if self.in_place:
            tensors["kept"], tensors["in_place"] = tensors.pop(_USED), True
        run: Any = {"backward": layer.backward, _QUANTISE: layer.quantise}.get(self.which, layer.forward)
        run(**tensors, stream=stream)


def _arguments(layer: Layer, name: str, inputs: Mapping[str, Any], given: Arrays) -> Arrays:
    """Every one of `inputs` by name, each with a token's values in a row. Raises ArgumentError."""
    if "total_tokens" in inputs and given.get("total_tokens") is None:
        given["total_tokens"] = math.prod(_array(name, "x", given["x"]).shape[:-1])
    _check_names(name, list(inputs), given)
    found = {}
    for each, buffer in inputs.items():
        array = _array(name, each, given[each])
        if each in _CONSTANTS:
            kind = DTYPES[buffer.dtype].array
            if array.size != 1 or not jnp.can_cast(array.dtype, kind, "same_kind") or array.dtype == bool:
                is_ = f"{given[each]!r}, {array.dtype} {list(array.shape)}"
                raise ArgumentError(f"{name}: {each} is {is_}; it must be one {kind} number", argument=each)
            if each == "total_tokens":
                _check_count(name, each, given[each])
            found[each] = array.astype(kind).reshape(1)
        elif buffer.shape[0] == "T" and array.shape[-1:] != (0,):
            found[each] = array.reshape(-1, *array.shape[-1:])
        else:
            found[each] = array
    tokens = found["x"].shape[0]
    for each, buffer in inputs.items():
        wanted = _shape(buffer.extents(layer.program.dims(tokens)), buffer.dtype)
        if found[each].shape != wanted.shape or found[each].dtype != wanted.dtype:
            raise ArgumentError(
                f"{name}: {each} is {found[each].dtype} {list(jnp.shape(given[each]))}; for {tokens} tokens it must be"
                f" {wanted.dtype} {list(wanted.shape)}",
                argument=each,
            )
    return found


def _check_count(name: str, each: str, value: Any) -> None:
    """Raises ArgumentError for a number of the host's that is no count. Asking a device for its own would wait."""
    (number,) = jax.tree.leaves(value)
    known = not isinstance(number, jax.Array)
    if known and not 0 <= (number.item() if hasattr(number, "item") else number) <= _MOST:
        raise ArgumentError(f"{name}: {each} is {value!r}; it must be a number from 0 to {_MOST}", argument=each)


def _array(name: str, each: str, value: Any) -> Any:
    """`value` as an array of JAX's, or a tracer of one. Raises ArgumentError."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"{name}: {each} is a {type(value).__name__}, of which JAX makes no array: {error}", argument=each
        ) from error


def _check_names(name: str, wanted: Sequence[str], given: Collection[str], more: Collection[str] = ()) -> None:
    """Raises ArgumentError unless `given` has the names `wanted`, and no other."""
    missing = [each for each in wanted if each not in given]
    unknown = sorted(set(given) - set(wanted))
    if missing or unknown:
        raise ArgumentError(
            f"{name} takes {', '.join((*wanted, *more))}; missing: {', '.join(missing) or 'none'};"
            f" unknown: {', '.join(unknown) or 'none'}"
        )


def _register(name: str, launch: xla.Launch, platform: str) -> None:
    jax.ffi.register_ffi_target(name, xla.capsule(xla.handler(launch)), platform=platform, api_version=1)


def _tensors(buffers: list[xla.Buffer], types: Mapping[str, str], device: int) -> Arrays:
    """XLA's buffers by name, in the terms that launches read. types: of each, in order."""
    found = {}
    for (name, wanted), buffer in zip(types.items(), buffers, strict=True):
        dtype = _XLA.get(buffer.dtype, f"XLA type {buffer.dtype}")
        if dtype == "u8" and DTYPES[wanted].array == "uint8":  # JAX has no type for two codes in a byte
            dtype = wanted
        found[name] = Slice(buffer.data or 0, tuple(buffer.dims[: buffer.rank]), dtype, device)
    return found


def _shape(extents: Sequence[Any], dtype: str) -> Any:
    return jax.ShapeDtypeStruct(extents, DTYPES[dtype].array)


def _axes(arrays: Any) -> frozenset[str]:
    """The axes of jax.shard_map along which any of them differs."""
    kinds = [getattr(jax.typeof(array), "manual_axis_type", None) for array in jax.tree.leaves(arrays)]
    return frozenset().union(*(kind.varying for kind in kinds if kind is not None))


def _varying(arrays: Any, axes: frozenset[str]) -> Any:
    """The same, told to jax.shard_map to differ along `axes`: it cannot see that of a call."""

    def told(array: Any) -> Any:
        more = tuple(sorted(axes - _axes(array)))
        return jax.lax.pcast(array, more, to="varying") if more else array

    return jax.tree.map(told, arrays) if axes else arrays


def _instantiate(cotangent: Any) -> Any:
    """An array, also of a gradient that is known to be 0."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _attribute(scalar: ScalarArgument, value: Any) -> Any:
    """A number as XLA takes one: NumPy's, of the scalar's type."""
    return jnp.dtype(DTYPES[scalar.dtype].array).type(check_scalar(scalar, value))
