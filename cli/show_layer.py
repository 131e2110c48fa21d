"""`fusekit show` of a layer: its record in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from fusekit.store import NameRecord, Store
from fusekit_cli import output
from fusekit_cli.options import Session

if TYPE_CHECKING:
    from fusekit.abi.layer_pass import LayerBuffer, LayerStep
    from fusekit.abi.layer_record import Ladder, LayerRecord
    from fusekit.layers import LayerOptions

QUANTISE = "quantise"
PASSES = ("forward", "inference", "backward", QUANTISE)


def describe(store: Store, name: str, records: Sequence[NameRecord], root: str) -> dict[str, Any]:
    """The document of the layer `name`. records: of its kernels. root: path of the root that holds them."""
    from fusekit.layers import LayerOptions, record_of

    record = record_of(store, name, records[0].arch)
    options = LayerOptions(record.options)
    rest = {**record.options, "weight_dtype": options.projections}
    by_name = {each.name: each for each in records}
    ops = {part: _op(record, part, by_name) for part in record.parts}
    kernels = [(key, by_name.get(kernel.name)) for key, kernel in record.kernels.items()]
    used = [record.passes[which] for which in PASSES if which in record.passes]
    parts = list(dict.fromkeys(step.part for each in used for step in each.steps))

    def place(kernel: tuple[str, NameRecord | None]) -> int:
        return parts.index(_part(name, record.kernels[kernel[0]].name))

    return {
        "name": name,
        "kind": options.kind,
        "root": root,
        "key": record.key,
        "options": {key: value for key, value in rest.items() if key not in ("file", "name", "kind", "tokens")},
        "passes": {which: _pass(name, record, which, ops) for which in PASSES if which in record.passes},
        "memory": _memory(record, options),
        "promises": dict(record.promises),
        "tuning": dict(record.tuning),
        "ladders": _ladders(record, record.parts),
        "devices": {device: _ladders(record, parts) for device, parts in record.devices.items()},
        "kernels": [
            {"name": record.kernels[key].name, "arch": record.arch, "op": ops[_part(name, record.kernels[key].name)],
             "key": key, "bytes": None if each is None else each.summary.get("bytes"),
             "registers": None if each is None else each.summary.get("registers")}
            for key, each in sorted(kernels, key=place)
        ],
        "missing": [record.kernels[key].name for key in record.kernels if store.find_entry(key) is None],
    }  # fmt: skip


def _part(layer: str, kernel: str) -> str:
    return kernel.partition("@")[0].removeprefix(f"{layer}.")


def _op(record: LayerRecord, part: str, by_name: Mapping[str, NameRecord]) -> str:
    named = (by_name.get(record.kernels[key].name) for _, key in record.parts[part] if key is not None)
    return next((str(each.spec.get("op", "")) for each in named if each is not None), "")


def _pass(name: str, record: LayerRecord, which: str, ops: Mapping[str, str]) -> dict[str, Any]:
    inputs, outputs = record.arguments[which]
    added = record.passes[which].adds
    return {
        "inputs": _tensors(inputs),
        "outputs": [tensor | {"added_to": tensor["name"] in added} for tensor in _tensors(outputs)],
        "steps": [
            {"kernel": f"{name}.{step.part}", "op": ops[step.part], "reads": _named(step, False),
             "writes": _named(step, True)}
            for step in record.passes[which].steps
        ],
    }  # fmt: skip


def _named(step: LayerStep, written: bool) -> dict[str, str]:
    return {argument: name for argument, name in step.arguments.items() if (name in step.writes) == written}


def _tensors(buffers: Mapping[str, LayerBuffer]) -> list[dict[str, Any]]:
    return [
        {"name": name, "dtype": buffer.dtype, "shape": list(buffer.shape), "what": buffer.words}
        for name, buffer in buffers.items()
    ]


def _memory(record: LayerRecord, options: LayerOptions) -> dict[str, Any]:
    """Sizes in bytes, for the tokens of the spec."""
    from fusekit.abi.expr import evaluate

    limits: dict[str, int] = {}
    if record.limits:
        limits["capacity"] = evaluate(record.limits["capacity"], {"tokens": options.tokens})
        limits["rows"] = evaluate(record.limits["rows"], limits)
    dims = record.environment(options.tokens, **limits)
    places, kept = record.kept(dims)
    fp8 = record.arguments[QUANTISE][1].values() if QUANTISE in record.passes else ()
    return {
        "tokens": options.tokens,
        "kept": kept,
        "kept_buffers": {name: record.buffers[name].bytes(dims) for name in places},
        "scratch": {
            which: record.most_scratch(which, options.tokens, limits=limits)
            for which in PASSES
            if which in record.passes and which != QUANTISE
        },
        "fp8_weights": sum(buffer.bytes(dims) for buffer in fp8),
        "windows": {name: evaluate(size, dims) for name, size in record.windows.items()},
    }


def text(session: Session, document: Mapping[str, Any]) -> None:
    """Print the document for people."""
    archs = ", ".join(dict.fromkeys(kernel["arch"] for kernel in document["kernels"]))
    count = len(document["kernels"])
    click.echo(f"{document['name']}: a layer ({document['kind']}) of {output.plural(count, 'kernel')} for {archs}")
    click.echo("options")
    output.tree(document["options"], "  ")
    trained = bool(document["passes"]["backward"]["steps"])
    for which, steps in document["passes"].items():
        if not trained and which != "inference":
            continue
        click.echo(f"\n{which}")
        rows = [
            (tensor["name"], "inout" if tensor.get("added_to") else role, tensor["dtype"], _shape(tensor["shape"]),
             tensor["what"])
            for role in ("input", "output")
            for tensor in steps[f"{role}s"]
        ]  # fmt: skip
        output.table(session, ("ARGUMENT", "ROLE", "DTYPE", "SHAPE", "WHAT"), rows, prose=("WHAT",))
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
    click.echo(f"\nladders from {_source(document['tuning'])}")
    for part, rungs in document["ladders"].items():
        if len(rungs) > 1:
            _show_ladder(part, rungs)
    for device, parts in document["devices"].items():
        click.echo(f"on {device}, as it was measured there:")
        for part, rungs in parts.items():
            _show_ladder(part, rungs)
    if document["missing"]:
        click.echo(f"not built: {', '.join(document['missing'])}")


def _ladders(record: LayerRecord, parts: Mapping[str, Ladder]) -> dict[str, list[dict[str, Any]]]:
    return {
        part: [{"tokens": most, "kernel": None if key is None else record.kernels[key].name} for most, key in ladder]
        for part, ladder in parts.items()
    }


def _show_ladder(part: str, rungs: Sequence[Mapping[str, Any]]) -> None:
    steps = (f"{'more' if rung['tokens'] is None else rung['tokens']}: {_variant(rung)}" for rung in rungs)
    click.echo(f"  {part}  up to {', '.join(steps)}")


def _source(tuning: Mapping[str, Any]) -> str:
    """Where the choice of variants comes from."""
    tables = [
        f"the {label} tuning table {table['sha256'][:12]} for {', '.join(table['parts'])}"
        for label, table in tuning.items()
    ]
    return ", ".join([*tables, "the model for others" if tables else "the model"])


def _variant(rung: Mapping[str, Any]) -> str:
    return "not launched" if rung["kernel"] is None else str(rung["kernel"]).partition("@")[2]


def _shape(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
