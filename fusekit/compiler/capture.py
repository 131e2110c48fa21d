"""`fusekit.capture`: what any code compiles with `cute.compile`, as a spec file."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fusekit.compiler import dsl, fakes, values
from fusekit.compiler.foreign import Foreign
from fusekit.compiler.intercept import listening
from fusekit.compiler.leaves import POINTER, TENSOR, Leaf, leaves
from fusekit.compiler.options import OPT_LEVEL
from fusekit.errors import BuildError, SpecError, UsageError
from fusekit.plan.arch import FOREIGN
from fusekit.spec.fields import NAME_PATTERN, NAME_RULE

# Options of the DSL by their meaning here; a spec has no field for the effect of any other.
_OF_NO_CUBIN = frozenset({
    "gpu-arch", "keep-cubin", "keep-ptx", "keep-sass", "nvdisasm-options", "dump-dir", "enable-tvm-ffi", "host-target",
    "remark-filter", "remark-output", "generate-line-info",
})  # fmt: skip
_OF_THE_CUBIN = frozenset({"opt-level", "ptxas-options", "enable-assertions", "enable-pyir"})
_KNOWN_MODULES = frozenset({"cutlass", "cuda"}) | sys.stdlib_module_names


@dataclass(frozen=True, slots=True)
class Captured:
    """One compilation. name: of its kernel in the file; source, params, arguments, distributions: the keys of its spec
    (see `fusekit.compiler.fakes`).
    """

    name: str
    arch: str
    source: str
    params: Mapping[str, Any]
    arguments: Mapping[str, Mapping[str, Any]]
    distributions: tuple[str, ...] = ()

    def toml(self) -> str:
        """Its `[[kernel]]` table."""
        head = {"name": self.name, "op": "extern", "arch": self.arch, "source": self.source}
        if self.distributions:
            head["distributions"] = list(self.distributions)  # type: ignore[assignment]
        lines = ["[[kernel]]", *(f"{key} = {toml_value(value)}" for key, value in head.items())]
        for title, table in (("params", self.params), ("arguments", self.arguments)):
            if table:
                entries = (f"{toml_key(key)} = {_lines(value)}" for key, value in table.items())
                lines += ["", f"[kernel.{title}]", *entries]
        return "\n".join(lines) + "\n"


def captured(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Any, arch: str) -> Captured:
    """`cute.compile(function, *args, **kwargs)` as a kernel. options: the DSL's `CompileOptions` of the call.

    Every tensor is `inout`: the arguments do not show what a kernel writes. Raises BuildError, in words, for a
    call that no spec can repeat.
    """
    if arch not in FOREIGN:
        raise BuildError(f"arch {arch}: a spec is for one of {', '.join(FOREIGN)}; compile with --gpu-arch")
    call = fakes.write(function, args, kwargs, _options(options))
    host, given, named = fakes.read(call.source, call.params)
    if held := values.reached((host, *given, *named.values()), _foreign()):
        call.params[values.VALUES] = held
    traced = leaves(host, given, named)
    return Captured(_name(call.source), arch, call.source, call.params, tables_of(traced), _distributions(call))


class Capture:
    """What was compiled inside the `with` block, in order, each thing once.

    kernels: those that a spec can repeat. problems: one line for each other one, with what to do about it.
    """

    def __init__(self) -> None:
        self.kernels: list[Captured] = []
        self.problems: list[str] = []
        self._guard = threading.Lock()
        self._open: AbstractContextManager[None] | None = None

    def __enter__(self) -> Capture:
        if self._open is not None:
            raise UsageError("this capture is open already; call fusekit.capture() for each with block")
        opened = listening(self._hear, direct=True)
        opened.__enter__()
        self._open = opened
        return self

    def __exit__(self, *raised: object) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def __repr__(self) -> str:
        return f"<Capture of {len(self.kernels)} kernels, {len(self.problems)} problems>"

    def toml(self) -> str:
        """A spec file. Raises SpecError when nothing was captured."""
        if not self.kernels:
            why = "; ".join(self.problems) or "nothing was compiled (a kernel out of a package's cache is not)"
            raise SpecError(f"no kernel was captured: {why}", problems=tuple(self.problems))
        notes = [f"# not captured: {line}" for line in self.problems]
        head = ["# Written by fusekit.capture. Every tensor is \"inout\": say \"input\" or \"output\" where you know.",
                *notes, "schema = 1", 'summary = "Kernels found by fusekit.capture"']  # fmt: skip
        tables = (kernel.toml() for kernel in self.kernels)
        return "\n\n".join(["\n".join(head) + "\n", *tables]).replace("\n\n\n", "\n\n")

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes `toml()` to the file `path` and returns it; `fusekit build FILE --allow-extern` builds it. Raises
        UsageError for a file whose name no spec file can have.
        """
        text, file = self.toml(), Path(path)
        if file.suffix != ".toml" or not re.fullmatch(NAME_PATTERN, file.stem):
            raise UsageError(
                f"{file}: a spec file is NAME.toml, and NAME begins the names of its kernels; {NAME_RULE}; give another"
            )
        file.write_text(text, encoding="utf-8")
        return file

    def _hear(self, compiler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None] | None:
        kernel = _describe(compiler, args, kwargs)
        return None if kernel is None else lambda: self._add(kernel)

    def _add(self, kernel: Captured | str) -> None:
        with self._guard:
            if isinstance(kernel, str):
                self.problems += [] if kernel in self.problems else [kernel]
                return
            same = (kernel.arch, kernel.source, kernel.params)
            if any((other.arch, other.source, other.params) == same for other in self.kernels):
                return
            taken = {other.name for other in self.kernels}
            names = itertools.chain([kernel.name], (f"{kernel.name}-{count}" for count in itertools.count(2)))
            self.kernels.append(replace(kernel, name=next(name for name in names if name not in taken)))


def capture() -> Capture:
    """Collects what the CuTe DSL compiles in the `with` block, in this process, on any of its threads.

    Captured are calls of `cute.compile`, however it was imported, also `cute.compile[options]`, host functions that are
    called without it, and calls by packages such as QuACK; not kernels that come out of a package's own cache. The
    calls do what they always do. A call inside the block is compiled once. One that a spec cannot repeat (a function
    of `__main__`, a class made as it runs, an object of the framework as argument) is a line of `Capture.problems`,
    with what to do. The DSL's environment variables are not captured, but for the architecture. What the call reaches
    of its modules' values is recorded where their sources do not give it; a build that finds other values after a
    fresh import is refused.

    Blocks may be nested, and be open in several threads at once: each collects everything.

    Returns
    -------
    Capture
        A context manager; `kernels` and `problems` are filled in the block.

    Raises
    ------
    ToolchainError
        On entering, where the DSL is not installed.

    Examples
    --------
    ::

        with fusekit.capture() as captured:
            train_one_step()
        captured.write("captured.toml")          # fusekit build captured.toml --allow-extern
    """
    return Capture()


def _describe(compiler: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Captured | str | None:
    """The call as a kernel, or why it is none."""
    if not args or not callable(args[0]):
        return None  # the DSL's own error follows
    function, *given = args
    named = {key: value for key, value in kwargs.items() if key not in ("options", "is_experimental")}
    try:
        options = dsl.compile_options(kwargs.get("options"), compiler)
        return captured(function, tuple(given), named, options, dsl.arch_of(options))
    except BuildError as error:
        return f"{getattr(function, '__qualname__', type(function).__qualname__)}: {error}"
    except Exception as error:  # the caller's program goes on
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return f"{name}: {type(error).__name__}: {error}; report it, with what was compiled"


def _options(options: Any) -> str:
    """What of the options changes the cubin, as the DSL's option string."""
    words = []
    for kind, option in options.options.items():
        name, default = dsl.option_flag(kind)
        default = OPT_LEVEL if name == "opt-level" else default
        if option.value == default or name in _OF_NO_CUBIN:
            continue
        if name not in _OF_THE_CUBIN:
            raise BuildError(
                f"it is compiled with the option {name or kind.__name__} = {option.value!r}, which a spec cannot say;"
                f" specs know {', '.join(sorted(_OF_THE_CUBIN))}; compile it without"
            )
        words.append(f"--{name}" if option.value is True else f"--{name}={str(option.value).strip(chr(39))}")
    return " ".join(words)


def tables_of(traced: Sequence[Leaf]) -> dict[str, dict[str, Any]]:
    """The `arguments` of a spec for run-time arguments: each tensor's role and the names of its extents. What a call
    was given does not tell what is read and what is written: every tensor is `inout`.
    """
    tables: dict[str, dict[str, Any]] = {}
    names = {leaf.name for leaf in traced}
    for leaf in traced:
        if leaf.kind == TENSOR:
            shape = [extent if isinstance(extent, int) else extent._symbol for extent in leaf.shape]
            tables[leaf.name] = {"role": "inout", "shape": shape}
        elif leaf.kind == POINTER:
            tables[leaf.name] = {"role": "inout", "shape": [_free(f"{leaf.name}_elements", names)]}
    return tables


def _free(name: str, taken: set[str]) -> str:
    """The name, or a longer one, that is not taken."""
    return name if name not in taken else _free(f"{name}_", taken)


def _distributions(call: fakes.Call) -> tuple[str, ...]:
    """The installed distributions of the modules that the call names, but for the DSL's."""
    known, names = _foreign(), set[str]()
    for module in sorted(call.modules):
        if module.partition(".")[0] in _KNOWN_MODULES:
            continue
        owners = known.path_to(call.source.partition(":")[0], module)
        if owners is None:
            raise BuildError(
                f"it is given an object of the module {module}, which the module of {call.source} does not import: no"
                f" key would know its source; import {module} there"
            )
        names |= set(owners)
    return tuple(sorted(names))


@cache
def _foreign() -> Foreign:
    return Foreign()  # which asks for all that is installed, once


def _name(source: str) -> str:
    """A kernel's name: the callable's, in the letters that a name may have."""
    return re.sub(r"[^a-z0-9._-]+", "-", source.rpartition(":")[2].lower()).strip("-._")[:60] or "kernel"


def _lines(value: Any) -> str:
    """A value of TOML; a long list has a line for each item."""
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + "".join(f"  {toml_value(item)},\n" for item in value) + "]"
    return toml_value(value)


def toml_value(value: Any) -> str:
    """A JSON value as TOML has it."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return json.dumps(value)


def toml_key(name: str) -> str:
    """A key as TOML has it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
