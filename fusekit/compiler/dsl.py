"""The private parts of the CuTe DSL that the host half reads or replaces; kernels/dsl.py has those of device code.

A move to another version of the DSL begins here. Imports the DSL only when called.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from fusekit.errors import BuildError, ToolchainError, install

LIBRARY = "cutlass._mlir._mlir_libs._cutlass_ir"
"""The module as which the DSL loads its compiler, the library of one major version of CUDA."""
ENTRY = "_mlir_ciface_"
"""Begins the symbols of host functions."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ALIGNMENT = "_assumed_align"


def check() -> None:
    """Touches the parts; what the DSL does not have raises ImportError or AttributeError."""
    for owner, name in call_hooks():
        getattr(owner, name)
    options = compile_options("--gpu-arch=sm_90a")
    for kind in options.options:
        option_flag(kind)
    arch_of(options)
    for name in ("PointerType", "StructType", "ArrayType"):
        getattr(llvm(), name)
    with target("sm_90a", 0), naming("fusekit"):
        is_tracing()


def ir() -> Any:
    """The module of MLIR's core."""
    from cutlass._mlir import ir as module

    return module


def llvm() -> Any:
    """The module of MLIR's LLVM dialect."""
    from cutlass._mlir.dialects import llvm as module

    return module


def is_tracing() -> bool:
    """Whether a host function is being traced, whose calls of others are a part of it."""
    return ir().Context.current is not None and ir().InsertionPoint.current is not None


def call_hooks() -> tuple[tuple[Any, str], tuple[Any, str]]:
    """(class, method) that every call of `cute.compile` goes through, and that every call of a host function does."""
    try:
        from cutlass.base_dsl.compiler import CompileCallable
        from cutlass.base_dsl.dsl import BaseDSL
    except ImportError as error:
        raise _not_imported(error) from error
    return (CompileCallable, "__call__"), (BaseDSL, "_func")


def compile_options(options: Any, compiler: Any = None) -> Any:
    """The DSL's `CompileOptions` of a call: of its string, else of `cute.compile[...]`."""
    try:
        from cutlass.base_dsl.compiler import CompileOptions, _parse_compile_options_from_str
    except ImportError as error:
        raise _not_imported(error) from error

    if isinstance(options, str) and options:
        try:
            return _parse_compile_options_from_str(options)
        except Exception as error:
            why = f"{type(error).__name__}: {without_colours(str(error)).partition(chr(10))[0]}"
            raise BuildError(f"options {options!r}: the CuTe DSL does not take them ({why}); fix them") from None
    if compiler is None:
        return CompileOptions()
    return getattr(compiler, "_compile_options", None) or compiler.compile_options  # of cute.compile, or of the DSL


def option_flag(kind: Any) -> tuple[str | None, Any]:
    """(name on the command line, default value) of a class of compile options."""
    return getattr(kind, "_cli_flag", None), kind._default


def arch_of(options: Any) -> str:
    """The architecture that a call compiles for: of its `CompileOptions`, the environment, or the device."""
    from cutlass.base_dsl import Arch

    name: str = Arch.from_string(options.gpu_arch or _environment().arch).to_string()
    return name


def alignment(value: Any, default: Any = None) -> Any:
    """Bytes to which a tensor or pointer of the DSL is aligned; `default` for anything else."""
    return getattr(value, _ALIGNMENT, default)


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of the DSL, fake or not."""
    return all(hasattr(value, name) for name in (_ALIGNMENT, "element_type", "shape"))


def has_values(value: Any) -> bool:
    """Whether the DSL passes parts of the object at run time."""
    return hasattr(value, "__get_mlir_types__")


def type_text(tensor: Any) -> str:
    """The MLIR type of a tensor with an address."""
    tensor.__c_pointers__()  # only with the descriptor does the DSL make the divisors of the strides
    with ir().Context(), ir().Location.unknown():
        return str(tensor.mlir_type)


def original_code(function: Any) -> Any:
    """The code of a function as Python compiled it, which the DSL replaces when it traces; None if it has none."""
    return getattr(function, "_original_code", getattr(function, "__code__", None))


def jit_marks(function: Any) -> tuple[Any, ...]:
    """What `cute.jit` notes on a function about itself and its options."""
    return tuple(vars(function).get(name) for name in ("_dsl_cls", "_decorator_kind", "_preprocess_enabled"))


@contextlib.contextmanager
def naming(symbol: str) -> Iterator[None]:
    """In the block the DSL calls kernels `symbol`, their function unless that is `kernel`, `cutlass` and their number;
    "" leaves the names to the DSL.
    """
    if not symbol:
        yield
        return
    from unittest.mock import patch

    from cutlass.cutlass_dsl import CuTeDSL

    usual = CuTeDSL._get_name_options

    def options(function: Callable[..., Any]) -> Any:
        given = usual(function)
        if getattr(function, "_decorator_kind", "") != "kernel":
            return given
        name = symbol if function.__name__ == "kernel" else f"{symbol}_{function.__name__}"
        # ptxas compiles a kernel to other code where its name lacks `cutlass`.
        return type(given)(name, remove_cutlass_symbol=False, keep_mangled_name=False)

    # `set_name_prefix` would have to be called, and taken back, on every kernel that the host function may launch.
    with patch.object(CuTeDSL, "_get_name_options", staticmethod(options)):
        yield


@contextlib.contextmanager
def target(arch: str, reserved_shared: int) -> Iterator[None]:
    """In the block the DSL takes `arch` for the device's architecture, and the shared memory of a multiprocessor from
    it, with the `reserved_shared` bytes that the driver keeps of every block.
    """
    from unittest.mock import patch

    from cuda.bindings.driver import CUdevice_attribute
    from cutlass.base_dsl.runtime import cuda
    from cutlass.memory import get_smem_capacity_in_bytes

    asked = cuda.get_device_attribute

    def answer(attribute: Any, *rest: Any, **named: Any) -> Any:
        if attribute == CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
            return get_smem_capacity_in_bytes(arch.rstrip("af")) + reserved_shared
        return asked(attribute, *rest, **named)

    # Else the DSL asks the driver. Where that sees no GPU, the message of its error asks again, a hundred times over:
    # a minute, where a driver is there and many processes wait for its lock.
    with patch.object(cuda, "get_device_attribute", answer), patch.object(_environment(), "_arch", arch):
        yield


def cubin(compiled: Any, arch: str) -> bytes:
    """The cubin of what `cute.compile` returned. Raises BuildError if there is none for `arch`."""
    image = compiled.artifacts.CUBIN
    if isinstance(image, str):  # the path of the file that it should have written
        if getattr(compiled, "kernel_info", None):
            raise BuildError(
                f"the CuTe DSL assembled nothing for {arch}: the CUDA libraries that are installed with it do not know"
                f" that; {install('cu13')}, or take another arch"
            )
        raise BuildError("the host function launches no kernel; a spec is one that launches one kernel or more")
    if not image:
        raise _unknown_version("cubin")
    return bytes(image)


def ptx(compiled: Any) -> str:
    """Its PTX; empty unless the options of its compilation keep it."""
    return getattr(compiled, "__ptx__", None) or ""


def host_module(compiled: Any) -> Any:
    """Its host code, in MLIR's LLVM dialect."""
    module = getattr(compiled, "ir_module", None)
    if module is None:
        raise _unknown_version("host code to read")
    return module


def symbols_of(prefix: str) -> str:
    """What the symbols of `host_object` begin with."""
    return f"_mlir_{prefix}_"


def host_object(compiled: Any, prefix: str) -> bytes:
    """Its host code as an object file."""
    # The DSL's engine looks up the host object's CUDA entry points before it writes it out, and finds them only when
    # its own runtime library is visible in the whole process. None of them is called.
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs

    for path in (get_prefix_dsl_libs("CUTE_DSL") or "").split(os.pathsep):
        if path:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    # It also writes the signature, pickled, which not every default of an argument can be. Nothing here reads it.
    compiled.execution_args.signature = inspect.Signature()
    try:
        data: bytes = compiled.dump_to_object(prefix)
    except Exception as error:
        raise ToolchainError(f"the CuTe DSL cannot write its host object: {without_colours(str(error))}") from error
    return data


def without_colours(text: str) -> str:
    """A message of the DSL's, without the escapes of a terminal."""
    return _ANSI.sub("", text).strip()


def _environment() -> Any:
    from cutlass.cutlass_dsl import CuTeDSL

    return CuTeDSL._get_dsl().envar


def _not_imported(error: ImportError) -> ToolchainError:
    return ToolchainError(f"the CuTe DSL cannot be imported ({error}); {install('build')}")


def _unknown_version(what: str) -> ToolchainError:
    return ToolchainError(f"the CuTe DSL gave no {what}; this fusekit does not know its version; {install('build')}")
