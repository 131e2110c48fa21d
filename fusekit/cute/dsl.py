"""The private parts of the CuTe DSL that the cache replaces, reads and calls.

A move to another version of the DSL begins here: `VERSIONS`. Imports the DSL only when called.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fusekit.config import compiler_environment
from fusekit.cute.digest import UnnamedError, digest_of
from fusekit.cute.replaced import Replaced
from fusekit.cute.scope import Scope
from fusekit.store.keys import canonical_json

VERSIONS = ("4.8.",)
"""Begins the versions of the DSL whose parts are known here."""

_POSITIONAL = 8  # arguments, the DSL's object among them; another DSL passes a class as well
_PREFIX = "CUTE_DSL_"
_ROOT = "cutlass"
# Variables that name places, and the architecture, which is a field of its own.
_NOT_IN_KEYS = frozenset({"CUTE_DSL_ARCH", "CUTE_DSL_CACHE_DIR", "CUTE_DSL_DUMP_DIR"})
_NOT_SERVED = {
    "KeepSASS": "it dumps SASS",
    "RDC": "it compiles relocatable code",
    "DeviceTarget": "it compiles a device function",
    "CollectCompilerDiagnostics": "it collects diagnostics",
    "RemarkFilter": "it collects remarks",
    "FlattenLocsOutputJsonPath": "it dumps locations",
    "HostTarget": "it compiles for another host",
    "LinkLibraries": "it links libraries, whose bytes are in no key",
}
_KEPT = ("cubin", "ptx")  # files that options ask for
_DUMPS = ("keep_ptx", "keep_cubin", "keep_sass", "keep_ir", "keep_ir_clean", "dryrun", "print_ir")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a compilation gave. host: its host object, with the cubins. ir: MLIR bytecode, compressed. files: kind ->
    bytes of what options ask for. facts: what is needed to load them, as JSON types.
    """

    host: bytes
    ir: bytes
    files: Mapping[str, bytes]
    facts: Mapping[str, Any]


def is_there() -> bool:
    """Whether the package `cutlass` that was imported is the DSL: another one of NVIDIA's has that name."""
    return "cutlass.cutlass_dsl" in sys.modules


def patch() -> Scope:
    """Let the caches of the scope that is returned answer each call of the method by which the DSL compiles what it has
    traced, and `cute.compile` before it traces. There is one for each process.
    """
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL as owner  # noqa: N813

    from fusekit.cute import tracing

    original = owner.compile_and_cache
    known: Scope | None = getattr(original, "fusekit_cute", None)
    if known is not None:
        return known
    scope, signature = Scope(), inspect.signature(original)

    def compile_and_cache(*args: Any, **kwargs: Any) -> Any:
        cache = scope.cache
        if cache is None:
            return original(*args, **kwargs)
        call = Call(original, signature, args, kwargs)
        steps = cache.serve(call)
        try:
            function = next(steps)
            return steps.send(original(*call.args, **call.kwargs)) if function is None else function
        finally:
            steps.close()

    tracing.patch(scope)
    replace(owner, "compile_and_cache", compile_and_cache, scope)
    return scope


def replace(owner: Any, name: str, function: Any, scope: Scope) -> None:
    """Put `function` into the DSL, in the place of one that it calls."""
    # The DSL's errors name the innermost frame that is not the DSL's, and for those it takes files in angle brackets.
    function.__code__ = function.__code__.replace(co_filename="<fusekit>")
    function.fusekit_cute = scope
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    replaced = functools.wraps(getattr(owner, name))(function)
    setattr(owner, name, staticmethod(replaced) if is_static else replaced)


class Call:
    """A call of `compile_and_cache(self, module, module_hash, function_name, pipeline, signature, no_cache, ...)`.

    args, kwargs: what the DSL's method is called with.
    """

    def __init__(
        self, original: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self._original, self._signature = original, signature

    def be_anew(self) -> None:
        """Call the DSL's method so that it compiles: what its cache of files has is not checked enough to be kept."""
        bound = self._signature.bind(*self.args, **self.kwargs)
        self.remembers = not bound.arguments["no_cache"]
        bound.arguments["no_cache"] = True
        self.args, self.kwargs = bound.args, bound.kwargs

    def retraced(self, module: Any, module_hash: Any, result: Any) -> None:
        """Let it be of a trace that gave `module`."""
        bound = self._signature.bind(*self.args, **self.kwargs)
        bound.arguments |= {"module": module, "module_hash": module_hash}
        self.args, self.kwargs = bound.args, bound.kwargs
        vars(self).pop("_given", None)

    def compile(self) -> Any:
        """What the DSL compiles."""
        return self._original(*self.args, **self.kwargs)

    def remember(self, function: Any) -> None:
        """Let a later call with the same IR get `function` from the DSL's cache in memory, if it uses that."""
        if self.remembers:
            self.dsl.jit_cache.set(self["module_hash"], function, funcBody=self["funcBody"])

    @cached_property
    def _given(self) -> dict[str, Any]:
        bound = self._signature.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    @property
    def dsl(self) -> Any:
        """The DSL's object, with the options and the settings of the call."""
        return self.args[0]

    @property
    def name(self) -> str:
        """The name of the host function, for messages."""
        try:
            return str(self["original_function_name"] or self["function_name"])
        except Exception:
            return "a host function"

    @property
    def function(self) -> Callable[..., Any] | None:
        """The host function as it was decorated; None if the DSL does not give it."""
        body: Callable[..., Any] | None = self["funcBody"]
        return body

    @cached_property
    def arch(self) -> str:
        """The architecture that is compiled for, such as `sm_90a`."""
        return str(self.dsl.compile_options.gpu_arch or self.dsl.envar.arch or "")

    @cached_property
    def _environment(self) -> dict[str, str]:
        return compiler_environment()

    @cached_property
    def tvm_ffi(self) -> tuple[Any, Any, Any] | None:
        """(specs of the parameters, keywords, dataclasses) of a function for tvm-ffi; else None."""
        if not self.dsl.compile_options.enable_tvm_ffi:
            return None
        if self.dsl._tvm_ffi_args_spec_converter is None:
            from cutlass.cute._tvm_ffi_args_spec_converter import attach_args_spec_converter

            attach_args_spec_converter(self.dsl)
        names = ("function_name", "signature", "full_args", "full_kwargs")
        params, keywords, dataclasses = self.dsl._tvm_ffi_args_spec_converter(*(self[name] for name in names))
        return params, keywords, dataclasses

    def not_served(self) -> str | None:
        """Why the DSL has to compile it; None if it need not."""
        dsl = self.dsl
        if self["no_jit_engine"]:
            return "it is compiled for no engine"
        if getattr(dsl, "_is_experimental_dsl", False) or len(self.args) > _POSITIONAL or "func_type" in self.kwargs:
            return "it is of the experimental DSL"
        for part in (dsl, dsl.compiler_provider):
            if not type(part).__module__.startswith("cutlass."):
                return f"it is compiled by {type(part).__module__}, which is no part of the DSL"
        if dsl.envar.compiler_backend != "legacy":
            return f"it is compiled by the backend {dsl.envar.compiler_backend}"
        for setting in _DUMPS:
            if getattr(dsl.envar, setting, False):
                return f"the DSL's setting {setting} is on"
        for kind, option in dsl.compile_options.options.items():
            if kind.__name__ in _NOT_SERVED and getattr(option.value, "value", option.value):
                return _NOT_SERVED[kind.__name__]
        if f"{_PREFIX}LIBS" in self._environment:
            return f"{_PREFIX}LIBS names libraries, whose bytes are in no key"
        if dsl.compiler_provider._post_compile_hook is not None:
            return "a hook changes what the passes give"
        if dsl.num_kernels and not dsl._runtime_can_run_compiled(dsl.envar.arch, self.arch):
            return f"it is for {self.arch}, and runs nowhere here"
        return None

    def locations(self) -> bool:
        """Whether source locations are compiled in."""
        dsl = self.dsl
        return bool(dsl.compile_options.generate_line_info or dsl.envar.lineinfo or dsl.envar.loc_tracebacks)

    def fields(self, replaced: Replaced) -> dict[str, str]:
        """What decides the result after the trace, labelled. Raises UnnamedError for a part without a name."""
        dsl, module, name = self.dsl, self["module"], self["function_name"]
        if self.locations():
            code = _bytecode(module)
        else:
            code = module.operation.get_asm(enable_debug_info=False, print_generic_op_form=True).encode()
        code = code.replace(name.encode(), self._stable_name.encode())
        return {
            **self.settings(),
            "ir": hashlib.sha256(code).hexdigest(),
            "kernels": str(bool(dsl.num_kernels)),
            "replaced": digest_of(replaced.functions(dsl)),
        }

    @cached_property
    def _stable_name(self) -> str:
        """The host function's name up to the first value in it that differs between processes: the DSL writes arguments
        into it, streams by their addresses and tensors of frameworks by their elements.
        """
        name, found = _ADDRESS.sub("0x", self["function_name"]), list[int]()
        for arg in (*(self["full_args"] or ()), *(self["full_kwargs"] or {}).values()):
            for part in arg if isinstance(arg, (list, tuple)) else (arg,):
                if hasattr(type(part), "__dlpack__") and not type(part).__module__.startswith("cutlass"):
                    found += (at for at in (_place(name, text) for text in self._mangled(part)) if at >= 0)
        return f"{name[: min(found)]}\0" if found else name

    def _mangled(self, arg: Any) -> Iterator[str]:
        """How the DSL may write `arg`, whose parameter has no annotation or a class, into a name."""
        for annotation in (inspect.Parameter.empty, object):
            parameter = inspect.Parameter("arg", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
            yield self.dsl.mangle_name("", (arg,), inspect.Signature([parameter])).partition("__")[2]

    def settings(self) -> dict[str, str]:
        """What decides the result beside the function and its arguments."""
        dsl, options = self.dsl, self.dsl.compile_options
        settings = {
            entry.key_name: getattr(dsl.envar, entry.key_name)
            for entry in type(dsl.envar)._ENV_VAR_SPEC
            if entry.affects_compile and entry.key_name not in ("arch", "shared_libs")
        }
        environment = {key: value for key, value in self._environment.items() if key not in _NOT_IN_KEYS}
        fields = {
            "arch": self.arch,
            "function": self._stable_name,
            "pipeline": _without_paths(
                dsl.preprocess_pipeline(dsl._get_pipeline(self["pipeline"]), self.arch), options
            ),
            "dsl": f"{dsl.name} {type(dsl).__module__}.{type(dsl).__qualname__}",
            # Not all of them are in the pipeline: some change what is done after its passes.
            "options": f"{_without_paths(options.to_str(), options)} {digest_of(_values(options))}",
            "settings": canonical_json({key: repr(value) for key, value in sorted(settings.items())}),
            "environment": canonical_json(environment),
        }
        if self.tvm_ffi is not None:
            import tvm_ffi

            fields["tvm-ffi"] = f"{tvm_ffi.__version__} {digest_of([self.tvm_ffi, self['original_function_name']])}"
        return fields

    def artifact(self, function: Any, prefix: str) -> Artifact:
        """What the store keeps of a compiled `function`. prefix: begins its symbols."""
        facts: dict[str, Any] = {
            "prefix": prefix,
            "function": self["function_name"],
            "tvm_ffi": self.tvm_ffi is not None,
            "extra_args": dict(function.kernel_extra_args),
            "added_args": int(function.total_added_arguments),
        }
        if self.tvm_ffi is not None:
            from cutlass._mlir._mlir_libs._cutlass_ir import _aot_support

            host = bytes(
                _aot_support.export_module_to_bytes(function.ir_module, format="o", opt_level=3, enable_pic=True)
            )
        else:
            # The object would have the signature, pickled, which not every default of an argument can be.
            execution, signature = function.execution_args, function.execution_args.signature
            execution.signature = inspect.Signature()
            try:
                host = function.dump_to_object(prefix)
            finally:
                execution.signature = signature
        files = {kind: path.read_bytes() for kind, path in self._files().items()}
        return Artifact(host, zlib.compress(_bytecode(function.ir_module), 1), files, facts)

    def _files(self) -> dict[str, Path]:
        """Kind -> path of the files that the options of the call ask for."""
        paths = {kind: getattr(self.dsl.compile_options, f"full_{kind}_path") for kind in _KEPT}
        return {kind: Path(path) for kind, path in paths.items() if path}

    def load(self, host: bytes, ir: Callable[[], bytes], files: Mapping[str, bytes], facts: Mapping[str, Any]) -> Any:
        """The DSL's object for the stored host object `host`. ir: gives the MLIR bytecode, when it is asked for. Writes
        the files that the call asks for.
        """
        from cutlass._mlir._mlir_libs._cutlass_ir._execution_engine import BinaryExecutionEngine

        dsl, name = self.dsl, facts["function"]
        if (self.tvm_ffi is not None) != facts["tvm_ffi"]:
            raise UnnamedError("the entry is of another kind of function")
        engine = _Engine(BinaryExecutionEngine(host, dsl.get_shared_libs(), True))
        if self.tvm_ffi is not None:
            kind: Any = functools.partial(_tvm_ffi_kind(self.tvm_ffi), **_tvm_ffi_keywords(self.tvm_ffi))
            entry = engine.lookup(f"_mlir_ciface_{name}")
        else:
            kind = functools.partial(_plain_kind(), prefix=facts["prefix"], load_from_binary=True)
            entry = engine.lookup(f"_mlir_{facts['prefix']}__mlir_ciface_{name}")
        if not entry:
            raise UnnamedError(f"the host object has no function {name}")
        import ctypes

        entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(entry)
        for kind_of_file, path in self._files().items():
            path.write_bytes(files[kind_of_file])  # which the DSL reads as its own
        function = dsl._build_jit_function(
            kind, None, engine, entry, self["signature"], name, self["dynamic_args"], self["dynamic_kwargs"]
        )
        function.kernel_extra_args = dict(facts["extra_args"])
        function.total_added_arguments = facts["added_args"]
        function.fusekit_ir = ir
        return function


def _place(name: str, text: str) -> int:
    """Where `text` begins in `name`, which may end within it; -1 if it does not."""
    at = name.find(f"_{text}") if text else -1
    if at < 0:
        ends = range(min(len(text), len(name) - 1), 0, -1)
        at = next((len(name) - count - 1 for count in ends if name.endswith(f"_{text[:count]}")), -1)
    return at


def version() -> str:
    """The version of the imported DSL."""
    import cutlass

    return str(cutlass.__version__)


# -- what is loaded


class _Engine:
    """The DSL's engine of a host object, with the method that its engine of IR has as well."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.lookup = engine.lookup

    def raw_lookup(self, name: str) -> Any:
        try:
            return self.lookup(name)
        except Exception:  # there is no such symbol
            return None


class _Lazy:
    """The attribute `ir_module`: parsed when it is asked for."""

    def __get__(self, function: Any, owner: Any = None) -> Any:
        if function is None:
            return self
        values = vars(function)
        if "fusekit_module" not in values and "fusekit_ir" in values:
            from cutlass._mlir import ir

            context = ir.Context()
            context.enable_multithreading(False)
            with context, ir.Location.unknown():
                values["fusekit_module"] = ir.Module.parse(function.fusekit_ir())
        return values.get("fusekit_module")

    def __set__(self, function: Any, module: Any) -> None:
        if module is not None:
            vars(function)["fusekit_module"] = module


def _subclass(kind: Any, **members: Any) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"ir_module": _Lazy(), **names, **members})


@functools.cache
def _plain_kind() -> Any:
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    return _subclass(CudaDialectJitCompiledFunction)


def _tvm_ffi_kind(specs: tuple[Any, Any, Any]) -> Any:
    # As the DSL chooses.
    _, keywords, dataclasses = specs
    return _tvm_ffi_kinds()[bool(keywords.kwonly_names or keywords.arg_defaults or keywords.arg_names or dataclasses)]


def _tvm_ffi_keywords(specs: tuple[Any, Any, Any]) -> dict[str, Any]:
    _, keywords, dataclasses = specs
    if _tvm_ffi_kind(specs) is _tvm_ffi_kinds()[False]:
        return {}
    return {"kwargs_wrapper_spec": keywords, "map_dataclass_to_tuple": dataclasses}


@functools.cache
def _tvm_ffi_kinds() -> tuple[Any, Any]:
    import tvm_ffi
    from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunction, TVMFFIJitCompiledFunctionWithKwargs

    def create(self: Any) -> Any:
        # The engine is one of a host object already.
        address = self.engine.lookup(f"__tvm_ffi_{self.function_name}")
        return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=self.engine)

    return (
        _subclass(TVMFFIJitCompiledFunction, _create_tvm_ffi_function=create),
        _subclass(TVMFFIJitCompiledFunctionWithKwargs, _create_tvm_ffi_function=create),
    )


def _without_paths(text: str, options: Any) -> str:
    """`text` without the places of the files that `options` ask for."""
    for option in options.options.values():
        text = text.replace(getattr(option, "dump_path", "") or "\0", "")
    return text


def _values(options: Any) -> dict[str, Any]:
    """The values of compile options, by their names; not that of a folder."""
    others = {name: value for name, value in vars(options).items() if name != "options"}
    return others | {
        kind.__name__: getattr(option, "value", None)
        for kind, option in options.options.items()
        if kind.__name__ != "DumpDir"
    }


def _bytecode(module: Any) -> bytes:
    data = io.BytesIO()
    module.operation.write_bytecode(data)
    return data.getvalue()
