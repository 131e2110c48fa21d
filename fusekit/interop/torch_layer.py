"""A layer as a PyTorch operator with a gradient: what `fusekit.interop.torch.MoE` and the Transformers backend call.

The forward operator gives y, the load-balancing loss where the layer has one, and what its backward pass needs, as
bytes. The backward operator launches only what makes the gradients that autograd asks for. Both allocate with
PyTorch, launch on its current stream, and have fakes for symbolic token counts.
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

from fusekit.dtypes import by
from fusekit.errors import ArgumentError
from fusekit.layers import Layer
from fusekit.layers.layer import untrained

# Those that this PyTorch has.
DTYPES = {name: getattr(torch, known) for known, name in by("framework").items() if hasattr(torch, known)}
NAMESPACE = "fusekit"
_ALIGNMENT = 16  # of a tensor that kernels copy in boxes
_SIZES_KEPT = 256
_QUANTISE = "_quantise"
_REGISTERING = threading.Lock()


class Operator:
    """The passes of `layer` in PyTorch. Make one with `operator_of`.

    inputs: of the forward pass, x first; of a layer with a recipe its weights, and codes of them for both passes, too.
    parameters: those of them that are weights or biases. weights, codes: what the operator NAME_quantise takes and
    gives. summed: parameters whose gradients are added to a float32 tensor of the caller's. loss: whether there is a
    load-balancing loss. cluster_margin: of forward and backward passes. in_place: of backward passes.
    """

    def __init__(self, layer: Layer, name: str, cluster_margin: int | None = None, in_place: bool = False) -> None:
        program, self.cluster_margin, self.in_place = layer.program, cluster_margin, in_place
        self.layer, self.dtype = layer, DTYPES[layer.options.dtype]
        self.weights, self.codes = tuple(layer.inputs("quantise")), tuple(layer.outputs("quantise"))
        self.inputs = tuple(dict.fromkeys(("x", *layer.inputs("forward"), *self.weights, *self.codes)))
        self.gradients = {name: f"d{name}" for name in self.inputs if f"d{name}" in layer.outputs("backward")}
        others = ("x", "logits", "weights")
        self.parameters = tuple(name for name in self.inputs if f"d{name}" in program.buffers and name not in others)
        adding = [step.writes for step in program.steps["backward"] if program.parts[step.part].get("accumulate")]
        self.summed = tuple(name for name in self.parameters if any(each["dw"] == f"d{name}" for each in adding))
        # What such a kernel gives of a bias is added to what is there, too.
        self.zeroed = {each["dbias"] for each in adding if "dbias" in each}
        self.loss = "loss" in layer.outputs("forward")
        self._kept = program.kept_line()
        # One cache for each operator: its results are those of this layer.
        self._read = lru_cache(_SIZES_KEPT)(self._read_by)
        self._scratch = lru_cache(_SIZES_KEPT)(self._scratch_bytes)
        self._returned = tuple(name for name in self.gradients if name not in self.summed)
        if layer.options.trained:
            self._backward = self._defined(f"{name}_backward", self._backward_schema(), self._run_backward)
            self._backward.register_fake(lambda dy, *given: self._fresh(dy, *given[-2:]))
        self._forward = self._defined(name, self._forward_schema(), self._run_forward)
        self._forward.register_fake(lambda *given: self._results(given[0], given[-1]))
        self._forward.register_autograd(self._gradients, setup_context=self._set_up)
        if self.codes:
            quantise = self._defined(f"{name}{_QUANTISE}", self._quantise_schema(), self._run_quantise)
            quantise.register_fake(self._new_codes)
        self.name, self.op = name, op_of(name)

    def __deepcopy__(self, memo: Any) -> Operator:
        return self  # a copy of a module launches the same kernels

    def __call__(self, tensors: Mapping[str, Any], sums: Sequence[Any] = ()) -> Any:
        """y, or (y, loss). tensors: `inputs` by name; codes may be left out. sums: the tensors that the gradients of
        `summed` are added to.

        Nothing is kept where no gradient can be asked for.
        """
        if self.codes and self.codes[0] not in tensors:
            tensors = {**tensors, **quantised(self.name, self.weights, self.codes, tensors)}
        made = launch(self.op, [tensors[name] for name in self.inputs], sums)
        return (made[0], made[1].reshape(())) if self.loss else made[0]

    def cast(self, tensors: Mapping[str, Any], everything: bool = False) -> dict[str, Any]:
        """The tensors in the types that the layer reads; those of the layer's own dtype only where `everything` is.

        Raises ArgumentError for what would be cut to integers.
        """
        buffers, own = self.layer.program.buffers, self.layer.options.dtype
        for name, tensor in tensors.items():
            if buffers[name].dtype == "i32" and (tensor.is_floating_point() or tensor.dtype == torch.bool):
                raise ArgumentError(f"{name} is {tensor.dtype}; it must be of integers, such as int32", argument=name)
        return {
            name: _within(tensor, buffers[name].dtype).to(DTYPES[buffers[name].dtype])
            if everything or buffers[name].dtype != own
            else tensor
            for name, tensor in tensors.items()
        }

    # -- definitions --------------------------------------------------------------------------------------------------

    def _defined(self, name: str, schema: str, run: Any) -> Any:
        mutated = re.findall(r"!\)(?:\[\])? (\w+)", schema)
        return torch.library.custom_op(f"{NAMESPACE}::{name}", run, mutates_args=mutated, schema=schema)

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

    # -- codes --------------------------------------------------------------------------------------------------------

    def _quantise_schema(self) -> str:
        given = ", ".join(f"Tensor {name}" for name in self.weights)
        return f"({given}) -> ({', '.join(['Tensor'] * len(self.codes))})"

    def _new_codes(self, *weights: Any) -> tuple[Any, ...]:
        buffers, device = self.layer.program.buffers, weights[0].device
        return tuple(
            torch.empty(buffers[name].extents({}), dtype=DTYPES[buffers[name].dtype], device=device)
            for name in self.codes
        )

    def _run_quantise(self, *weights: Any) -> tuple[Any, ...]:
        given = dict(zip(self.weights, map(_dense, weights), strict=True))
        made = self._new_codes(*weights)
        self.layer.quantise(**given, **dict(zip(self.codes, made, strict=True)), stream=_stream(weights[0]))
        return made

    # -- forward ------------------------------------------------------------------------------------------------------

    def _results(self, x: Any, keep: bool) -> tuple[Any, ...]:
        """Memory for what the forward operator returns."""
        slope, rest = self._kept
        y = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        size = prod(x.shape[:-1]) * slope + rest if keep else 0
        kept = torch.empty(size, dtype=torch.uint8, device=x.device)
        return (y, torch.empty(1, dtype=torch.float32, device=x.device), kept) if self.loss else (y, kept)

    def _run_forward(self, *given: Any) -> tuple[Any, ...]:
        *tensors, keep = given
        read = self.layer.inputs("forward")
        arguments = {name: _dense(tensor) for name, tensor in zip(self.inputs, tensors, strict=False) if name in read}
        made = self._results(arguments["x"], keep)
        arguments["x"] = x = self._rows(arguments["x"])
        outputs = dict(zip(("y", "loss") if self.loss else ("y",), (self._rows(made[0]), *made[1:]), strict=False))
        scratch = self._memory("forward" if keep else "inference", x, tuple(outputs))
        kept = made[-1] if keep else None
        more = {"stream": _stream(x), "cluster_margin": self.cluster_margin}
        self.layer.forward(**arguments, **outputs, kept=kept, scratch=scratch, **more)
        return made

    def _rows(self, tensor: Any) -> Any:
        """x, y or a gradient of them as [T, H]; another H is for the layer to refuse."""
        return tensor.view(prod(tensor.shape[:-1]), *tensor.shape[-1:])

    def _memory(self, which: str, rows: Any, outputs: tuple[str, ...]) -> Any:
        size = self._scratch(which, rows.shape[0], outputs)
        return torch.empty(size, dtype=torch.uint8, device=rows.device)

    def _scratch_bytes(self, which: str, tokens: int, outputs: tuple[str, ...]) -> int:
        program = self.layer.program
        return program.scratch(which, outputs, program.dims(tokens), in_place=self.in_place)[1]

    # -- backward -----------------------------------------------------------------------------------------------------

    def _read_by(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """The inputs of the forward pass that the gradients of the inputs `asked` are made of."""
        steps = self.layer.program.needed("backward", [self.gradients[name] for name in asked])
        read = {name for step in steps for name in step.reads.values()}
        return tuple(name for name in self.inputs if name in read)

    def _set_up(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        if not inputs[-1]:
            return
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
        if self.in_place:
            if getattr(ctx, "done", False):
                raise ArgumentError(
                    f"{self.layer.name}: a second backward pass through one call; with in_place = True the first has"
                    " written over what was kept; leave in_place out, or call the layer once more"
                )
            ctx.done = True
        asked = self._wanted(ctx)
        kept, *rest = ctx.saved_tensors
        held = dict(zip(self._read(ctx.asked), rest, strict=True))
        saved = [held[name] for name in self._read(asked)]
        sums = [ctx.sums[name] for name in self.summed if name in asked]
        dy = grads[0]
        if dy is None:  # the loss alone was used
            dy = kept.new_zeros(ctx.shape, dtype=self.dtype)
        dloss = grads[1] if self.loss else None
        given = (dy, dloss, kept, saved, *([sums] if self.summed else []), list(ctx.shape), list(asked))
        made = self._backward(*given)
        made = dict(zip(self._returned, made if len(self._returned) > 1 else (made,), strict=True))
        found = [made[name] if name in made and name in asked else None for name in self.inputs]
        return *found, *(None for _ in self.summed), None

    def _wanted(self, ctx: Any) -> tuple[str, ...]:
        """Those of `ctx.asked` that this backward pass leads to: torch.autograd.grad(loss, x) wants no gradient of a
        weight, so none may be added to a main gradient.
        """
        nodes = dict(zip(self.inputs, (node for node, _ in ctx.next_functions), strict=False))
        return tuple(name for name in ctx.asked if _is_wanted(nodes[name]))

    def _fresh(self, dy: Any, shape: Sequence[Any], asked: Sequence[str]) -> Any:
        """Memory for what the backward operator returns: empty for what is not asked for."""
        program = self.layer.program
        dims, found = program.dims(prod(shape[:-1])), []
        for name in self._returned:
            buffer = program.buffers[self.gradients[name]]
            extents = (shape if name == "x" else buffer.extents(dims)) if name in asked else (0,)
            new = torch.zeros if buffer.name in self.zeroed else torch.empty
            found.append(new(extents, dtype=DTYPES[buffer.dtype], device=dy.device))
        return tuple(found) if len(found) > 1 else found[0]

    def _run_backward(self, dy: Any, dloss: Any, kept: Any, saved: list[Any], *rest: Any) -> Any:
        *sums, shape, asked = rest
        if sums and not _leads_to_sums():  # what is traced for torch.compile knows only what could be asked for
            sums, asked = [[]], [name for name in asked if name not in self.summed]
        made = self._fresh(dy, shape, asked)
        found = dict(zip(self._returned, made if isinstance(made, tuple) else (made,), strict=True))
        found |= dict(zip([name for name in self.summed if name in asked], sums[0] if sums else (), strict=True))
        outputs = {self.gradients[name]: found[name] for name in asked}
        if not outputs:
            return made
        if "dx" in outputs:
            outputs["dx"] = self._rows(outputs["dx"])
        arguments = dict(zip(self._read(tuple(asked)), map(_dense, saved), strict=True))
        if "x" in arguments:
            arguments["x"] = self._rows(arguments["x"])
        if self.loss:
            arguments["dloss"] = dy.new_zeros(1, dtype=torch.float32) if dloss is None else _dense(dloss)
        dy = self._rows(_dense(dy))
        scratch = self._memory("backward", dy, tuple(outputs))
        more: dict[str, Any] = {"stream": _stream(dy), "cluster_margin": self.cluster_margin, "in_place": self.in_place}
        self.layer.backward(dy=dy, **arguments, **outputs, kept=kept, scratch=scratch, **more)
        return made


def launch(op: Any, tensors: Sequence[Any], sums: Sequence[Any]) -> Any:
    """What a forward operator gives. torch.compile follows this."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors if forward_ad._current_level >= 0):
        raise ArgumentError(
            f"{op}: forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) are not computed, and would be"
            " zeros; ask for a backward pass"
        )
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return op(*tensors, *sums, keep)


def quantised(op: str, weights: Sequence[str], codes: Sequence[str], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Codes of the weights by name, for the forward operator `op`. torch.compile follows this."""
    made = op_of(f"{op}{_QUANTISE}")(*(tensors[name].detach() for name in weights))
    return dict(zip(codes, made, strict=True))


def operator_of(layer: Layer, cluster_margin: int | None = None, in_place: bool = False) -> Operator:
    """The operator of a layer with these settings, registered once: fusekit::NAME, NAME made of the layer's name and
    what it computes.
    """
    with _REGISTERING:
        return _registered(layer, cluster_margin, in_place)


@cache
def _registered(layer: Layer, cluster_margin: int | None, in_place: bool) -> Operator:
    # All that torch.compile's cache on disk takes a name for.
    said = json.dumps([layer.options.canonical(), in_place], sort_keys=True)
    name = re.sub(r"\W", "_", layer.name) + "_" + hashlib.sha256(said.encode()).hexdigest()[:8]
    others = (f"{name}_{number}" for number in count(2))  # the same layer of another library, or with other settings
    known = getattr(torch.ops, NAMESPACE)
    free = next(each for each in chain([name], others) if not hasattr(known, each))
    return Operator(layer, free, cluster_margin, in_place)


def _within(tensor: Any, dtype: str) -> Any:
    """Integers of 64 bits that int32 cannot hold, brought to its ends, so that they name no expert either."""
    if dtype != "i32" or tensor.dtype != torch.int64:
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
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


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


def _stream(tensor: Any) -> int | None:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None
