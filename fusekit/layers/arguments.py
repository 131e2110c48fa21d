"""What the caller gives to a pass, checked: names, shapes, dtypes and memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError
from fusekit.layers.memory import check_aligned
from fusekit.layers.options import LayerOptions
from fusekit.layers.passes import BACKWARD, QUANTISE
from fusekit.runtime.driver import Driver
from fusekit.runtime.tensors import View, describe, read

if TYPE_CHECKING:
    from fusekit.layers.launching import Launching

_MAX_ROWS = 2**31 - 1  # kernels count rows in int32


def most_tokens(options: LayerOptions) -> int:
    """The most tokens of a pass."""
    return int(_MAX_ROWS // max(options.topk, 1))


def token_count(options: LayerOptions, tokens: Any) -> int:
    """`tokens` as a number. Raises ArgumentError."""
    most = most_tokens(options)
    rule = f"a whole number, 0 or more, and {most} at most: a layer has 2**31 - 1 rows at most"
    count = ArgumentError.integer("tokens", tokens, rule, 0)
    if count > most:
        raise ArgumentError(f"tokens = {count}; it must be {rule}", argument="tokens")
    return count


def gradient_names(layer: Launching, gradients: Any) -> set[str]:
    """Outputs of the backward pass, as the caller lists them. Raises ArgumentError."""
    outputs_among(layer, BACKWARD, ())
    known = list(layer.arguments(BACKWARD)[1])
    several = isinstance(gradients, Iterable) and not isinstance(gradients, str)
    names = list(gradients) if several else [gradients]
    wrong = [name for name in names if not several or name not in known]
    if wrong:
        raise ArgumentError(
            f"{layer.name}: gradients = {gradients!r}, with {wrong[0]!r}; it must be a list of outputs of the"
            f" backward pass, such as ['{known[0]}']; they are {', '.join(known)}",
            argument="gradients",
        )
    return set(names)


def outputs_among(layer: Launching, which: str, names: Collection[str]) -> set[str]:
    """The outputs among the names of arguments. Raises ArgumentError for a name that the pass does not have."""
    if which == QUANTISE and which not in layer.record.passes:
        raise ArgumentError(f"{layer.name} has no recipe, so its passes read the weights themselves; quantise nothing")
    if not layer.record.passes[which].steps:
        raise ArgumentError(untrained(layer.options, which))
    inputs, outputs = layer.arguments(which)
    unknown = sorted(set(names) - inputs.keys() - outputs.keys())
    if unknown:
        raise ArgumentError(
            f"{layer.name}: the {which} pass has no {', '.join(unknown)}; its inputs are {', '.join(inputs)}, its"
            f" outputs {', '.join(outputs)}",
            argument=unknown[0],
        )
    return set(names) & outputs.keys()


def check_tensors(
    layer: Launching, which: str, given: Mapping[str, Any], driver: Driver
) -> tuple[int, int, dict[str, int]]:
    """Checks every shape and dtype: (tokens, device, addresses of the contiguous tensors). Raises ArgumentError."""
    inputs, outputs = layer.arguments(which)
    lead = {BACKWARD: "dy", QUANTISE: next(iter(outputs.keys() & given), "")}.get(which, "x")
    if not lead:
        raise ArgumentError(f"{layer.name}: no FP8 output is given, such as {', '.join(list(outputs)[:4])}")
    if lead not in given:
        raise ArgumentError(f"{layer.name}: {lead} is missing, whose rows are the tokens", argument=lead)
    tensors = {name: read(tensor, name, driver, name in outputs) for name, tensor in given.items()}
    views = {name: describe(meta, name) for name, (_, meta) in tensors.items()}
    tokens = views[lead].shape[0] if views[lead].shape and which != QUANTISE else 0
    dims, known = layer.dims(tokens), {**inputs, **outputs}
    for name, view in views.items():
        buffer = known[name]
        if view.shape != buffer.extents(dims) or view.dtype != buffer.dtype:
            few = "" if which == QUANTISE else f"for {tokens} tokens "
            raise ArgumentError(
                f"{layer.name}: {name} is {view.dtype} {list(view.shape)}; {few}it must be"
                f" {buffer.dtype} {list(buffer.extents(dims))}",
                argument=name,
            )
    steps = layer.record.passes[which].queued(set(given) & outputs.keys())
    if not steps:
        raise ArgumentError(
            f"{layer.name}: no output is given, so the {which} pass has nothing to do; give one or more of"
            f" {', '.join(outputs)}",
            argument=next(iter(outputs)),
        )
    needed = {name for step in steps for name in step.reads}
    if which == QUANTISE:  # without scratch memory, a step writes all of its results to the caller's
        needed |= {name for step in steps for name in step.writes}
    missing = [name for name in known if name in needed and name not in given]
    if missing:
        raise ArgumentError(
            f"{layer.name}: the {which} pass needs {', '.join(missing)}, too; give"
            f" {', '.join(f'{name} {list(known[name].extents(dims))}' for name in missing)}",
            argument=missing[0],
        )
    refuse_overlaps(layer.name, {name: (tensors[name][0], view) for name, view in views.items()}, outputs.keys())
    compact = {name for name, view in views.items() if view.contiguous}
    return tokens, views[lead].device, {name: tensors[name][0] for name in compact}


def check_addresses(
    layer_name: str, tensors: dict[str, tuple[int, View]], outputs: Collection[str], alignment: int | None = None
) -> None:  # fmt: skip
    """Repeats the checks that depend on addresses alone. Raises ArgumentError."""
    for name in ("kept", "scratch"):
        if name in tensors:
            address, view = tensors.pop(name)
            check_aligned(name, address, view, alignment=alignment)
    refuse_overlaps(layer_name, tensors, outputs)


def refuse_overlaps(layer_name: str, tensors: Mapping[str, tuple[int, View]], outputs: Collection[str]) -> None:
    """Raises ArgumentError for an output that shares memory with another tensor: until it is written, it serves as
    scratch memory.
    """
    spans = sorted((begin, begin + view.span, name) for name, (begin, view) in tensors.items() if view.span)
    last, written = (0, ""), (0, "")  # the furthest end so far: of all tensors, and of outputs
    for begin, end, name in spans:
        before = last if name in outputs else written
        if begin < before[0]:
            one, other = (name, before[1]) if name in outputs else (before[1], name)
            raise ArgumentError(
                f"{layer_name}: the output {one} shares memory with {other}; give it memory of its own", argument=one
            )
        last = max(last, (end, name))
        written = max(written, (end, name)) if name in outputs else written


def untrained(options: LayerOptions, which: str = BACKWARD) -> str:
    """The message that a layer for inference has no such pass."""
    why, remedy = "was built for inference alone", 'build it with keep = "z" to train it'
    if options.weights != "none":
        why = f"reads {options.weights} weights as a checkpoint has them, which are not trained,"
        remedy = "run its inference pass"
    return f'{options.file}/{options.name} {why} (keep = "none") and has no {which} pass; {remedy}'
