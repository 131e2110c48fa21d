"""What a foreign source reads while it is built, and which modules it loads: what of it is in no key is refused.

A process that runs foreign packages listens to what Python opens and to what is read of the environment. A read counts
for the source where code of the source's own made it, itself or through packages that it calls. The CuTe DSL's reads
are not counted, and neither are those of a package that is being imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from fusekit.compiler.foreign import KEYED_BY_VERSION, Foreign, folder_of
from fusekit.compiler.fresh import standard
from fusekit.compiler.toolchain import normal
from fusekit.errors import BuildError
from fusekit.spec import ExternSpec

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_PROVIDERS = f"{_PACKAGE}providers{os.sep}"
_MACHINE = ("/dev/", "/proc/", "/sys/")
_INSTALLED = "site-packages", "dist-packages"
_MAPPING = frozenset({"<frozen os>", "<frozen _collections_abc>", os.__file__, sys.modules["collections.abc"].__file__})


@dataclass(slots=True)
class Watch:
    """Reads and their readers: (name, a file of the code that did it). modules: loaded before the source was. given:
    the environment variables that this process began with.
    """

    files: set[tuple[str, str]] = field(default_factory=set)
    variables: set[tuple[str, str]] = field(default_factory=set)
    modules: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()

    @classmethod
    def start(cls) -> Watch:
        """Listens from now on, in this process and those that are forked from it."""
        watch = cls(modules=frozenset(sys.modules), given=frozenset(os.environ))
        kind: Any = type(os.environ)
        stored: Callable[[Any, Any], Any] = kind.__getitem__

        def read(environ: Any, name: Any) -> Any:
            watch._variable(name)
            return stored(environ, name)

        kind.__getitem__ = read
        sys.addaudithook(watch._hear)
        return watch

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            fresh = flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_EXCL | os.O_TRUNC)
            if isinstance(path, str | bytes) and not fresh:
                self._file(os.fsdecode(path))
        elif event == "ctypes.dlopen" and isinstance(arguments[0], str) and os.sep in arguments[0]:
            self._file(arguments[0])

    def _file(self, path: str) -> None:
        self.files.update((path, reader) for reader in _readers(sys._getframe(2)))

    def _variable(self, name: Any) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename in _MAPPING:
            frame = frame.f_back
        if frame is not None and _is_source(frame.f_code.co_filename):
            self.variables.add((os.fsdecode(name) if isinstance(name, bytes) else str(name), frame.f_code.co_filename))


def _readers(frame: FrameType | None) -> Iterator[str]:
    """The files of a source's code that lead to `frame`, from the inside."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("<frozen importlib") or _is_compiler(file):
            return
        if _is_source(file):
            yield file
        frame = frame.f_back


def _is_compiler(file: str) -> bool:
    """Whether it is a file of the CuTe DSL or of fusekit, but for its providers of foreign kernels."""
    return "/nvidia_cutlass_dsl/" in file or (file.startswith(_PACKAGE) and not file.startswith(_PROVIDERS))


def _is_source(file: str) -> bool:
    return file.startswith("/") and not standard(file) and not _is_compiler(file)


def check(watch: Watch, spec: ExternSpec, fields: dict[str, str], foreign: Foreign) -> None:
    """Raises BuildError for what the build of `spec` has read or loaded and its key does not name."""
    module = spec.source.partition(":")[0]
    folder = Path(os.path.realpath(folder_of(module)))
    first = {*foreign.owned(module.partition(".")[0]), *map(normal, spec.distributions)}

    def counts(path: str) -> bool:
        """Whether it is a file of an installed package that has the source, or builds on the DSL."""
        return _installed(path) and any(name in first or foreign.on_dsl(name) for name in foreign.owned(_top(path)))

    def keyed(path: str) -> bool:
        """Whether it is an installed file whose distribution is in the key."""
        names = foreign.owned(_top(path)) if _installed(path) else []
        return ".dist-info/" in path or any(f"foreign.version.{name}" in fields for name in names)

    source = getattr(sys.modules.get(module), "__file__", None)
    fixed = {*watch.given, *spec.env}
    for name, reader in sorted(watch.variables):
        if name not in fixed and (not _installed(reader) or reader == source):
            raise BuildError(
                f"{_short(reader, folder)} reads the environment variable {name} while it is built, which is in no key;"
                f' list it in the spec: env = ["{name}"]'
            )
    modules = {
        os.path.realpath(file) for loaded in [*sys.modules.values()] if (file := getattr(loaded, "__file__", None))
    }
    listed = {os.path.realpath(folder / file) for file in spec.files}
    searched = {os.path.realpath(entry) for entry in sys.path}
    scratch = os.path.realpath(os.getcwd())  # noqa: PTH109
    for path, reader in sorted(watch.files):
        if _installed(reader) and not counts(reader):
            continue
        real = os.path.realpath(path)
        known = real in listed or real in modules or standard(real) or _is_compiler(real)
        written = os.path.exists(real) and real.startswith((scratch, str(Path(scratch).parent)))  # noqa: PTH110
        absent = real.startswith(_MACHINE) or not os.path.exists(real)  # noqa: PTH110
        path_entry = real in searched  # looked into by importlib.metadata
        if known or written or path_entry or keyed(real) or real == os.devnull or (_installed(reader) and absent):
            continue
        problem = f"{_short(reader, folder)} reads {path} while it is built, which is in no key"
        raise BuildError(f"{problem}; {_remedy(path, folder)}")
    for name, loaded in sorted(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if name not in watch.modules and file and os.path.isfile(file):  # noqa: PTH113
            _loaded(name, file, fields, foreign)


def _loaded(name: str, file: str, fields: dict[str, str], foreign: Foreign) -> None:
    """Raises BuildError for a module that the key does not name and that may be one of kernels."""
    top = name.partition(".")[0]
    if standard(file) or top in KEYED_BY_VERSION:
        return
    if owners := foreign.owned(top):
        odd = [owner for owner in owners if foreign.builds(owner) and f"foreign.files.{owner}" not in fields]
        if not odd or any(f"foreign.files.{owner}" in fields for owner in owners):
            return
        raise BuildError(
            f"the source has loaded {name} of {odd[0]}, which builds on the CuTe DSL and is in no key; list it in the"
            f' spec: distributions = ["{odd[0]}"]'
        )
    parts = Path(os.path.realpath(file)).parts
    if not any(f"foreign.module.{'/'.join(parts[start:])}" in fields for start in range(1, len(parts))):
        raise BuildError(
            f"the source has loaded the module {name} from {file}, which is in no key, as no import statement names it;"
            f" write import {name} in the module of the source"
        )


def _installed(path: str) -> bool:
    return _inside(path) is not None


def _top(path: str) -> str:
    """The top-level name of an installed file."""
    return (_inside(path) or path).partition(os.sep)[0].partition(".")[0]


def _inside(path: str) -> str | None:
    """The rest of the path below the folder that packages are installed in; None: it is not below one."""
    for name in _INSTALLED:
        _, found, rest = path.rpartition(f"{os.sep}{name}{os.sep}")
        if found:
            return rest
    folder = next((folder for folder in _targets(tuple(sys.path)) if path.startswith(folder)), None)
    return path.removeprefix(folder) if folder else None


@cache
def _targets(search: tuple[str, ...]) -> list[str]:
    """Folders that `pip install --target` filled: they are on the path and list distributions."""
    return [f"{entry.rstrip(os.sep)}{os.sep}" for entry in search if entry and any(Path(entry).glob("*.dist-info"))]


def _short(path: str, folder: Path) -> str:
    return path.removeprefix(f"{folder}{os.sep}")


def _remedy(path: str, folder: Path) -> str:
    if not path.startswith("/"):
        text = f"Path(__file__).with_name({json.dumps(Path(path).name)})"
        return f"a compile process has a current folder of its own: open {text}, and list it in the spec"
    real = os.path.realpath(path)
    if not real.startswith(f"{folder}{os.sep}"):
        return f"put it into {folder}, or below, and list it in the spec: files = [{json.dumps(Path(path).name)}]"
    return f"list it in the spec: files = [{json.dumps(_short(real, folder))}]"
