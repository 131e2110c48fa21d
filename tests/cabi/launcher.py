"""Exported C, compiled into a shared object and called through ctypes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusekit.abi import LaunchRecord, PeersArgument, TensorArgument
from fusekit.abi.record import Parameter
from fusekit.cabi import Exported, generate
from fusekit.cabi.identifiers import kernel_identifiers, members
from tests.cubins import cubin_of

from .recorder import Recorder

WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wno-sign-conversion")
LANGUAGES = {"c11": ("gcc", "-std=c11"), "c++17": ("g++", "-x", "c++", "-std=c++17")}
(
    OK, INVALID_ARGUMENT, NO_DRIVER, WRONG_ARCH, MISMATCH, OUT_OF_MEMORY, CUDA_ERROR, FILE_ERROR, BAD_BUNDLE, NOT_FOUND,
) = range(10)  # fmt: skip
CUBIN = cubin_of("kernel", *(f"kernel_{number}" for number in range(1, 17))) + bytes(range(200)) + b"odd"


class Error(ctypes.Structure):
    _fields_ = (("status", c_int), ("cuda", c_int), ("text", c_char * 320))

    def __str__(self) -> str:
        return self.text.decode()


def compile_shared(
    folder: Path, kernels: Sequence[Exported], prefix: str = "fusekit", language: str = "c11",
    options: Sequence[str] = ("-O1",),
) -> Path:  # fmt: skip
    """The shared object of an export; skips where there is no compiler."""
    return build(folder, generate(kernels, prefix), prefix, language, options)


FLAGS = "FUSEKIT_TEST_C_FLAGS"
"""Variable with more options of the compiler, such as those of sanitizers."""


def build(
    folder: Path, texts: Mapping[str, str], prefix: str, language: str = "c11", options: Sequence[str] = ("-O1",)
) -> Path:
    """The shared object of ``<prefix>.c`` and its header."""
    compiler, *standard = LANGUAGES[language]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    for name, text in texts.items():
        (folder / name).write_text(text)
    shared = folder / f"{prefix}-{language}.so"
    command = [
        compiler, *standard, *WARNINGS, *options, *os.environ.get(FLAGS, "").split(), "-fPIC", "-shared",
        "-o", shared, folder / f"{prefix}.c", "-ldl",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return shared


def complete(record: LaunchRecord, symbol: str = "kernel") -> LaunchRecord:
    """`record` with symbols and offsets as a compiler would lay the parameters out."""
    then = (
        replace(step, parameters=placed(step.parameters), symbol=f"{symbol}_{index}")
        for index, step in enumerate(record.then, start=1)
    )
    return replace(record, parameters=placed(record.parameters), symbol=symbol, then=tuple(then))


def placed(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    end, result = 0, []
    for parameter in parameters:
        alignment = 64 if parameter.size == 128 else parameter.alignment
        end = -(-end // alignment) * alignment
        result.append(replace(parameter, offset=end))
        end += parameter.size
    return tuple(result)


class Launcher:
    """The functions of one exported kernel over a `Recorder`."""

    def __init__(
        self, shared: Path, kernels: Sequence[Exported], index: int = 0, prefix: str = "fusekit",
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.record = kernels[index].record
        self.recorder = Recorder(self.record) if recorder is None else recorder
        self.error = Error()
        self._library = ctypes.CDLL(str(shared))
        self._prefix = prefix
        self._name = f"{prefix}_{kernel_identifiers([kernel.name for kernel in kernels])[index]}"
        self._members = members((dim.name for dim in self.record.dims), (item.name for item in self.record.arguments))
        self.arguments_type = type("Arguments", (ctypes.Structure,), {"_fields_": self._fields()})
        self.driver, self.kernel = c_void_p(), c_void_p()

    def _fields(self) -> list[tuple[str, Any]]:
        fields: list[tuple[str, Any]] = [(self._members[f"dim {dim.name}"], c_int64) for dim in self.record.dims]
        for argument in self.record.arguments:
            member = self._members[argument.name]
            if isinstance(argument, TensorArgument):
                free = [index for index in range(argument.rank) if argument.reads_stride(index)]
                fields += [(member, c_void_p), *((f"{member}_stride{index}", c_int64) for index in free)]
            elif isinstance(argument, PeersArgument):
                fields.append((member, c_void_p * argument.count))
            else:
                kinds = {"f64": c_double, "i32": c_int32, "i64": c_int64}
                fields.append((member, kinds.get(argument.dtype, c_float)))
        return [*fields, ("cluster_margin", c_int32), ("has_priority", c_int32), ("priority", c_int32)]

    def function(self, name: str, *types: Any, result: Any = c_int, own: bool = True) -> Any:
        actual = getattr(self._library, f"{self._name if own else self._prefix}_{name}")
        actual.argtypes, actual.restype = types, result
        return actual

    def open(self) -> int:
        types = type(self.recorder.lookup), c_void_p, POINTER(c_void_p), POINTER(Error)
        opened = self.function("driver_open_with", *types, own=False)
        status: int = opened(self.recorder.lookup, None, byref(self.driver), byref(self.error))
        return status

    def load(self, device: int = 0) -> int:
        status = self.open()
        if status != OK:
            return status
        loaded = self.function("load", c_void_p, c_int, POINTER(c_void_p), POINTER(Error))
        result: int = loaded(self.driver, device, byref(self.kernel), byref(self.error))
        return result

    def defaults(self) -> Any:
        return self.function("defaults", result=self.arguments_type)()

    def arguments(self, values: Mapping[str, int], floats: Mapping[str, float], **extra: int) -> Any:
        """The structure for an argument set of the proof: `values` by the names that expressions use."""
        args = self.defaults()
        for dim in self.record.dims:
            setattr(args, self._members[f"dim {dim.name}"], values[dim.name])
        for argument in self.record.arguments:
            member = self._members[argument.name]
            if isinstance(argument, TensorArgument):
                setattr(args, member, values[f"{argument.name}.address"])
                for index in range(argument.rank):
                    if argument.reads_stride(index):
                        setattr(args, f"{member}_stride{index}", values[argument.stride_variable(index)])
            elif isinstance(argument, PeersArgument):
                windows = (values[f"{tensor.name}.address"] for tensor in argument.tensors)
                setattr(args, member, (c_void_p * argument.count)(*windows))
            elif argument.name in floats:
                setattr(args, member, floats[argument.name])
            elif argument.name in values:
                setattr(args, member, values[argument.name])
        args.cluster_margin = values.get("cluster_margin", 0)
        for name, value in extra.items():
            setattr(args, name, value)
        return args

    def launch(self, args: Any, stream: int = 0, kernel: Any = None) -> int:
        types = c_void_p, POINTER(self.arguments_type), c_void_p, POINTER(Error)
        handle = self.kernel if kernel is None else kernel
        status: int = self.function("launch", *types)(handle, byref(args), stream, byref(self.error))
        return status

    def bind(self, args: Any) -> tuple[int, c_void_p]:
        types = c_void_p, POINTER(self.arguments_type), POINTER(c_void_p), POINTER(Error)
        bound = c_void_p()
        status: int = self.function("bind", *types)(self.kernel, byref(args), byref(bound), byref(self.error))
        return status, bound

    def run(self, bound: c_void_p, stream: int) -> int:
        types = c_void_p, c_void_p, POINTER(Error)
        status: int = self.function("launch_run", *types, own=False)(bound, stream, byref(self.error))
        return status

    def free(self, bound: c_void_p) -> None:
        self.function("launch_free", c_void_p, result=None, own=False)(bound)

    def unload(self) -> int:
        status: int = self.function("unload", c_void_p, POINTER(Error))(self.kernel, byref(self.error))
        self.function("driver_close", c_void_p, result=None, own=False)(self.driver)
        return status
