"""`fusekit show` of a layer: options, arguments, steps, and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from fusekit.store import NameRecord, Store
from fusekit_cli import output
from fusekit_cli.lookup import to_load, unbuilt
from fusekit_cli.options import Session

if TYPE_CHECKING:
    from fusekit.plan.layer import Buffer, Options, Program


def describe(store: Store, name: str, records: Sequence[NameRecord], root: str) -> dict[str, Any]:
    """The document of the layer `name`. records: of its kernels. root: path of the root that holds them."""
    from fusekit.plan.layer import program, stored_options
    from fusekit.plan.layer.ranks import room, window_sizes

    options = stored_options(name, {record.name: record.spec for record in records})
    assert options is not None
    plan = program(options)
    windows: dict[str, int] = {}
    if options.ranks > 1:
        plan = plan.within(room(options, options.tokens))
        windows = window_sizes(plan, options)
    kernels = {f"{name}.{part}": keys["op"] for part, keys in plan.parts.items()}
    loaded = [record for record in to_load(store, records, name) if record.name.partition("@")[0] in kernels]
    rest = options.canonical() | {"weight_dtype": options.weights}
    for known in ("file", "name", "kind", "tokens"):
        del rest[known]
    return {
        "name": name,
        "kind": options.kind,
        "root": root,
        "options": rest,
        "passes": {which: _pass(name, plan, which) for which in plan.steps},
        "memory": _memory(options, plan) | {"windows": windows},
        "kernels": [
            {"name": record.name, "arch": record.arch, "op": record.spec["op"], "key": record.key,
             "bytes": record.summary.get("bytes"), "registers": record.summary.get("registers")}
            for record in sorted(loaded, key=lambda record: [*kernels].index(record.name.partition("@")[0]))
        ],
        "missing": unbuilt(name, plan.parts, records),
    }  # fmt: skip


def _pass(name: str, plan: Program, which: str) -> dict[str, Any]:
    inputs, outputs = plan.arguments(which)
    added = {
        name for step in plan.steps[which] if plan.parts[step.part].get("accumulate") for name in step.writes.values()
    }
    return {
        "inputs": _tensors(inputs.values()),
        "outputs": [tensor | {"added_to": tensor["name"] in added} for tensor in _tensors(outputs.values())],
        "steps": [
            {"kernel": f"{name}.{step.part}", "op": plan.parts[step.part]["op"], "reads": dict(step.reads),
             "writes": dict(step.writes)}
            for step in plan.steps[which]
        ],
    }  # fmt: skip


def _tensors(buffers: Iterable[Buffer]) -> list[dict[str, Any]]:
    return [{"name": buffer.name, "dtype": buffer.dtype, "shape": list(buffer.shape)} for buffer in buffers]


def _memory(options: Options, plan: Program) -> dict[str, Any]:
    """Sizes in bytes, for the tokens of the spec."""
    from fusekit.plan.layer.program import QUANTISE

    dims = plan.dims(options.tokens)
    scratch = {which: plan.most_scratch(which, options.tokens) for which in plan.steps if which != QUANTISE}
    fp8 = sum(buffer.bytes(dims) for buffer in plan.arguments(QUANTISE)[1].values())
    places, kept = plan.kept(dims)
    parts = {name: plan.buffers[name].bytes(dims) for name in places}
    return {"tokens": options.tokens, "kept": kept, "kept_buffers": parts, "scratch": scratch, "fp8_weights": fp8}


def text(session: Session, document: Mapping[str, Any]) -> None:
    """Print the document for people."""
    archs = ", ".join(dict.fromkeys(kernel["arch"] for kernel in document["kernels"]))
    count = len(document["kernels"]) + len(document["missing"])
    click.echo(f"{document['name']}: a layer ({document['kind']}) of {output.plural(count, 'kernel')} for {archs}")
    click.echo("options")
    output.tree(document["options"], "  ")
    trained = bool(document["passes"]["backward"]["steps"])
    for which, steps in document["passes"].items():
        if not trained and which != "inference":
            continue
        click.echo(f"\n{which}")
        rows = [
            (tensor["name"], "inout" if tensor.get("added_to") else role, tensor["dtype"], _shape(tensor["shape"]))
            for role in ("input", "output")
            for tensor in steps[f"{role}s"]
        ]
        output.table(session, ("ARGUMENT", "ROLE", "DTYPE", "SHAPE"), rows)
        done = [
            (number, step["kernel"].rpartition(".")[2], step["op"], ", ".join(step["reads"].values()),
             ", ".join(step["writes"].values()))
            for number, step in enumerate(steps["steps"], start=1)
        ]  # fmt: skip
        click.echo()
        output.table(
            session,
            ("STEP", "KERNEL", "OP", "READS", "WRITES"),
            done,
            right=("STEP",),
            spare=("OP",),
            prose=("READS", "WRITES"),
        )
    memory = document["memory"]
    click.echo(f"\nmemory for {memory['tokens']} tokens")
    kept = ", ".join(f"{name} {output.size(size)}" for name, size in memory["kept_buffers"].items())
    if trained:
        for line in output.lines([f"  kept for the backward pass  {output.size(memory['kept'])}: {kept}"]):
            click.echo(line)
    for which, size in memory["scratch"].items():
        if trained or which == "inference":
            click.echo(f"  scratch, {which:<18} {output.size(size)}")
    for name, size in memory["windows"].items():
        click.echo(f"  window {name:<20} {output.size(size)}, shared by layers of the same size")
    if memory["fp8_weights"]:
        click.echo(f"  FP8 weights                 {output.size(memory['fp8_weights'])}")
    click.echo()
    kernels = [(row["name"], row["arch"], row["op"], row["registers"], row["key"][:12]) for row in document["kernels"]]
    output.table(
        session,
        ("NAME", "ARCH", "OP", "REGISTERS", "KEY"),
        kernels,
        right=("REGISTERS",),
        spare=("KEY", "REGISTERS", "ARCH"),
    )
    if document["missing"]:
        click.echo(f"not built: {', '.join(document['missing'])}")


def _shape(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
