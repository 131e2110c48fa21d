"""The part of the CuTe DSL that traces: replaced, so that a trace may be left out."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from fusekit.cute.digest import UnnamedError, digest_of
from fusekit.cute.dsl import Call, replace
from fusekit.cute.replaced import Replaced
from fusekit.cute.scope import Scope
from fusekit.cute.state import process_state
from fusekit.cute.values import Walk
from fusekit.store.keys import canonical_json

# Arguments of `cute.compile` that make of it something else.
_TRACED_PLAINLY = frozenset({
    "pipeline", "gpu_module_attrs", "no_jit_engine", "export_name", "compile_to_precompiled_mlir",
    "trace_finalize_hooks", "is_experimental",
})  # fmt: skip


class _Thread(threading.local):
    """A call of `cute.compile` in this thread. begun: it has not been traced. cache: answers it. function: what is
    rewritten before that. steps: of the cache.
    """

    begun = False
    cache: Any = None
    function: Any = None
    steps: Any = None


def patch(scope: Scope) -> None:
    """Let the caches of `scope` that leave traces out answer each call of `cute.compile` before it is traced."""
    from cutlass._mlir import ir
    from cutlass.base_dsl.compiler import CompileCallable
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

    thread, signature = _Thread(), inspect.signature(CutlassBaseDSL.compile_and_cache)
    compile_function, generate = CompileCallable._compile, CutlassBaseDSL.generate_original_ir
    rewrite = BaseDSL._preprocess_and_replace_code
    given = inspect.signature(generate)

    def _compile(*args: Any, **kwargs: Any) -> Any:
        cache = scope.cache
        if cache is None or cache.cute.level != 1:
            return compile_function(*args, **kwargs)
        if thread.begun or thread.steps is not None or not _TRACED_PLAINLY.isdisjoint(kwargs):
            return compile_function(*args, **kwargs)
        thread.begun, thread.cache = True, cache
        try:
            function = compile_function(*args, **kwargs)
            if thread.steps is not None:
                thread.steps.send(None)
            return function
        finally:
            steps, thread.steps, thread.begun, thread.function = thread.steps, None, False, None
            thread.cache = None
            if steps is not None:
                steps.close()

    def _preprocess_and_replace_code(function: Any) -> Any:
        if not thread.begun or thread.function is not None:
            return rewrite(function)
        BaseDSL._lazy_initialize_dsl(function)
        if _is_traced_specially(function._dsl_object):
            thread.begun = False
            return rewrite(function)
        # The rest of it is done when it turns out that a trace is needed.
        function._dsl_object.decorator_location = function._decorator_location
        thread.function = function
        return None

    def generate_original_ir(*args: Any, **kwargs: Any) -> Any:
        function, thread.function = thread.function, None
        if not thread.begun or function is None:
            return generate(*args, **kwargs)
        thread.begun = False
        dsl, location = args[0], args[0].decorator_location

        def trace() -> Any:
            rewrite(function)
            dsl.decorator_location = location
            return generate(*args, **kwargs)

        bound = given.bind(*args, **kwargs)
        bound.apply_defaults()
        steps = thread.cache.untraced(Untried(dsl, function, bound.arguments, trace, signature))
        if next(steps) is not None:
            thread.steps = None
            steps.close()
            return ir.Module.create(), None, None
        try:
            traced = trace()
        except BaseException:
            steps.close()
            raise
        steps.send(None)
        thread.steps = steps
        return traced

    replace(CompileCallable, "_compile", _compile, scope)
    replace(BaseDSL, "_preprocess_and_replace_code", _preprocess_and_replace_code, scope)
    replace(CutlassBaseDSL, "generate_original_ir", generate_original_ir, scope)


class Untried(Call):
    """A call of `cute.compile` whose function is not traced yet.

    host: the function that is traced, as the DSL has not rewritten it. given: the arguments of the DSL's method that
    traces. trace: traces, and returns what that method does.
    """

    def __init__(
        self, dsl: Any, function: Any, given: Mapping[str, Any], trace: Callable[[], Any], signature: inspect.Signature
    ) -> None:
        super().__init__(trace, signature, (dsl,), {})
        self.host, self.given, self.trace = function, given, trace

    @cached_property
    def _given(self) -> dict[str, Any]:
        given = self.given
        return {
            "function_name": given["function_name"],
            "signature": given["sig"],
            "full_args": given["args"],
            "full_kwargs": given["kwonlyargs"],
            "funcBody": self.host,
            "original_function_name": self.host.__name__,
            "pipeline": None,
            "no_jit_engine": False,
        }

    def arguments(self, replaced: Replaced) -> Walk:
        """A walk over the function, all that it is called with, and what other packages put into the DSL."""
        walk = Walk()
        walk.typed = frozenset(map(id, self._typed()))
        walk(replaced.anywhere(self.dsl))
        walk(self.host)
        walk.put(*map(str, self.given["func_types"]))
        walk(dict(self.given["gpu_module_attrs"]))
        walk(tuple(self.given["args"]))
        walk(dict(self.given["kwonlyargs"]))
        return walk

    def _typed(self) -> Iterator[Any]:
        """The tensors and streams among the arguments, whose types are in those of the function."""
        given, signature = self.given, self.given["sig"]
        named = list(zip(signature.parameters, given["args"], strict=False))
        rest: list[Any] = list(given["args"][len(named) :])
        for name, each in [*named, *dict(given["kwonlyargs"]).items()]:
            parameter = signature.parameters.get(name)
            if parameter is None or "Constexpr" not in str(parameter.annotation):
                rest.append(each)
        while rest:
            value = rest.pop()
            kind = type(value)
            if isinstance(value, (tuple, list)):
                rest += value
            elif isinstance(value, dict):
                rest += value.values()
            elif dataclasses.is_dataclass(kind) or hasattr(kind, "__get_mlir_types__"):
                rest += getattr(value, "__dict__", {}).values()
            yield value

    def fields(self, replaced: Replaced) -> dict[str, str]:
        """What decides the trace, but for the arguments and what its code reads."""
        if self.dsl._trace_finalize_hooks:
            raise UnnamedError("hooks run after the trace")
        if self.locations():
            raise UnnamedError("line information has paths of sources")
        versions = {
            name: str(getattr(sys.modules[name], "__version__", ""))
            for name in ("numpy", "torch", "triton", "tvm_ffi", "cuda.bindings")
            if name in sys.modules
        }
        return {
            **self.settings(),
            "libraries": canonical_json(versions),
            "state": process_state(),
            "replaced": digest_of(replaced.functions(self.dsl, again=False)),  # `arguments` has looked
        }

    def traced(self) -> dict[str, Any]:
        """What the DSL has noted of a trace, as JSON types."""
        return {
            "kernels": {name: _plain(attributes) for name, attributes in self.dsl.kernel_info.items()},
            "count": self.dsl.num_kernels,
        }

    def pretend(self, traced: Mapping[str, Any]) -> None:
        """Let the DSL be as after the trace that `traced` is of."""
        self.dsl.kernel_info = OrderedDict(traced["kernels"])
        self.dsl.num_kernels = traced["count"]


def _plain(value: Any) -> Any:
    """`value`, of JSON types. Raises UnnamedError unless it is."""
    if json.loads(json.dumps(value, default=repr)) != value:
        raise UnnamedError("the DSL notes more of a kernel than can be kept")
    return value


def _is_traced_specially(dsl: Any) -> bool:
    options = dsl.compile_options.options.items()
    return getattr(dsl, "_is_experimental_dsl", False) or any(
        kind.__name__ in ("DeviceTarget", "FrontendNext") and option.value for kind, option in options
    )
