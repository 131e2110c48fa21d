"""Layers as exported C, called through ctypes over a stand-in driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_int, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fusekit.abi import LaunchRecord
from fusekit.abi.layer_record import LayerKernel, LayerRecord
from fusekit.cabi import Exported, ExportedLayer
from fusekit.cabi.identifiers import kernel_identifiers
from fusekit.layers import Layer
from fusekit.library import Library
from fusekit.plan.layer import Options
from fusekit.plan.layer.record import unproved

from .launcher import OK, Error
from .recorder import Recorder


class Memory(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("bytes", c_size_t))


class Settings(ctypes.Structure):
    _fields_ = (("has_cluster_margin", c_int32), ("cluster_margin", c_int32), ("in_place", c_int32))


class Sizes(ctypes.Structure):
    _fields_ = (("kept", c_size_t), ("forward", c_size_t), ("inference", c_size_t), ("backward", c_size_t))


class Window(ctypes.Structure):
    _fields_ = (("addresses", POINTER(c_void_p)), ("bytes", c_size_t))


class Ranks(ctypes.Structure):
    _fields_ = (
        ("windows", POINTER(Window)), ("rank", c_int32), ("timeout", c_int32), ("capacity", c_int64),
        ("rows", c_int64), ("checked", Memory), ("side_stream", c_void_p), ("events", c_void_p * 2),
    )  # fmt: skip


def exported(library: Library, layer: Any) -> tuple[ExportedLayer, list[Exported]]:
    """A layer of `library` and its kernels."""
    kernels = []
    for key, kernel in sorted(layer.record.kernels.items(), key=lambda each: each[1].name):
        entry, cubin = library.store.load(key)
        kernels.append(Exported(kernel.name, LaunchRecord.from_json(dict(entry.launch)), cubin, dict(kernel.defaults)))
    return ExportedLayer(layer.record, {key: kernel.name for key, kernel in layer.record.kernels.items()}), kernels


def with_ladders(library: Library, layer: Any, choose: Callable[[str, int], str]) -> Any:
    """The layer, with ladders by `choose`, which gives the full name of a part's kernel for so many tokens."""
    return Layer(library, ladder_record(library, layer, choose))


def ladder_record(library: Library, layer: Any, choose: Callable[[str, int], str]) -> LayerRecord:
    """Its record."""
    names = {listed.record.name: listed.record for listed in library.store.names(layer.name)}
    table = Options(**layer.options.canonical())
    record = unproved(table, "sm_90a", lambda part, tokens: names[choose(part, tokens)].key)
    used = {key for ladder in record.ladders for _, key in ladder if key is not None}
    launches = {key: library.store.find_entry(key).launch_sha256 for key in used}
    kernels = {
        each.key: LayerKernel(name, launches[each.key], each.defaults)
        for name, each in names.items()
        if each.key in used
    }
    return replace(record, kernels=kernels)


class CLayer:
    """The functions of one exported layer over a `Recorder`."""

    def __init__(
        self, shared: Path, layer: ExportedLayer, kernels: list[Exported], names: list[str], prefix: str = "demo",
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.record: LayerRecord = layer.record
        self._library, self._prefix = ctypes.CDLL(str(shared)), prefix
        self._name = f"{prefix}_{kernel_identifiers(names)[names.index(layer.record.name)]}"
        launches = [step for kernel in kernels for step in kernel.record.launches]
        self.symbols = [step.symbol for step in launches]
        self.recorder = recorder or Recorder(SimpleNamespace(launches=launches))
        self.error, self.driver, self.layer = Error(), c_void_p(), c_void_p()
        self.types = {which: self._type(which) for which, each in self.record.passes.items() if each.steps}

    def _type(self, which: str) -> Any:
        each = self.record.passes[which]
        fields: list[tuple[str, Any]] = [] if which == "quantise" else [("tokens", c_int64)]
        for name in (*each.inputs, *each.outputs):
            fields.append((name, c_void_p))
            if len(self.record.buffers[name].shape) > 1 and which != "quantise":
                fields.append((f"{name}_stride0", c_int64))
        fields += [("kept", Memory)] if which in ("forward", "backward") else []
        fields += [("scratch", Memory)] if which != "quantise" else []
        fields += [("ranks", c_void_p)] if self.record.windows and which != "quantise" else []
        return type(which, (ctypes.Structure,), {"_fields_": [*fields, ("settings", Settings)]})

    def function(self, name: str, *types: Any, result: Any = c_int, own: bool = True) -> Any:
        actual = getattr(self._library, f"{self._name if own else self._prefix}_{name}")
        actual.argtypes, actual.restype = types, result
        return actual

    def load(self) -> int:
        types = type(self.recorder.lookup), c_void_p, POINTER(c_void_p), POINTER(Error)
        opened = self.function("driver_open_with", *types, own=False)
        status: int = opened(self.recorder.lookup, None, byref(self.driver), byref(self.error))
        assert status == OK
        loaded = self.function("load", c_void_p, c_int, POINTER(c_void_p), POINTER(Error))
        result: int = loaded(self.driver, 0, byref(self.layer), byref(self.error))
        return result

    def arguments(
        self, which: str, tokens: int, given: Mapping[str, Any], kept: Any, scratch: Any, **settings: int
    ) -> Any:
        """The structure for tensors with an address, a shape and strides."""
        args = self.types[which]()
        if which != "quantise":
            args.tokens = tokens
            args.scratch = Memory(scratch.address, scratch.shape[0])
        for name, tensor in given.items():
            setattr(args, name, tensor.address)
            if tensor.strides is not None and len(tensor.shape) > 1:
                setattr(args, f"{name}_stride0", tensor.strides[0])
        if which in ("forward", "backward"):
            args.kept = Memory(kept.address, kept.shape[0])
        margin = settings.pop("cluster_margin", None)
        args.settings = Settings(margin is not None, margin or 0, settings.pop("in_place", 0))
        return args

    def run(self, which: str, args: Any, stream: int = 0, layer: Any = None) -> int:
        call = self.function(which, c_void_p, POINTER(self.types[which]), c_void_p, POINTER(Error))
        status: int = call(self.layer if layer is None else layer, byref(args), stream, byref(self.error))
        return status

    def bind(self, which: str, args: Any) -> tuple[int, c_void_p]:
        types = c_void_p, POINTER(self.types[which]), POINTER(c_void_p), POINTER(Error)
        bound = c_void_p()
        return self.function(f"bind_{which}", *types)(self.layer, byref(args), byref(bound), byref(self.error)), bound

    def run_bound(self, bound: c_void_p, stream: int) -> int:
        call = self.function("pass_run", c_void_p, c_void_p, POINTER(Error), own=False)
        status: int = call(bound, stream, byref(self.error))
        return status

    def free(self, bound: c_void_p) -> None:
        self.function("pass_free", c_void_p, result=None, own=False)(bound)

    def sizes(self, tokens: int, like: Any = None, ranks: Ranks | None = None) -> Sizes:
        sizes = Sizes()
        types = c_int64, c_void_p, POINTER(Sizes), POINTER(Error)
        over = () if ranks is None else (POINTER(Ranks),)
        reference = None if like is None else byref(like)
        given = (tokens, reference, byref(sizes), byref(self.error))
        status = self.function("sizes", c_void_p, *over, *types)(
            self.layer, *(byref(each) for each in (ranks,) if each), *given
        )
        assert status == OK, str(self.error)
        return sizes

    def unload(self) -> int:
        status: int = self.function("unload", c_void_p, POINTER(Error))(self.layer, byref(self.error))
        self.function("driver_close", c_void_p, result=None, own=False)(self.driver)
        return status
