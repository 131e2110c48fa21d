"""The project file, `fusekit.toml`: what a team builds, where its kernels are, and whom it trusts.

The command line finds it upwards from the current folder; `open_library` reads it only if it is given. Options win over
environment variables, those over the file, the file over defaults. `[trust]` can only narrow what is trusted, and
nothing in the file lets a build run foreign code.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusekit.errors import UsageError

FILE = "fusekit.toml"
LOCK = "fusekit.lock"
_LIMIT = 1 << 20
_MOST_TOKENS = 2**31 - 1
_TABLES = {
    "targets": ("specs", "models", "arch", "tokens", "toolchains"),
    "stores": ("store", "read_only"),
    "remotes": (),
    "trust": ("keys",),
    "defaults": (),
}
_REMOTE = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_VERSION = re.compile(r"(>=|<=|==|!=|>|<)\s*([0-9]+(?:\.[0-9]+)*)")


@dataclass(frozen=True, slots=True)
class Project:
    """A project file. All paths are absolute.

    path: of the file. specs: targets, as `fusekit build` takes them. models: Hugging Face configs, each a spec of its
    layers. arch: architectures of targets that name none; of packaged ones, instead of theirs. tokens: of a launch, for
    the models: variants for each count. toolchains: labels of those that may build, such as `cutlass-dsl-4.8.1-cu12`;
    empty: any. store, read_only_roots: as in `Config`. remotes: URL by name, in the order in which they are asked.
    keys: the only trusted keys; None: not narrowed. defaults: of spec files in `specs`.
    """

    path: Path
    specs: tuple[str, ...] = ()
    models: tuple[Path, ...] = ()
    arch: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    toolchains: tuple[str, ...] = ()
    store: Path | None = None
    read_only_roots: tuple[Path, ...] = ()
    remotes: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[Path, ...] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lock_path(self) -> Path:
        """The file of its lock, which `fusekit lock` writes."""
        return self.folder / LOCK

    @property
    def lock(self) -> Path | None:
        """The file of its lock; None if there is none yet."""
        return self.lock_path if os.path.lexists(self.lock_path) else None

    @property
    def folder(self) -> Path:
        return self.path.parent


def find_project(start: Path | None = None) -> Project | None:
    """The project of the folder `start` (default: the current one) or the nearest one above; None if there is none."""
    try:
        folder = Path.cwd() if start is None else start.absolute()
    except FileNotFoundError:  # the current folder is gone
        return None
    for path in (folder / FILE, *(above / FILE for above in folder.parents)):
        if os.path.isfile(path):  # noqa: PTH113 - False where nobody may look
            return read_project(path)
    return None


def read_project(path: str | os.PathLike[str]) -> Project:
    """The project in the file `path`, or in `fusekit.toml` of a folder. Raises UsageError."""
    given = Path(os.path.abspath(path))  # noqa: PTH100 - follows no link
    given = given / FILE if given.is_dir() else given
    try:
        with given.open("rb") as file:
            _check_owner(given, os.fstat(file.fileno()))
            data = file.read(_LIMIT + 1)
    except OSError as error:
        raise UsageError(f"{given}: {error.strerror or error}; name a {FILE}, or write one: `fusekit init`") from None
    if len(data) > _LIMIT:
        raise UsageError(f"{given} is longer than {_LIMIT} bytes; a project file is short; check it")
    try:
        document = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{given}: not TOML: {error}; see toml.io for the syntax") from None
    return _Reader(given, document).project()


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Refuses a file of somebody else in a folder of everybody, such as /tmp, where it would apply to all users."""
    open_to_all = path.parent.stat().st_mode & stat.S_IWOTH
    if open_to_all and status.st_uid not in (os.getuid(), 0):
        raise UsageError(
            f"{path} belongs to another user, in a folder where every user may write; it could name any store; work in "
            "another folder, or ask for the file to be removed"
        )


class _Reader:
    def __init__(self, path: Path, document: dict[str, Any]) -> None:
        self.path, self.document = path, document

    def project(self) -> Project:
        known = ("requires", *_TABLES)
        for name, value in self.document.items():
            if name not in known:
                self._unknown(name, f"it has {', '.join(known)}")
            elif name in _TABLES and not isinstance(value, dict):
                raise self._bad(name, value, f"it is a table; write [{name}]")
            for key in value if name in _TABLES else ():
                if _TABLES[name] and key not in _TABLES[name]:
                    self._unknown(f"{name}.{key}", f"[{name}] has {', '.join(_TABLES[name])}")
        self._requires()
        models = tuple(self._path(model) for model in self._texts("targets", "models"))
        store = self._value("stores", "store", None, lambda value: isinstance(value, str) and value, "it is a path")
        keys = self._texts("trust", "keys") if "trust" in self.document else None
        return Project(
            path=self.path,
            specs=tuple(map(self._target, self._texts("targets", "specs"))),
            models=models,
            arch=self._texts("targets", "arch"),
            tokens=self._tokens(),
            toolchains=self._texts("targets", "toolchains"),
            store=None if store is None else self._path(store),
            read_only_roots=tuple(map(self._path, self._texts("stores", "read_only"))),
            remotes=self._remotes(),
            keys=None if keys is None else tuple(map(self._path, keys)),
            defaults=dict(self.document.get("defaults", {})),
        )  # fmt: skip

    def _tokens(self) -> tuple[int, ...]:
        value = self.document.get("targets", {}).get("tokens", [])
        counts = value if isinstance(value, list) else [value]
        if not all(type(count) is int and 0 < count <= _MOST_TOKENS for count in counts):
            raise self._bad("targets.tokens", value, "it is the number of tokens of a launch, or a list of numbers")
        return tuple(counts)

    def _requires(self) -> None:
        from fusekit import __version__

        text = self.document.get("requires", "")
        parts = [part.strip() for part in text.split(",") if part.strip()] if isinstance(text, str) else [""]
        for part in parts:
            match = _VERSION.fullmatch(part)
            if match is None:
                raise self._bad("requires", text, 'it bounds the version of fusekit, such as ">=0.2" or ">=0.2,<0.4"')
            if not _holds(_numbers(__version__), match[1], _numbers(match[2])):
                raise UsageError(
                    f"{self.path} requires fusekit {text}, and this is {__version__}; install one that fits, or change "
                    "`requires`"
                )

    def _remotes(self) -> dict[str, str]:
        remotes = self.document.get("remotes", {})
        for name, url in remotes.items():
            if not _REMOTE.fullmatch(name) or not isinstance(url, str) or not url:
                raise self._bad(f"remotes.{name}", url, 'a remote is NAME = "URL", with a name in lower case')
        return {name: url if "://" in url else str(self._path(url)) for name, url in remotes.items()}

    def _target(self, text: str) -> str:
        """Paths are relative to the file; what is no path is the name of a packaged spec."""
        is_path = ".toml" in text or text.startswith((".", "/", "~")) or os.path.isdir(self.path.parent / text)  # noqa: PTH112
        return str(self._path(text)) if is_path and text != "-" else text

    def _path(self, text: str) -> Path:
        return Path(os.path.abspath(self.path.parent / Path(text).expanduser()))  # noqa: PTH100 - follows no link

    def _texts(self, table: str, name: str) -> tuple[str, ...]:
        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(item, str) and item for item in value)

        return tuple(self._value(table, name, [], fits, 'it is a list of texts, such as ["..."]'))

    def _value(self, table: str, name: str, default: Any, fits: Callable[[Any], Any], rule: str) -> Any:
        value = self.document.get(table, {}).get(name, default)
        if value is not default and not fits(value):
            raise self._bad(f"{table}.{name}", value, rule)
        return value

    def _unknown(self, name: str, rule: str) -> None:
        if "extern" in name:
            rule = "a project file never allows foreign code; use --allow-extern or FUSEKIT_ALLOW_EXTERN=1"
        raise UsageError(f"{self.path}: {name}: there is no such key; {rule}; leave it out")

    def _bad(self, name: str, value: Any, rule: str) -> UsageError:
        return UsageError(f"{self.path}: {name} = {repr(value)[:80]}; {rule}; correct it")


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r"[0-9]+", version)[:4]]
    while numbers and numbers[-1] == 0:  # 0.2 is 0.2.0
        numbers.pop()
    return tuple(numbers)


def _holds(version: tuple[int, ...], comparison: str, bound: tuple[int, ...]) -> bool:
    return {
        ">=": version >= bound, "<=": version <= bound, ">": version > bound, "<": version < bound,
        "==": version == bound, "!=": version != bound,
    }[comparison]  # fmt: skip
