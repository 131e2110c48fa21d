"""`fusekit.compile`: a replacement of `cute.compile` that looks in the store first."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from fusekit.compiler import build, dsl, fakes
from fusekit.compiler.capture import captured
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

STEM = "compiled"  # first part of the names of these kernels


def compile(function: Callable[..., Any], *args: Any, options: str = "", **kwargs: Any) -> Compiled:
    """As `cute.compile`: take the kernel from the store, or compile, prove and publish it.

    The key is that of the same kernel in a spec file (see `fusekit.capture`), so a store that was filled by `fusekit
    build --allow-extern` is used. Compilation runs in a subprocess without a GPU. The source needs no permission: the
    caller runs their own code.

    Parameters
    ----------
    function : callable
        A `cute.jit` function, method or object that another process can import: of a module, not of the running
        script, and not a closure.
    *args, **kwargs
        As for `cute.compile`: fake tensors, tensors (only their layout counts), numbers, streams, and compile-time
        values: plain values, classes, enumerations, objects made of them.
    options : str, optional
        Options of the DSL. `--gpu-arch`, `--opt-level`, `--ptxas-options` and `--enable-assertions` are part of the
        key; those that dump files are not.

    Returns
    -------
    Compiled
        The kernel, called with the run-time arguments of `function`.

    Raises
    ------
    BuildError
        The call cannot be written as a spec, compiled or proved; use `cute.compile` then. Also if the program has
        changed a value of a module (a global, a class attribute) that the call reads: the subprocess imports the
        module again.

    Notes
    -----
    The call does not tell the role of a tensor: each is `inout` in the store, and tensors may overlap at a launch, as
    with `cute.compile`. Not supported: integers of more than 32 bits; the stream that `--enable-tvm-ffi` takes from the
    framework (pass it in the call); host functions that do more than launch. The configuration is that of the
    environment (`FUSEKIT_STORE`). No GPU is needed before the first launch.

    Examples
    --------
        compiled = fusekit.compile(scale, x, y, cutlass.Float32(1.0), stream)  # as cute.compile
        compiled(x, y, 2.0, stream)  # as its result
    """
    compile_options = dsl.compile_options(options)
    call = captured(function, args, kwargs, compile_options, dsl.arch_of(compile_options))
    inputs = json.dumps([call.source, call.params], sort_keys=True).encode()
    named = dataclasses.replace(call, name=f"{call.name[:40]}-{hashlib.sha256(inputs).hexdigest()[:12]}")
    (spec,) = parse_text(f"schema = 1\nsummary = {json.dumps(call.source)}\n\n{named.toml()}", STEM, "fusekit.compile")
    config = Config.from_environment()
    store = Store.open(config)
    identity = dataclasses.replace(_identity(), _foreign=Foreign())  # its files may have been edited meanwhile
    report = build.execute(build.plan_build([spec], store, identity), store, jobs=1)
    for failed in report.failed:
        raise BuildError(failed.error, name=failed.name)
    (kernel,) = report.built + report.hits
    record = record_of(kernel.key, spec)  # by a launch, the name may point to code of another checkout
    return Compiled(_library(config), record, _Parameters(call.source, call.params))


class Compiled:
    """A kernel in the store, called with the positional arguments of its host function.

    name, arch: its name in the store. kernel: the `fusekit.runtime` kernel, loaded at first use.
    """

    def __init__(self, library: Library, record: NameRecord, parameters: _Parameters) -> None:
        self.name = record.name
        self.arch = record.arch
        self._library, self._record = library, record
        self._parameters = parameters
        self._kernel: Kernel | None = None

    def __repr__(self) -> str:
        return f"<Compiled {self.name} for {self.arch}>"

    @property
    def kernel(self) -> Kernel:
        """The loaded kernel. Raises NotBuiltError, DriverError as `Library.load` does."""
        if self._kernel is None:
            self._kernel = self._library.load_record(self._record)
        return self._kernel

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Launch the kernel. args, kwargs: the run-time arguments of the host function, without compile-time ones
        (`Constexpr`): tensors of any framework or of `from_dlpack`, numbers, and the stream if it takes one. Raises
        ArgumentError for arguments that do not fit, DriverError for a refused launch.
        """
        stream, arguments = self.arguments(*args, **kwargs)
        self.kernel(stream=stream, **arguments)

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """(stream, the kernel's arguments by name) of a call, to bind or capture it: `kernel.bind(**arguments)`."""
        kernel = self.kernel
        stream, values = self._parameters.values(args, kwargs)
        names = {argument.name for argument in kernel.record.arguments}
        arguments = {}
        for leaf, passed in values:
            name, value = argument_name(leaf.name), _plain(passed, kernel)
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
    """Maps the values of a call to the kernel's arguments: the host function's parameters in order, flattened."""

    def __init__(self, source: str, params: Any) -> None:
        function, args, kwargs = fakes.read(source, params)
        whole = signature_of(function)
        runtime = [parameter for parameter in whole.parameters.values() if not is_constant(parameter.annotation)]
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
    """(run-time argument, its value), in the order of the trace. template: its value in the trace."""
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
    """A value of a type of the DSL as one that the runtime takes; others unchanged."""
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
    # One for each store: the kernels of a program share contexts and code.
    return _overlapping(config)


def _overlapping(store: Store | Config, driver: Driver | None = None) -> Library:
    """A library whose kernels accept overlapping tensors: roles are not known, so none counts as an output."""
    from fusekit.abi import TensorArgument
    from fusekit.library import Library

    class Overlapping(Library):
        def _read(self, found: NameRecord) -> tuple[LaunchRecord, bytes]:
            record, cubin = super()._read(found)
            arguments = tuple(
                dataclasses.replace(argument, role="input") if isinstance(argument, TensorArgument) else argument
                for argument in record.arguments
            )
            return dataclasses.replace(record, arguments=arguments), cubin

    return Overlapping(store, driver)
