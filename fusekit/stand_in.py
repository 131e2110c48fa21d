"""`fusekit.compile`: stands in for `cute.compile`, and looks in the store first."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from fusekit.compiler import build, fakes
from fusekit.compiler.capture import arch_of, captured, effective_options
from fusekit.compiler.foreign import Foreign
from fusekit.compiler.identity import Identity
from fusekit.compiler.leaves import (
    STREAM,
    Leaf,
    argument_name,
    flat,
    is_constant,
    is_extent,
    leaves,
    member,
    members,
    run_time,
    signature_of,
)
from fusekit.compiler.naming import record_of
from fusekit.config import Config
from fusekit.errors import ArgumentError, BuildError
from fusekit.spec.parse import parse_text
from fusekit.store import NameRecord, Store

if TYPE_CHECKING:
    from fusekit.abi import LaunchRecord
    from fusekit.library import Library
    from fusekit.runtime.driver import Driver
    from fusekit.runtime.kernel import Kernel

STEM = "compiled"  # begins the names of what is compiled here


def compile(function: Callable[..., Any], *args: Any, options: str = "", **kwargs: Any) -> Compiled:
    """What `cute.compile(function, *args, **kwargs)` gives, out of the store where it is there; else it is compiled,
    proved and published there.

        compiled = fusekit.compile(scale, x, y, cutlass.Float32(1.0), stream)     # as cute.compile
        compiled(x, y, 2.0, stream)                                             # as what that returns

    function: a `cute.jit` function, method or object that another process can import: of a module, not of the script
    that runs, and no closure. args, kwargs: fake tensors, tensors (of which the layout counts), numbers, streams, and
    what is known at compile time: plain values, classes, enumerations, objects made of such. options: the DSL's option
    string; `--gpu-arch`, `--opt-level`, `--ptxas-options`, `--enable-assertions` count, those that dump files do not.

    The key is that of the same kernel in a spec file (see `fusekit.capture`), so a store that was filled by `fusekit
    build --allow-extern` serves it. It is compiled in a separate process that sees no GPU. No permission is asked
    for, since the caller's own code runs.

    What a tensor is for cannot be seen from the call: each is `inout` in the store, and at a launch tensors may
    overlap, as they may with `cute.compile`. Not supported: integers of more than 32 bits; the stream that
    `--enable-tvm-ffi` takes from the framework (the call gives it); host functions that do more than launch; and what
    the program changed in a module after importing it (a global, a class attribute, what was read of the environment):
    the compile process imports it anew, and a value that the call reaches and that differs there is a BuildError.
    Configuration comes from the environment (`FUSEKIT_STORE`).

    Raises BuildError for a call that cannot be written as a spec, compiled or proved; use `cute.compile` for it. Needs
    no GPU before the first launch.
    """
    compile_options = effective_options(options)
    jit_call = captured(function, args, kwargs, compile_options, arch_of(compile_options))
    call = json.dumps([jit_call.source, jit_call.params], sort_keys=True).encode()
    named = dataclasses.replace(jit_call, name=f"{jit_call.name[:40]}-{hashlib.sha256(call).hexdigest()[:12]}")
    (spec,) = parse_text(
        f"schema = 1\nsummary = {json.dumps(jit_call.source)}\n\n{named.toml()}", STEM, "fusekit.compile"
    )
    config = Config.from_environment()
    store = Store.open(config)
    identity = dataclasses.replace(_identity(), _foreign=Foreign())  # whose files may have been edited meanwhile
    report = build.execute(build.plan_build([spec], store, identity), store, jobs=1)
    for failed in report.failed:
        raise BuildError(failed.error, name=failed.name)
    (entry,) = report.built + report.hits
    record = record_of(entry.key, spec)  # the name may stand for the code of another checkout when it is launched
    return Compiled(_library(config), record, _Parameters(jit_call.source, jit_call.params))


class Compiled:
    """A kernel in the store, called with the positional arguments of its host function.

    name, arch: what it is called in the store; `kernel` is the `fusekit.runtime` kernel, loaded at first use.
    """

    def __init__(self, library: Library, found: NameRecord, parameters: _Parameters) -> None:
        self.name = found.name
        self.arch = found.arch
        self._library, self._found = library, found
        self._parameters = parameters
        self._kernel: Kernel | None = None

    def __repr__(self) -> str:
        return f"<Compiled {self.name} for {self.arch}>"

    @property
    def kernel(self) -> Kernel:
        """Raises NotBuiltError, DriverError as `Library.load` does."""
        if self._kernel is None:
            self._kernel = self._library.load_record(self._found)
        return self._kernel

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Launches. args, kwargs: the run-time arguments of the host function, without those that are known at compile
        time (`Constexpr`): tensors of any framework or `from_dlpack`'s, numbers, and the stream where it takes one.
        Raises ArgumentError for what does not fit, DriverError for a refused launch.
        """
        stream, arguments = self.arguments(*args, **kwargs)
        self.kernel(stream=stream, **arguments)

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """(stream, the kernel's arguments by name) of a call, to bind or capture it: `kernel.bind(**arguments)`."""
        kernel = self.kernel
        stream, values = self._parameters.values(args, kwargs)
        names = {argument.name for argument in kernel.record.arguments}
        arguments = {}
        for leaf, given in values:
            name, value = argument_name(leaf.name), _plain(given, kernel)
            if name in names:
                arguments[name] = value
            elif value != (compiled := _plain(leaf.fake, kernel)):
                raise ArgumentError(
                    f"{leaf.name} is {value!r}; the launch is configured by it and was compiled for {compiled!r}; call"
                    f" fusekit.compile with {value!r} too",
                    argument=leaf.name,
                )
        return stream, arguments


class _Parameters:
    """How a call's values become the kernel's arguments: in the order of the host function's parameters, flattened."""

    def __init__(self, source: str, params: Any) -> None:
        function, args, kwargs = fakes.read(source, params)
        whole = signature_of(function)
        runtime = [each for each in whole.parameters.values() if not is_constant(each.annotation)]
        self._leaves = leaves(function, args, kwargs)
        self._signature = whole.replace(parameters=runtime)
        bound = whole.bind(*args, **kwargs)
        bound.apply_defaults()
        self._templates = run_time(bound)

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[tuple[Leaf, Any]]]:
        """(the stream, the other run-time arguments with their values, in order)."""
        try:
            given = run_time(self._signature.bind(*args, **kwargs))
        except TypeError as error:
            known = ", ".join(self._signature.parameters)
            raise ArgumentError(f"{error}; the arguments are {known}") from None
        stream, values = None, []
        for name, template in self._templates.items():
            for leaf, item in _pairs(name, template, given.get(name, template)):
                if leaf.kind == STREAM:
                    stream = item
                elif not is_extent(leaf, self._leaves):  # a launch reads those from the tensor
                    values.append((leaf, item))
        return stream, values


def _pairs(name: str, template: Any, value: Any) -> Iterator[tuple[Leaf, Any]]:
    """(run-time argument, its value), in the order of the trace. template: what it was traced with."""
    parts = members(template)
    if parts is None:
        if template is None and value is not None:
            raise ArgumentError(f"{name} was compiled as None, so it must be None at a launch", argument=name)
        yield from ((leaf, value) for leaf in flat(name, template))
        return
    if isinstance(parts, range) and (not isinstance(value, tuple | list) or len(value) != len(parts)):
        raise ArgumentError(f"{name} must be {len(template)} values, as it was compiled", argument=name)
    for part in parts:
        yield from _pairs(f"{name}_{part}", member(template, part), member(value, part))


def _plain(value: Any, kernel: Kernel) -> Any:
    """A value of the DSL's own types as one that the runtime takes; any other as it is."""
    from fusekit.compiler.leaves import RECORDED
    from fusekit.runtime.tensors import Slice

    kind = type(value).__name__
    if isinstance(value, bool):
        return int(value)
    if kind == "_Tensor":
        dtype = RECORDED.get(value.element_type.__name__, value.element_type.__name__)
        return Slice(value.data_ptr, tuple(value.shape), dtype, kernel.device, tuple(value.stride))
    if kind == "_Pointer":
        dtype = RECORDED.get(value.dtype.__name__, value.dtype.__name__)
        return Slice(value._pointer, (1,), dtype, kernel.device)
    if type(value).__module__.startswith("cutlass.") and hasattr(value, "value"):
        return value.value
    return value


@cache
def _identity() -> Identity:
    return Identity()


@cache
def _library(config: Config) -> Library:
    # One for a store: kernels of one program share contexts and code.
    return _overlapping(config)


def _overlapping(store: Store | Config, driver: Driver | None = None) -> Library:
    """A library whose kernels take any tensors, also ones that overlap: no role is known, so no output is."""
    from fusekit.abi import TensorArgument
    from fusekit.library import Library

    class Overlapping(Library):
        def _read(self, found: NameRecord) -> tuple[LaunchRecord, bytes]:
            record, cubin = super()._read(found)
            arguments = tuple(
                dataclasses.replace(each, role="input") if isinstance(each, TensorArgument) else each
                for each in record.arguments
            )
            return dataclasses.replace(record, arguments=arguments), cubin

    return Overlapping(store, driver)
