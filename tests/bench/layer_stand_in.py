"""A layer whose kernels are their formulas, on the memory of a GPU that is made up."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np

from fusekit.dtypes import DTYPES
from fusekit.layers import Layer
from fusekit.plan.layer import Options, program
from fusekit.reference import codes, decode, encode, held
from fusekit.store import NameRecord, Store
from tests.bench.rig import Rig
from tests.plan import layer_meaning
from tests.store.samples import build_entry

MS = 0.5  # of every launch


def publish(root: Path, options: Options) -> str:
    """The names of a layer's kernels in the store at `root`, standing for kernels that cannot be launched; its name."""
    store, name = Store(root), f"{options.file}/{options.name}"
    for seed, (part, keys) in enumerate(program(options).parts.items()):
        entry, cubin = build_entry(seed)
        store.publish(entry, cubin)
        spec = json.loads(json.dumps({"op": keys["op"], "layer": options.canonical()}))
        store.publish_name(NameRecord(f"{name}.{part}@one", "sm_90a", entry.key, spec, {}))
    return name


class Formula:
    """A kernel. wrong: changes what it made, by the names of its outputs."""

    def __init__(self, rig: Rig, keys: Any, part: str, dims: Any, wrong: Any) -> None:
        self.rig, self.keys, self.part, self.dims, self.wrong = rig, keys, part, dims, wrong

    def bind(self, **tensors: Any) -> Any:
        def launch(stream: int) -> None:
            self.rig._spend(MS)
            if self.rig._capture is None and not self.rig.timed:
                self._compute(tensors)

        return launch

    def _compute(self, tensors: Any) -> None:
        arrays = {name: memory(tensor) for name, tensor in tensors.items()}
        with np.errstate(invalid="ignore"):
            given = {name: numbers(array, tensors[name].dtype) for name, array in arrays.items()}
        made = layer_meaning.OPERATIONS[self.keys["op"]](self.keys, given, self.dims)
        self.wrong(self.part, made)
        with np.errstate(invalid="ignore"):  # what no kernel reads may be anything
            self._write(arrays, given, tensors, made)

    def _write(self, arrays: Any, given: Any, tensors: Any, made: Any) -> None:
        for name, values in made.items():
            if name not in arrays or values is None:
                continue
            if self.keys.get("accumulate") and name in ("dw", "dbias"):
                values = values + given[name]
            dtype = tensors[name].dtype
            if dtype == "e4m3":
                arrays[name][...] = codes.encode(values, dtype)
                continue
            arrays[name][...] = encode(values, dtype) if dtype in ("bf16", "fp16") else values.astype(held(dtype))


def numbers(array: Any, dtype: str) -> Any:
    """What the elements of a tensor in memory are worth."""
    if dtype == "e4m3":
        return codes.decode(array, dtype).astype(np.float64)
    return decode(array, dtype).astype(np.float64) if array.dtype == np.uint16 else array


def memory(tensor: Any) -> Any:
    """A tensor's memory, as NumPy holds it."""
    size = int(np.prod(tensor.shape)) * DTYPES[tensor.dtype].bytes
    return np.frombuffer((ctypes.c_char * size).from_address(tensor.data_ptr()), held(tensor.dtype)).reshape(
        tensor.shape
    )


class StandIn(Layer):
    """The layer `name` of a store that `publish` filled."""

    def __init__(self, rig: Rig, wrong: Any, *given: Any) -> None:
        super().__init__(*given)
        self._rig, self._wrong = rig, wrong

    def _kernel(self, part: str, dims: Any) -> Any:
        return Formula(self._rig, self.program.parts[part], part, dims, self._wrong)


def install(monkeypatch: Any, rig: Rig, wrong: Any = lambda part, made: None) -> None:
    """Layers of every library are stand-ins from now on."""
    monkeypatch.setattr(
        "fusekit.runtime.library.Library.layer",
        lambda library, name, arch=None, device=None: StandIn(rig, wrong, library, name, arch, device),
    )
