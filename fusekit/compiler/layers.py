"""The records of layers, which a build publishes once it has all kernels of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import fusekit
from fusekit.abi.layer_record import Ladder, LayerKernel, LayerRecord
from fusekit.choice import tuning
from fusekit.choice.gpus import gpu_of
from fusekit.choice.tuning import Tuning
from fusekit.choice.variants import check_alike, check_name, fastest
from fusekit.compiler.digests import digest
from fusekit.compiler.naming import record_of
from fusekit.errors import FusekitError
from fusekit.plan.layer import Options, program
from fusekit.plan.layer.program import Program
from fusekit.plan.layer.record import ladder_of, prove, unproved, within
from fusekit.plan.operations import OPERATIONS
from fusekit.store import Entry, NameRecord, Store, key_of
from fusekit.store.entries import KIND, LAYER
from fusekit.store.files import quietly
from fusekit.store.keys import canonical_json, sha256
from fusekit.store.names import layer_record

if TYPE_CHECKING:
    from fusekit.spec import Spec

_FOLDER = Path(fusekit.__file__).parent
_MADE_BY = ("abi/layer_*.py", "choice/*.py", "exchange/layout.py", "plan/exchange.py", "plan/layer/*.py")


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer's record is made of. kernels: names of all variants of its parts. summary: for people."""

    options: Options
    arch: str
    kernels: tuple[NameRecord, ...]
    summary: str = ""

    @property
    def name(self) -> str:
        return f"{self.options.file}/{self.options.name}"


def publish_layer(store: Store, layer: Layer, *, named: bool = True) -> NameRecord | None:
    """Publishes the record of `layer`, and with `named` its name, which is returned; None if it is there already, or a
    kernel is missing.

    Raises FusekitError where the record does not launch what the layer's program does.
    """
    parts = {part: _variants(store, layer, part) for part in program(layer.options).parts}
    if not all(parts.values()):
        return None
    tables = list[tuple[str, Tuning]]()
    for path, data in store.tuning_tables(layer.arch):
        with suppress(FusekitError):  # as `load` does
            tables.append(("store", Tuning.from_bytes(data, path, layer.arch)))
    tables.append(("packaged", tuning.packaged(layer.arch)))
    kernels = [
        [each.name, each.key, {name: str(value) for name, value in each.defaults.items()}]
        for variants in parts.values()
        for each in variants
    ]
    inputs = [layer.options.canonical(), layer.summary, kernels, [sha256(table.to_bytes()) for _, table in tables]]
    inputs_digest = sha256(canonical_json({"inputs": inputs, "sources": _sources()}, layer.name).encode())
    name = layer_record(layer.name)
    before = quietly(store.find_name, name, layer.arch)
    if before is not None and before.spec.get("inputs") == inputs_digest and store.present(before.key) is not None:
        return None
    record, entries = _record(store, layer, parts, tables)
    document = record.to_bytes()
    fields = {KIND: LAYER, "arch": layer.arch, "name": layer.name, "document": sha256(document)}
    formats = [each.resources.get("cubin_format") for each in entries]
    entry = Entry(
        key=key_of(fields), fields=fields, cubin_sha256=sha256(document), cubin_bytes=len(document),
        launch={"arch": layer.arch, "kernels": sorted(record.kernels)},
        resources={"cubin_format": max(filter(None, formats), default=None)}, proof={},
        toolchain=entries[0].toolchain, seconds=0.0,
    )  # fmt: skip
    entry = store.publish(entry, document)
    spec = {
        "op": LAYER, "file": layer.options.file, "kernel": layer.options.name, "arch": layer.arch,
        "options": layer.options.canonical(), "inputs": inputs_digest,
    }  # fmt: skip
    name_record = NameRecord(name, layer.arch, entry.key, spec, {})
    if named:
        store.publish_name(name_record, entry)
    return name_record


def _variants(store: Store, layer: Layer, part: str) -> list[NameRecord]:
    """The variants of a part: those that were built, else those of the store."""
    kernel = f"{layer.name}.{part}"
    built = [each for each in layer.kernels if each.name.partition("@")[0] == kernel]
    return sorted(built, key=lambda each: each.name) or store.variants(kernel, layer.arch)


def _record(
    store: Store, layer: Layer, parts: Mapping[str, Sequence[NameRecord]], tables: Sequence[tuple[str, Tuning]]
) -> tuple[LayerRecord, list[Entry]]:
    """The record, and the entries of its kernels."""
    options, chosen, measured = layer.options, dict[str, NameRecord](), dict[str, set[str]]()
    plan = program(options)
    merged = Tuning(layer.arch, tuple(row for _, table in tables for row in table.rows))
    for variants in parts.values():
        for each in variants:
            check_name(each)
        check_alike(variants)

    @cache
    def choose(part: str, tokens: int, device: str | None = None) -> str:
        variants, keys = parts[part], plan.parts[part]
        problem = {"T": tokens}
        if (operation := OPERATIONS[keys["op"]]).gemm:
            dims = plan.typical(tokens)
            problem = {**keys["problem"], "M": dims["M"] if operation.ragged else tokens}
        record, why = variants[0], ""
        if len(variants) > 1:
            record, why = fastest(variants, problem, merged, device, gpu_of(device or ""))
        if why == "the fastest that was measured":
            label = next(label for label, table in tables if table.best(record.spec, problem, device))
            measured.setdefault(label, set()).add(part)
        chosen.setdefault(record.key, record)
        return record.key

    draft = unproved(options, layer.arch, choose, layer.summary, plan)
    devices = {} if draft.windows else _by_device(plan, draft, {row.device for row in merged.rows}, choose)
    draft = replace(draft, devices=devices)
    used = sorted({key for ladder in draft.ladders for _, key in ladder if key is not None})
    entries = [entry for key in used if (entry := store.find_entry(key)) is not None]
    kernels = {
        entry.key: LayerKernel(chosen[entry.key].name, entry.launch_sha256, chosen[entry.key].defaults)
        for entry in entries
    }
    spoke = {
        label: {"sha256": sha256(table.to_bytes()), "parts": sorted(measured[label])}
        for label, table in tables
        if label in measured
    }
    record = replace(draft, kernels=kernels, tuning=spoke)
    prove(record, plan, options)
    return record, entries


def _by_device(
    plan: Program, draft: LayerRecord, devices: Iterable[str], choose: Callable[..., str]
) -> dict[str, dict[str, Ladder]]:
    """The ladders that are others on a device that was measured; of no part whose variant decides bits."""
    others: dict[str, dict[str, Ladder]] = {}
    for device in sorted(devices):
        parts = {
            part: own
            for part, ladder in draft.parts.items()
            if part not in draft.promises["pinned"]
            and (own := ladder_of(part, within(plan, partial(choose, device=device)))) != ladder
        }
        if parts:
            others[device] = parts
    return others


def layers_of(records: Iterable[tuple[Spec, str]]) -> list[Layer]:
    """The layers whose kernels are among `records`: (spec, key)."""
    groups: dict[tuple[str, str], tuple[Options, str, list[NameRecord]]] = {}
    for spec, key in records:
        if (options := getattr(spec, "layer", None)) is not None:
            group = groups.setdefault((f"{options.file}/{options.name}", spec.arch), (options, spec.summary, []))
            group[2].append(record_of(key, spec))
    return [Layer(options, arch, tuple(names), summary) for (_, arch), (options, summary, names) in groups.items()]


@cache
def _sources() -> str:
    """Digest of what makes a record."""
    paths = sorted({path for pattern in _MADE_BY for path in _FOLDER.glob(pattern)})
    return sha256(" ".join(digest(str(path)) for path in paths).encode())
