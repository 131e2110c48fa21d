"""What is in the IR of a compilation: the kernels' cubin, and host code that a proof can run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusekit.compiler import dsl
from fusekit.errors import BuildError

_CUBIN = "kernels_binary"
# A fat binary: magic, version, size of its head; of the first image: kind, size of its head, size.
_FATBIN, _IMAGE = struct.Struct("<IHH8x"), struct.Struct("<H2xIQ")
_MAGIC, _ELF = 0xBA55ED50, 2
# What is in a module for tvm-ffi besides: it calls the host function, and a proof calls that itself.
_OF_TVM_FFI = ("__tvm_ffi_", "TVMFFI", "CuteDSLRT_TVMFFI", "cuda_dialect_", "__dtor_cuda_dialect_")


@contextlib.contextmanager
def module_of(ir: bytes) -> Iterator[Any]:
    """The host code, in MLIR's LLVM dialect. ir: MLIR bytecode, compressed."""
    mlir = dsl.ir()
    context = mlir.Context()
    context.enable_multithreading(False)
    with context, mlir.Location.unknown():
        yield mlir.Module.parse(zlib.decompress(ir))


def cubin_of(module: Any) -> bytes:
    """The cubin that the host code loads. Raises BuildError unless there is one."""
    for operation in module.body.operations:
        if _symbol(operation) == _CUBIN:
            data: bytes = operation.attributes["value"].value_bytes
            magic, _, head = _FATBIN.unpack_from(data)
            kind, inner, size = _IMAGE.unpack_from(data, head) if magic == _MAGIC else (0, 0, 0)
            if kind == _ELF:
                return data[head + inner :][:size]
            raise BuildError(
                "its code has a form that is not known here; compile it with the CuTe DSL that is installed"
            )
    raise BuildError("its host function launches no kernel; only what launches a kernel can be adopted")


def object_of(module: Any, prefix: str) -> bytes:
    """The host code of `module` as an object file whose symbols begin with `prefix`, as `fusekit.compiler.recorder`
    runs it. What tvm-ffi needs besides is left out.
    """
    from cutlass._mlir._mlir_libs._cutlass_ir import _mlirExecutionEngine
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs
    from cutlass.base_dsl.export.export import get_export_module

    # The engine looks up the CUDA entry points before it writes; none of them is called.
    for library in (get_prefix_dsl_libs("CUTE_DSL") or "").split(os.pathsep):
        if library:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    export = get_export_module(module, prefix)
    for operation in reversed(list(export.body.operations)):
        name = _symbol(operation).removeprefix(f"{prefix}_")
        state = name.startswith("__") and name.endswith("_cuda_state")
        if operation.operation.name == "llvm.mlir.global_dtors" or state or name.startswith(_OF_TVM_FFI):
            operation.operation.erase()
    (entry,) = (name for each in export.body.operations if dsl.ENTRY in (name := _symbol(each)))
    with tempfile.TemporaryDirectory(prefix="fusekit-adopt-") as folder:
        path = Path(folder) / "host.o"
        engine: Any = _mlirExecutionEngine
        engine.dump_object_file_pic(export, str(path), entry.replace(dsl.ENTRY, ""))
        return path.read_bytes()


def _symbol(operation: Any) -> str:
    attributes = operation.attributes
    return str(attributes["sym_name"].value) if "sym_name" in attributes else ""
