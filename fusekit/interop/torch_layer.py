"""A layer as a PyTorch operator with a gradient: what `fusekit.interop.torch.MoE` and the Transformers backend call.

The forward operator gives y, the load-balancing loss where the layer has one, and what its backward pass needs, as
bytes. The backward operator launches only what makes the gradients that autograd asks for. Both allocate with
PyTorch, launch on its current stream, and have fakes for symbolic token counts.

A call on plain tensors, with nobody to look at it, runs the same two functions without the dispatcher's operators: on
the host they cost as much as the launches.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain, count
from math import prod
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from fusekit.dtypes import by
from fusekit.errors import ArgumentError
from fusekit.interop.torch_define import define
from fusekit.layers import Layer
from fusekit.layers.arguments import untrained

# Those that this PyTorch has.
DTYPES = {name: getattr(torch, known) for known, name in by("framework").items() if hasattr(torch, known)}
NAMESPACE = "fusekit"
BIASES = ("b1", "b2", "router_bias")
_ALIGNMENT = 16  # of a tensor that kernels copy in boxes
_SIZES_KEPT = 256
_QUANTISE = "_quantise"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_REGISTERING = threading.Lock()


class Operator:
    """The passes of `layer` in PyTorch. Make one with `operator_of`.

    inputs: of the forward pass, x first; with a recipe also the quantised weights of both passes.
    parameters: the weights and biases among them. weights, fp8: inputs and outputs of the operator NAME_quantise.
    summed: parameters whose gradients are added to a float32 tensor of the caller's. loss: whether there is a
    load-balancing loss. rows: inputs with a row for each token, as the caller's x has them. cluster_margin: of forward
    and backward passes. in_place: of backward passes.
    """

    def __init__(self, layer: Layer, name: str, cluster_margin: int | None = None, in_place: bool = False) -> None:
        buffers, self.cluster_margin, self.in_place = layer.record.buffers, cluster_margin, in_place
        self.layer, self.dtype = layer, DTYPES[layer.options.dtype]
        self.weights, self.fp8 = tuple(layer.inputs("quantise")), tuple(layer.outputs("quantise"))
        self.inputs = tuple(dict.fromkeys(("x", *layer.inputs("forward"), *self.weights, *self.fp8)))
        self.gradients = {name: f"d{name}" for name in self.inputs if f"d{name}" in layer.outputs("backward")}
        others = ("x", "logits", "weights")
        self.parameters = tuple(name for name in self.inputs if f"d{name}" in buffers and name not in others)
        added = set(layer.record.passes["backward"].adds)
        self.summed = tuple(name for name in self.parameters if f"d{name}" in added and name not in BIASES)
        # What such a kernel gives of a bias is added to what is there, too.
        self.zeroed = added - {f"d{name}" for name in self.summed}
        self.loss = "loss" in layer.outputs("forward")
        self.rows = ("x", *(["residual"] if "residual" in self.inputs else []))
        self._kept = layer.record.kept_line(layer.dims(1))
        self._types = {name: DTYPES[buffers[name].dtype] for name in self.inputs}
        self._others = {name for name in self.inputs if buffers[name].dtype != layer.options.dtype}
        self._reads = frozenset(layer.inputs("forward"))
        self._outputs = ("y", "loss") if self.loss else ("y",)
        # One cache for each operator: its results are those of this layer.
        self._read = lru_cache(_SIZES_KEPT)(self._read_by)
        self._scratch = lru_cache(_SIZES_KEPT)(self._scratch_bytes)
        self._gradients_of = lru_cache(_SIZES_KEPT)(self._gradient_buffers)
        self._returned = tuple(name for name in self.gradients if name not in self.summed)
        self._backward: Any = None
        if layer.options.trained:
            self._backward = define(
                f"{NAMESPACE}::{name}_backward", self._backward_schema(), self._backward_operator,
                lambda dy, *given: self._fresh(dy, *given[-2:]),
            )  # fmt: skip
        self.name = name
        self.op = define(
            f"{NAMESPACE}::{name}", self._forward_schema(), self._run_forward,
            lambda *given: self._results(self._checked(self.inputs, given), given[-1]),
            (self._gradients, self._set_up),
        )  # fmt: skip
        if self.fp8:
            quantise = f"{NAMESPACE}::{name}{_QUANTISE}"
            fake = lambda *weights: self.new_fp8(self._checked(self.weights, weights).device)  # noqa: E731
            define(quantise, self._quantise_schema(), self._run_quantise, fake)

    def __deepcopy__(self, memo: Any) -> Operator:
        return self  # a copy of a module launches the same kernels

    def __call__(self, tensors: Mapping[str, Any], sums: Sequence[Any] = ()) -> Any:
        """y, or (y, loss). tensors: `inputs` by name; quantised weights may be left out. sums: the tensors that the
        gradients of `summed` are added to.

        Nothing is kept where no gradient can be asked for.
        """
        if self.fp8 and self.fp8[0] not in tensors:
            tensors = {**tensors, **quantised(self.name, self.weights, self.fp8, tensors)}
        results = launch(self.name, [tensors[name] for name in self.inputs], sums)
        return (results[0], results[1].reshape(())) if self.loss else results[0]

    def run(self, tensors: Sequence[Any], sums: Sequence[Any], keep: bool) -> tuple[Any, ...]:
        """The outputs, without the dispatcher. tensors, sums, keep: as the operator takes them."""
        if not keep:
            return self._run_forward(*tensors, *sums, False)
        results = _Layer.apply(*tensors, *sums, self)
        return results if self.loss else (results,)

    def cast(self, tensors: Mapping[str, Any], everything: bool = False) -> dict[str, Any]:
        """The tensors in the types that the layer reads; those of the layer's own dtype only where `everything` is.

        Raises ArgumentError for what would be cut to integers.
        """
        tensors_by_name = {}
        for name, tensor in tensors.items():
            kind = self._types[name]
            if tensor.dtype != kind and (everything or name in self._others):
                if kind == torch.int32 and (tensor.is_floating_point() or tensor.dtype == torch.bool):
                    raise ArgumentError(
                        f"{name} is {tensor.dtype}; it must be of integers, such as int32", argument=name
                    )
                tensor = _within(tensor, kind).to(kind)
            tensors_by_name[name] = tensor
        return tensors_by_name

    # -- definitions --------------------------------------------------------------------------------------------------

    def _forward_schema(self) -> str:
        parts = [f"Tensor {name}" for name in self.inputs] + [f"Tensor sum_{name}" for name in self.summed]
        results = ["Tensor y", *(["Tensor loss"] if self.loss else []), "Tensor kept"]
        return f"({', '.join([*parts, 'bool keep'])}) -> ({', '.join(results)})"

    def _backward_schema(self) -> str:
        sums = "Tensor(a!)[] sums, " if self.summed else ""
        results = ", ".join(["Tensor"] * len(self._returned))
        results = results if len(self._returned) == 1 else f"({results})"
        kept = "Tensor(k!) kept" if self.in_place else "Tensor kept"
        given = f"Tensor dy, Tensor? dloss, {kept}, Tensor[] saved, {sums}SymInt[] shape, str[] asked"
        return f"({given}) -> {results}"

    def _checked(self, names: Sequence[str], given: Sequence[Any]) -> Any:
        """The first of the tensors `given`, which have no values, after a look at types and shapes as far as they are
        known. Raises ArgumentError.
        """
        tokens = prod(given[0].shape[:-1]) if names[0] == "x" else 0
        dims = self.layer.dims(tokens)
        for name, tensor in zip(names, given, strict=False):
            buffer = self.layer.record.buffers[name]
            shape = (prod(tensor.shape[:-1]), *tensor.shape[-1:]) if name in self.rows else tuple(tensor.shape)
            wanted = buffer.extents(dims)
            fits = tensor.dtype == DTYPES[buffer.dtype] and len(shape) == len(wanted)
            if not fits or any(
                extent_given != extent
                for extent_given, extent, known in zip(shape, wanted, buffer.shape, strict=True)
                if type(known) is int or (type(extent_given) is int and type(extent) is int)
            ):
                raise ArgumentError(
                    f"{self.layer.name}: {name} is {tensor.dtype} {list(tensor.shape)}; for {tokens} tokens it must be"
                    f" {buffer.dtype} {list(wanted)}",
                    argument=name,
                )
        return given[0]

    # -- quantise -----------------------------------------------------------------------------------------------------

    def _quantise_schema(self) -> str:
        given = ", ".join(f"Tensor {name}" for name in self.weights)
        return f"({given}) -> ({', '.join(['Tensor'] * len(self.fp8))})"

    def new_fp8(self, device: Any) -> tuple[Any, ...]:
        """Memory for the quantised weights."""
        buffers = self.layer.record.buffers
        return tuple(
            torch.empty(buffers[name].extents({}), dtype=DTYPES[buffers[name].dtype], device=device)
            for name in self.fp8
        )

    def _run_quantise(self, *weights: Any) -> tuple[Any, ...]:
        fp8 = self.new_fp8(weights[0].device)
        self.quantise_into(weights, fp8)
        return fp8

    def quantise_into(self, weights: Sequence[Any], fp8: Sequence[Any]) -> None:
        """Quantises the weights into tensors of `new_fp8`."""
        given = dict(zip(self.weights, map(_dense, weights), strict=True))
        self.layer.quantise(**given, **dict(zip(self.fp8, fp8, strict=True)), stream=stream_of(weights[0]))

    # -- forward ------------------------------------------------------------------------------------------------------

    def _results(self, x: Any, keep: bool) -> tuple[Any, ...]:
        """Memory for the results of the forward operator."""
        slope, rest = self._kept
        y = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        size = prod(x.shape[:-1]) * slope + rest if keep else 0
        kept = torch.empty(size, dtype=torch.uint8, device=x.device)
        return (y, torch.empty(1, dtype=torch.float32, device=x.device), kept) if self.loss else (y, kept)

    def _run_forward(self, *given: Any) -> tuple[Any, ...]:
        keep = given[-1]
        arguments = {
            name: _dense(tensor) for name, tensor in zip(self.inputs, given, strict=False) if name in self._reads
        }
        results = self._results(arguments["x"], keep)
        arguments |= {name: _rows(arguments[name]) for name in self.rows}
        x = arguments["x"]
        scratch = self._memory("forward" if keep else "inference", x, self._outputs)
        arguments["y"] = _rows(results[0])
        if self.loss:
            arguments["loss"] = results[1]
        self.layer.forward(
            **arguments, kept=results[-1] if keep else None, scratch=scratch, stream=stream_of(x),
            cluster_margin=self.cluster_margin,
        )  # fmt: skip
        return results

    def _memory(self, which: str, rows: Any, outputs: tuple[str, ...]) -> Any:
        size = self._scratch(which, rows.shape[0], outputs)
        return torch.empty(size, dtype=torch.uint8, device=rows.device)

    def _scratch_bytes(self, which: str, tokens: int, outputs: tuple[str, ...]) -> int:
        in_place = self.in_place and which == "backward"
        return self.layer.record.scratch(which, outputs, self.layer.dims(tokens), outputs, in_place=in_place)[1]

    # -- backward -----------------------------------------------------------------------------------------------------

    def _read_by(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """The inputs of the forward pass that the gradients of the inputs `asked` are made of."""
        steps = self.layer.record.passes["backward"].queued([self.gradients[name] for name in asked])
        read = {name for step in steps for name in step.reads}
        return tuple(name for name in self.inputs if name in read)

    def _set_up(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        if not inputs[-1]:
            return
        ctx.run = self._backward
        if not self.layer.options.trained:
            raise ArgumentError(f"{untrained(self.layer.options)}, or call it under torch.no_grad()")
        ctx.set_materialize_grads(False)  # of the kept bytes it would make as many zeros
        by_name = dict(zip(self.inputs, inputs, strict=False))
        needed = dict(zip(self.inputs, ctx.needs_input_grad, strict=False))
        ctx.asked = tuple(name for name in self.gradients if needed[name])
        sums = dict(zip(self.summed, inputs[len(self.inputs) : -1], strict=True))
        # Not saved: other calls may have added to them by then, and a copy of them, as hooks make, is of no use.
        ctx.sums = {name: sums[name] for name in self.summed if name in ctx.asked}
        ctx.save_for_backward(output[-1], *(by_name[name] for name in self._read(ctx.asked)))
        ctx.shape = inputs[0].shape

    def _gradients(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            gradients = self._backward_pass(ctx, grads)
        if not torch.is_grad_enabled():
            return gradients
        # With create_graph=True: a use of these in a second backward pass is an error, and not zeros.
        refusing = torch._C._functions.DelayedError(b"second derivatives of a layer are not computed", len(gradients))
        return tuple(
            refusing(*(None if gradient is None else gradient.detach().requires_grad_() for gradient in gradients))
        )

    def _backward_pass(self, ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.in_place:
            if getattr(ctx, "done", False):
                raise ArgumentError(
                    f"{self.layer.name}: a second backward pass through one call; with in_place = True the first has"
                    " written over what was kept; leave in_place out, or call the layer once more"
                )
            ctx.done = True
        asked = self._wanted(ctx)
        kept, *rest = ctx.saved_tensors
        saved = rest
        if asked != ctx.asked:
            held = dict(zip(self._read(ctx.asked), rest, strict=True))
            saved = [held[name] for name in self._read(asked)]
        sums = [ctx.sums[name] for name in self.summed if name in asked]
        dy = grads[0]
        if dy is None:  # the loss alone was used
            dy = kept.new_zeros(ctx.shape, dtype=self.dtype)
        dloss = grads[1] if self.loss else None
        run = ctx.run if ctx.run is not None and _is_plain((dy, kept)) else self._backward
        given = (dy, dloss, kept, saved, *([sums] if self.summed else []), list(ctx.shape), list(asked))
        results = run(*given)
        results = dict(zip(self._returned, results if len(self._returned) > 1 else (results,), strict=True))
        gradients = {name: results[name] for name in asked if name in results} | self._announced(ctx, asked)
        gradients["residual"] = grads[0]
        return *(gradients.get(name) for name in self.inputs), *(None for _ in self.summed), None

    def _announced(self, ctx: Any, asked: tuple[str, ...]) -> dict[str, Any]:
        """A gradient for each parameter that says whether its own is in `main_grad` already, as Megatron's do: hooks
        that wait for gradients are called then, and leave this one out.
        """
        announced, nodes = {}, dict(zip(self.inputs, (node for node, _ in ctx.next_functions), strict=False))
        for name in self.summed:
            parameter: Any = getattr(nodes[name], "variable", None)
            if name in asked and hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = True
                new = torch.zeros_like if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like
                announced[name] = new(parameter, requires_grad=False)
        return announced

    def _wanted(self, ctx: Any) -> tuple[str, ...]:
        """Those of `ctx.asked` that this backward pass leads to: torch.autograd.grad(loss, x) wants no gradient of a
        weight, so none may be added to a main gradient.
        """
        nodes = dict(zip(self.inputs, (node for node, _ in ctx.next_functions), strict=False))
        return tuple(name for name in ctx.asked if _is_wanted(nodes[name]))

    def _gradient_buffers(self, tokens: Any, asked: tuple[str, ...]) -> list[tuple[str, tuple[Any, ...], Any, Any]]:
        """(input, extents of its gradient, dtype, what allocates it) for all that the backward operator returns: of
        those that are not asked for nothing.
        """
        dims, shapes = self.layer.dims(tokens), []
        for name in self._returned:
            buffer = self.layer.record.buffers[self.gradients[name]]
            extents = buffer.extents(dims) if name in asked else (0,)
            new = torch.zeros if self.gradients[name] in self.zeroed else torch.empty
            shapes.append((name, extents, DTYPES[buffer.dtype], new))
        return shapes

    def _fresh(self, dy: Any, shape: Sequence[Any], asked: Sequence[str]) -> Any:
        """Memory for the results of the backward operator."""
        tokens, device = prod(shape[:-1]), dy.device
        known = self._gradients_of if type(tokens) is int else self._gradient_buffers  # symbols are no keys
        buffers = [
            new(shape if name == "x" and name in asked else extents, dtype=dtype, device=device)
            for name, extents, dtype, new in known(tokens, tuple(asked))
        ]
        return tuple(buffers) if len(buffers) > 1 else buffers[0]

    def _backward_operator(self, dy: Any, dloss: Any, kept: Any, saved: list[Any], *rest: Any) -> Any:
        *sums, shape, asked = rest
        if sums and not _leads_to_sums():  # what is traced for torch.compile knows only what could be asked for
            sums, asked = [[]], [name for name in asked if name not in self.summed]
        return self._run_backward(dy, dloss, kept, saved, *sums, shape, asked)

    def _run_backward(self, dy: Any, dloss: Any, kept: Any, saved: list[Any], *rest: Any) -> Any:
        *sums, shape, asked = rest
        results = self._fresh(dy, shape, asked)
        if not asked:
            return results
        by_name = dict(zip(self._returned, results if isinstance(results, tuple) else (results,), strict=True))
        if sums:
            by_name |= dict(zip([name for name in self.summed if name in asked], sums[0], strict=True))
            increment_version(sums[0])
        outputs = {self.gradients[name]: by_name[name] for name in asked}
        if "dx" in outputs:
            outputs["dx"] = _rows(outputs["dx"])
        arguments = dict(zip(self._read(tuple(asked)), map(_dense, saved), strict=True))
        if "x" in arguments:
            arguments["x"] = _rows(arguments["x"])
        if self.loss:
            arguments["dloss"] = dy.new_zeros(1, dtype=torch.float32) if dloss is None else _dense(dloss)
        dy = _rows(_dense(dy))
        scratch = self._memory("backward", dy, tuple(outputs))
        if self.in_place:
            increment_version(kept)
        self.layer.backward(
            dy=dy, **arguments, **outputs, kept=kept, scratch=scratch, stream=stream_of(dy),
            cluster_margin=self.cluster_margin, in_place=self.in_place,
        )  # fmt: skip
        return results


class _Layer(torch.autograd.Function):  # type: ignore[misc]
    """A forward pass without the dispatcher, and its backward pass."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *inputs, operator = given
        results = operator._run_forward(*inputs, True)
        operator._set_up(ctx, (*inputs, True), results)
        ctx.operator, ctx.run = operator, operator._run_backward
        return results[:-1] if operator.loss else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return ctx.operator._gradients(ctx, *grads)  # type: ignore[no-any-return]


def launch(name: str, tensors: Sequence[Any], sums: Sequence[Any]) -> Any:
    """The result of the forward operator of that name. torch.compile follows this."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise ArgumentError(
            f"fusekit::{name}: forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) are not computed,"
            " and would be zeros; ask for a backward pass"
        )
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if torch.compiler.is_compiling() or not _is_plain(tensors):
        return op_of(name)(*tensors, *sums, keep)
    return operators()[name].run(tensors, sums, keep)


def _is_plain(tensors: Sequence[Any]) -> bool:
    """Whether these are tensors with memory, and no compiler, tracer, profiler, mode or transform of PyTorch wants to
    see what is called on them.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd.profiler._is_profiler_enabled
        or tensors[0].is_meta
    ) and all(type(tensor) in _PLAIN for tensor in tensors)


def quantised(name: str, weights: Sequence[str], names: Sequence[str], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The quantised weights by name, for the forward operator of that name. torch.compile follows this."""
    fp8 = op_of(f"{name}{_QUANTISE}")(*(tensors[weight].detach() for weight in weights))
    return dict(zip(names, fp8, strict=True))


def operator_of(layer: Layer, cluster_margin: int | None = None, in_place: bool = False) -> Operator:
    """The operator of a layer with these settings, registered once: fusekit::NAME, NAME made of the layer's name and
    what it computes.
    """
    with _REGISTERING:
        return _registered(layer, cluster_margin, in_place)


@cache
def _registered(layer: Layer, cluster_margin: int | None, in_place: bool) -> Operator:
    # All that torch.compile's cache on disk takes a name for.
    settings = json.dumps([layer.options.canonical(), in_place], sort_keys=True)
    name = re.sub(r"\W", "_", layer.name) + "_" + hashlib.sha256(settings.encode()).hexdigest()[:8]
    others = (f"{name}_{number}" for number in count(2))  # the same layer of another library, or with other settings
    known = getattr(torch.ops, NAMESPACE)
    free = next(each for each in chain([name], others) if not hasattr(known, each))
    operator = operators()[free] = Operator(layer, free, cluster_margin, in_place)
    return operator


@cache
def operators() -> dict[str, Operator]:
    """The operators of this process by name."""
    return {}


def _within(tensor: Any, kind: Any) -> Any:
    """Integers of 64 bits that int32 cannot hold, brought to its ends, so that they name no expert either."""
    if kind != torch.int32 or tensor.dtype != torch.int64:
        return tensor
    return tensor.clamp(-(2**31), 2**31 - 1)


def casting(device: str) -> bool:
    """Whether autocast is on for devices of a type. torch.compile follows this."""
    return device != "meta" and bool(torch.is_autocast_enabled(device))  # of which "meta" has none


def op_of(name: str) -> Any:
    """The forward operator of that name. torch.compile follows this."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _dense(tensor: Any) -> Any:
    """The tensor, or a copy where kernels cannot read it as it lies."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _rows(tensor: Any) -> Any:
    """x, y or a gradient of them as [T, H]; another H is for the layer to refuse."""
    if tensor.dim() == 2:
        return tensor
    return tensor.view(prod(tensor.shape[:-1]), *tensor.shape[-1:])


def _is_wanted(node: Any) -> bool:
    """Whether the backward pass that is running goes on to this node of the graph."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        # PyTorch refuses to say it of a leaf that torch.autograd.grad was asked for. Any other error leaves it open,
        # and a gradient must not be added to where that is so.
        if "leaf node" not in str(error):
            raise
        return True


def _leads_to_sums() -> bool:
    """Whether the node of the graph that is running goes on to a parameter with a main gradient, if to any such."""
    node = torch._C._current_autograd_node()
    leaves = [leaf for leaf, _ in node.next_functions] if node is not None else []
    leaves = [leaf for leaf in leaves if hasattr(getattr(leaf, "variable", None), "main_grad")]
    return not leaves or any(_is_wanted(leaf) for leaf in leaves)


def stream_of(tensor: Any) -> int | None:
    """PyTorch's current stream on the tensor's device; None on the CPU."""
    # What torch.cuda.current_stream(...).cuda_stream is, for a tenth of its time.
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else None
