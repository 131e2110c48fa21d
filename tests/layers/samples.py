"""A store with a layer whose kernels only take pointers: what a launch was given can be read back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusekit.abi import Dim, LaunchRecord, PeersArgument, PointerParameter, ScalarArgument, TensorArgument, tensors_of
from fusekit.compiler.layers import Layer, publish_layer
from fusekit.config import Config
from fusekit.library import Library
from fusekit.plan.layer import Options, program
from fusekit.plan.operands.saved_preactivation import DZ, Z
from fusekit.plan.operations import OPERATIONS
from fusekit.runtime import Driver
from fusekit.store import Entry, NameRecord, Store, key_of
from tests.cubins import cubin_of
from tests.runtime.fake import FakeDriver

_PUBLISHED: dict[str, tuple[Entry, bytes, NameRecord]] = {}


def records(options: Options) -> dict[str, LaunchRecord]:
    """For each part a kernel `part` that takes the addresses of its arguments, in the order of their names."""
    layer_program = program(options)
    got = {}
    for steps in layer_program.steps.values():
        for step in steps:
            names = {**step.reads, **step.writes}
            names = {name: buffer for name, buffer in names.items() if not name.startswith("window.")}
            arguments, dims = [], {}
            for name, buffer in sorted(names.items()):
                each = layer_program.buffers[buffer]
                over = Z if name == DZ else ""
                shape = tuple(f"{over or name}{index}" for index, _ in enumerate(each.shape))
                dims.update((dim, Dim(dim)) for dim in shape)
                strides = (*(f"{name}.stride{index}" for index in range(len(shape) - 1)), 1)
                role = "output" if name in step.writes else "input"
                arguments.append(TensorArgument(name, role, each.dtype, shape, strides, in_place_of=over))
            if step.window:
                arguments.append(PeersArgument("window", options.ranks, 1, 128))
            pointers = tensors_of(arguments)
            parameters = [
                PointerParameter(each.name.replace(".", "_"), each.name, 8 * index)
                for index, each in enumerate(pointers)
            ]
            if step.window:
                arguments += [ScalarArgument(each, "i32", None) for each in ("rank", "capacity", "timeout")]
            op = layer_program.parts[step.part]["op"]
            gemm = op in OPERATIONS and OPERATIONS[op].gemm
            blocks = ("max", 1, ("sub", "sm_count", "cluster_margin")) if gemm else 1
            got[step.part] = LaunchRecord(
                symbol=step.part.replace("-", "_"), arch="sm_90a", arguments=tuple(arguments),
                dims=tuple(dims.values()), parameters=tuple(parameters), grid=(blocks, 1, 1), block=(128, 1, 1),
            )  # fmt: skip
    return got


def _publish(store: Store, options: Options, launches: list[LaunchRecord]) -> None:
    """The layer's record, which is made once in a process for these kernels."""
    table = json.dumps([options.canonical(), [each.to_json() for each in launches]])
    if table in _PUBLISHED:
        entry, document, record = _PUBLISHED[table]
        store.publish(entry, document)
        store.publish_name(record, entry)
        return
    record_name = publish_layer(store, Layer(options, "sm_90a", ()))
    assert record_name is not None
    stored = store.load(record_name.key)
    assert stored is not None
    _PUBLISHED[table] = (*stored, record_name)


def library(root: Path, options: Options, variants: int = 1) -> tuple[Library, FakeDriver]:
    """A library whose store at `root` holds the layer, on a fake driver. variants: of each kernel."""
    store = Store.open(Config(store=root))
    layer_records = records(options)
    layer_records = {
        (part, number): replace(record, symbol=f"{record.symbol}{f'_{number}' if number else ''}")
        for part, record in layer_records.items()
        for number in range(variants)
    }
    launches = {step.symbol: step for record in layer_records.values() for step in record.launches}
    cubin = cubin_of(*launches)
    for (part, number), record in layer_records.items():
        fields = {"arch": record.arch, "spec": f"{part}{number or ''}"}
        entry = Entry(
            key=key_of(fields), fields=fields, cubin_sha256=hashlib.sha256(cubin).hexdigest(), cubin_bytes=len(cubin),
            launch=record.to_json(), resources={}, proof={}, toolchain={}, seconds=1.0,
        )  # fmt: skip
        store.publish(entry, cubin)
        op = program(options).parts[part]["op"]
        spec: dict[str, Any] = {"op": op, "layer": {"name": f"{options.file}/{options.name}", "topk": options.topk}}
        gemm = OPERATIONS[op].gemm if op in OPERATIONS else False
        columns, warps = 128 + 32 * number, 8 << number
        spec |= {"tile": [128, columns], "cluster": [1, 1]} if gemm else {"warps": warps}
        name = f"{options.file}/{options.name}.{part}@{f'128x{columns}-c1x1' if gemm else f'w{warps}'}"
        defaults = {scalar.name: 1.0 for scalar in record.scalars if scalar.dtype == "f32"}
        store.publish_name(NameRecord(name, record.arch, entry.key, spec, defaults))
    _publish(store, options, [*layer_records.values()])
    kernels = {symbol: [(each.offset, each.size) for each in step.parameters] for symbol, step in launches.items()}
    fake = FakeDriver(symbol="", others=kernels)
    return Library(store, Driver(fake)), fake
