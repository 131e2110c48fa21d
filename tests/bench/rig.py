"""A stand-in GPU that computes what kernels of a store mean, with invented times; and stores of such kernels."""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusekit.abi import FloatParameter, IntegerParameter, LaunchRecord, PointerParameter, evaluate
from fusekit.compiler.identity import roots_of
from fusekit.compiler.layers import Layer, layers_of, publish_layer
from fusekit.config import Config
from fusekit.reference import decode, encode, route
from fusekit.reference import gemm as reference_gemm
from fusekit.reference.permutation import index, unpermute
from fusekit.reference.steps import wide
from fusekit.spec import KernelSpec, parse_text
from fusekit.store import Entry, NameRecord, Store, key_of
from fusekit_cli.main import main
from tests.plan import layer_meaning
from tests.runtime.fake import OK, FakeDriver, Launched
from tests.runtime.samples import CUBIN

KINDS = {"i32": np.int32, "f32": np.float32, "u8": np.uint8}
PEER_MS = 5.0  # what PyTorch's work takes here
COPY_MS = 0.001


def record_of(spec: Any) -> LaunchRecord:
    """Arguments and dims of the real kernel; parameters that tell a stand-in all it needs."""
    real = import_module(roots_of(spec)[0]).signature(spec)
    parameters: list[Any] = []
    for tensor in real.tensors:
        parameters.append(PointerParameter(tensor.name, tensor.name, 8 * len(parameters)))
    for dim in real.dims:
        parameters.append(IntegerParameter(dim.name, "i64", dim.name, 8 * len(parameters)))
    for scalar in real.scalars:
        parameters.append(FloatParameter(scalar.name, scalar.name, 8 * len(parameters)))
    return LaunchRecord(
        symbol="kernel", arch=real.arch, arguments=real.arguments, dims=real.dims, parameters=tuple(parameters),
        grid=(1, 1, 1), block=(128, 1, 1), skip_if_zero=real.skip_if_zero,
    )  # fmt: skip


def bench(capsys: pytest.CaptureFixture[str], *arguments: str, seconds: str = "0.01") -> tuple[int, Any]:
    """Exit code and document of `fusekit bench`."""
    code = main(["bench", *arguments, "--seconds", seconds, "--json"])
    out, err = capsys.readouterr()
    assert out, err
    return code, json.loads(out)


class Rig(FakeDriver):
    """`cost`: milliseconds of a launch, from the kernel's full name. `harm` changes what was written, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[bytes, Any] = {}
        self.layers: list[Layer] = []
        self.records: dict[str, LaunchRecord] = {}  # by full name
        self.cost: Callable[[str], float] = lambda name: 2.0
        self.harm: Callable[[str, dict[str, Any]], None] = lambda name, arrays: None
        self._code: dict[str, bytes] = {}
        self._clock = 0.0
        self._at: dict[Any, float] = {}
        self._capture: list[float] | None = None
        self.timed = False  # then nothing is computed, which would take long
        self._graphs: dict[Any, float] = {}
        self.copies = 0

    def publish(self, root: Path, text: str, stem: str) -> Store:
        """The kernels of a spec's text in the store at `root`."""
        store = Store.open(Config(store=root))
        specs, keys = parse_text(text, stem, f"{stem}.toml"), {}
        for spec in specs:
            code = CUBIN + spec.full_name.encode()
            self.specs[code] = spec
            fields = {"arch": "sm_90a", "name": spec.full_name}
            keys[spec.full_name] = key_of(fields)
            digest = hashlib.sha256(code).hexdigest()
            launch_record = self.records[spec.full_name] = record_of(spec)
            store.publish(
                Entry(key_of(fields), fields, digest, len(code), launch_record.to_json(), {}, {}, {}, 1.0), code
            )
            canonical = json.loads(json.dumps(spec.canonical()))
            store.publish_name(NameRecord(spec.full_name, "sm_90a", key_of(fields), canonical, spec.defaults()))
        self.layers = layers_of((spec, keys[spec.full_name]) for spec in specs)
        self.build_layers(store)
        return store

    def build_layers(self, store: Store) -> None:
        """As a build does that compiles nothing."""
        for layer in self.layers:
            publish_layer(store, layer)

    # -- kernels of several kinds

    def cuLibraryLoadData(self, code: bytes, *options: Any) -> Any:  # noqa: N802
        status, handle = super().cuLibraryLoadData(code, *options)
        self._code[handle] = code
        return status, handle

    def cuLibraryGetKernel(self, library: Any, name: bytes) -> Any:  # noqa: N802
        return OK, library

    def parameters_of(self, symbol: str) -> list[tuple[int, int]]:
        record = self.records[self.specs[self._code[symbol]].full_name]
        return [(parameter.offset, parameter.size) for parameter in record.parameters]

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> Any:  # noqa: N802
        spec = self.specs[self._code[function[0]]]
        idle = self._capture is not None or self.timed
        self.on_launch = lambda launched: None if idle else self._compute(spec, launched)
        self._spend(self.cost(spec.full_name))
        return super().cuLaunchKernelEx(config, function, parameters, extra)

    def _compute(self, spec: Any, launched: Launched) -> None:
        launch_record = self.records[spec.full_name]
        raw = dict(zip([parameter.name for parameter in launch_record.parameters], launched.parameters, strict=True))
        dims = {dim.name: struct.unpack("<q", raw[dim.name])[0] for dim in launch_record.dims}
        arrays: dict[str, Any] = {}
        for tensor in launch_record.tensors:
            shape = tuple(evaluate(extent, dims) for extent in tensor.shape)
            kind = np.dtype(KINDS.get(tensor.dtype, np.uint16))
            memory = (ctypes.c_char * (int(np.prod(shape)) * kind.itemsize)).from_address(
                *struct.unpack("<Q", raw[tensor.name])
            )
            arrays[tensor.name] = np.frombuffer(memory, kind).reshape(shape)
        scalars = {scalar.name: struct.unpack("<f", raw[scalar.name][:4])[0] for scalar in launch_record.scalars}
        dtypes = {tensor.name: tensor.dtype for tensor in launch_record.tensors}
        for name, values in self._means(spec, arrays, scalars, dims).items():
            if name in arrays:
                arrays[name][: len(values)] = encode(values, dtypes[name]) if values.dtype.kind == "f" else values
        self.harm(spec.full_name, arrays)

    def _means(
        self, spec: Any, arrays: Mapping[str, Any], scalars: Mapping[str, float], dims: Mapping[str, int]
    ) -> Mapping[str, Any]:
        if spec.layer is not None:
            known = {**dims, "M": dims.get("M", dims.get("T", 0) * spec.layer.topk)}
            types = {tensor.name: tensor.dtype for tensor in self.records[spec.full_name].tensors}
            with np.errstate(all="ignore"):  # of memory that nothing has written yet
                given = {name: wide(array, types[name]) for name, array in arrays.items()}
                outputs = layer_meaning.OPERATIONS[spec.op](spec.canonical(), {**given, **scalars}, known)
            return {name: values for name, values in outputs.items() if values is not None}
        if isinstance(spec, KernelSpec):
            given = {name: value for name, value in scalars.items() if name == "alpha"}
            return reference_gemm(spec, {**arrays, **given})
        if spec.op == "moe-index":
            return index(arrays["indices"], spec.experts)
        if spec.op == "moe-permute":
            token, choice = np.nonzero(arrays["inverse"] >= 0)
            row = arrays["inverse"][token, choice]
            arrays["y"][row] = arrays["x"][token]
            arrays["row_scale"][row] = arrays["weights"][token, choice]
            return {}
        if spec.op == "moe-unpermute":
            x = decode(arrays["x"], spec.dtype).astype(np.float64)
            return {"y": unpermute(x, arrays["inverse"], arrays.get("weights"))[0]}
        return route(spec, arrays)

    # -- time

    def _spend(self, ms: float) -> None:
        if self._capture is None:
            self._clock += ms
        else:
            self._capture.append(ms)

    def peer(self) -> None:
        """PyTorch did something."""
        self._spend(PEER_MS)

    def cuEventRecord(self, event: int, stream: int) -> Any:  # noqa: N802
        self._at[event] = self._clock
        self.timed = True
        return (OK,)

    def cuStreamSynchronize(self, stream: int) -> Any:  # noqa: N802
        self.timed = False
        return (OK,)

    def cuEventElapsedTime(self, start: int, end: int) -> Any:  # noqa: N802
        return OK, self._at[end] - self._at[start]

    def cuMemcpyDtoDAsync(self, target: int, source: int, count: int, stream: int) -> Any:  # noqa: N802
        self.copies += 1
        self._spend(COPY_MS)
        return super().cuMemcpyDtoDAsync(target, source, count, stream)

    # -- graphs

    def cuStreamBeginCapture(self, stream: int, mode: str) -> Any:  # noqa: N802
        self._capture = []
        return (OK,)

    def cuStreamEndCapture(self, stream: int) -> Any:  # noqa: N802
        graph = ("graph", next(self._numbers))
        self._graphs[graph], self._capture = sum(self._capture or []), None
        return OK, graph

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:  # noqa: N802
        executable = ("exec", next(self._numbers))
        self._graphs[executable] = self._graphs[graph]
        return OK, executable

    def cuGraphLaunch(self, graph: Any, stream: int) -> Any:  # noqa: N802
        self._clock += self._graphs[graph]
        return (OK,)

    def cuGraphDestroy(self, graph: Any) -> Any:  # noqa: N802
        del self._graphs[graph]
        return (OK,)

    def cuGraphExecDestroy(self, graph: Any) -> Any:  # noqa: N802
        del self._graphs[graph]
        return (OK,)
