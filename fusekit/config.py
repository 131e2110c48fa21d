"""The one frozen configuration, and the one place where the environment is read.

| variable | meaning |
|---|---|
| `FUSEKIT_STORE` | folder of the writable store; default: the platform's user cache folder |
| `FUSEKIT_STORES` | read-only roots, `:`-separated, searched after the writable one |
| `FUSEKIT_TRUSTED_KEYS` | files of public keys, `:`-separated; if set, only what they signed loads; empty: nothing |
| `FUSEKIT_SIGNING_KEY` | file of the private key that signs what is built, exported and locked |
| `FUSEKIT_ALLOW_EXTERN` | `1`: a build may run the Python of foreign kernels' specs |
| `FUSEKIT_LOCK` | file of a lock: a library loads only what it lists |
| `FUSEKIT_DEBUG` | `1`: every launch is waited for, and an error names the launch that caused it |
| `FUSEKIT_NVTX` | `1`: kernels and passes are NVTX ranges in a profiler; needs the package nvtx |
| `FUSEKIT_MISS` | `warn`: `fusekit exec` reports what it compiles; `error`: it raises an error instead |
| `FUSEKIT_REMOTE` | folder or URL that `fusekit exec` asks for what the store lacks, before it compiles |
| `FUSEKIT_VERIFY` | share (0 to 1) of the hits of `fusekit exec` that are compiled as well and compared |
| `FUSEKIT_TRUSTED_USERS` | users, `:`-separated, whose unsigned entries `fusekit exec` loads, as root's and yours |
| `NO_COLOR` | when set to anything, output has no colour |
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from fusekit.errors import ArgumentError, UsageError

if TYPE_CHECKING:
    from fusekit.project import Project


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of the library: stores, keys, and what a build may do.

    store: absolute path of the writable root of the store (it need not exist yet).
    read_only_roots: absolute paths of roots that are searched after `store`, in this order.
    color: whether a terminal may be coloured.
    trusted_keys: absolute paths of files of public keys. Only what one of these keys has signed is loaded; nothing if
        the tuple is empty. None: signatures are not checked.
    signing_key: absolute path of the private key that signs what is built, exported and locked.
    allow_extern: whether a build may run the Python that specs of foreign kernels name.
    debug: whether every launch is waited for, so that an error names the launch that caused it.
    nvtx: whether kernels and passes are NVTX ranges in a profiler.
    only_keys: absolute paths of files of public keys that a project allows: of `trusted_keys`, or of all if that is
        None, only these count. None: not narrowed.
    lock: absolute path of a lock, to which a library keeps; see fusekit.store.lockfile.
    """

    store: Path
    read_only_roots: tuple[Path, ...] = ()
    color: bool = True
    trusted_keys: tuple[Path, ...] | None = None
    signing_key: Path | None = None
    allow_extern: bool = False
    debug: bool = False
    nvtx: bool = False
    only_keys: tuple[Path, ...] | None = None
    lock: Path | None = None

    def __post_init__(self) -> None:
        """Raises ArgumentError for values of other types."""
        rule = "a pathlib.Path; fusekit.Config.from_environment(FOLDER) takes text as well"
        ArgumentError.unless(Path, "store", self.store, rule)
        ArgumentError.unless(Path | None, "signing_key", self.signing_key, rule)
        ArgumentError.unless(Path | None, "lock", self.lock, rule)
        for name, paths in (
            ("read_only_roots", self.read_only_roots),
            ("trusted_keys", self.trusted_keys),
            ("only_keys", self.only_keys),
        ):
            if paths is not None or name == "read_only_roots":
                ArgumentError.unless(tuple, name, paths, f"a tuple of paths, each {rule}")
                for path in paths or ():
                    ArgumentError.unless(Path, name, path, rule)

    @classmethod
    def given(cls, config: "Config | None") -> "Config":
        """`config`, or that of the environment if it is None. Raises ArgumentError for other types."""
        if config is None:
            return cls.from_environment()
        rule = "a fusekit.Config; fusekit.Config.from_environment(FOLDER) gives one for the store in a folder"
        ArgumentError.unless(cls, "config", config, rule)
        return config

    @classmethod
    def from_environment(
        cls,
        store: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        signing_key: str | os.PathLike[str] | None = None,
        project: "Project | None" = None,
    ) -> "Config":
        """The configuration of this process; `store` (a folder) wins over FUSEKIT_STORE, `signing_key` (a file) over
        FUSEKIT_SIGNING_KEY, and the environment over `project`. Makes no folder and reads no file.

        A root that is given twice, or is the writable one, counts once. Raises UsageError for a path that cannot be
        expanded (`~nobody/x`) or is empty, ArgumentError for a value that is not a path.
        """
        for name, path in (("store", store), ("signing_key", signing_key)):
            ArgumentError.unless(str | os.PathLike | None, name, path, "a path")
        environ = os.environ if environ is None else environ
        root = _named("--store", store, "FUSEKIT_STORE", environ) or (project.store if project is not None else None)
        if root is None:
            root = _cache_folder()
        lower = _several("FUSEKIT_STORES", environ)
        if project is not None and "FUSEKIT_STORES" not in environ:
            lower = tuple(dict.fromkeys(project.read_only_roots))
        read_only = tuple(path for path in lower if path != root)
        # A variable that is set and empty trusts nobody: a script may have left it empty by mistake.
        trusted = None
        if "FUSEKIT_TRUSTED_KEYS" in environ:
            trusted = _several("FUSEKIT_TRUSTED_KEYS", environ, "a file of public keys")
        return cls(
            store=root,
            read_only_roots=read_only,
            color=not environ.get("NO_COLOR"),
            trusted_keys=trusted,
            signing_key=_named("--sign", signing_key, "FUSEKIT_SIGNING_KEY", environ, "a private key"),
            allow_extern=_flag("FUSEKIT_ALLOW_EXTERN", "lets builds run the Python of foreign kernels' specs", environ),
            debug=_flag("FUSEKIT_DEBUG", "waits for every launch", environ),
            nvtx=_flag("FUSEKIT_NVTX", "marks kernels and passes for a profiler", environ),
            only_keys=None if project is None else project.keys,
            lock=_named("", None, "FUSEKIT_LOCK", environ, "a lock") or (project.lock if project is not None else None),
        )

    @property
    def roots(self) -> tuple[Path, ...]:
        """The roots of the store in search order, the writable one first."""
        return (self.store, *self.read_only_roots)


@dataclass(frozen=True, slots=True)
class CuteConfig:
    """The configuration of `fusekit exec` and `fusekit.cute.install`.

    config: the store. miss: "", "warn" or "error": what a compilation does beside compiling. verify: share of the hits
    that are compiled as well. trusted_users: user ids whose unsigned entries are loaded. report: file of events; None:
    none are written. remote: folder or URL that is asked for what the store lacks; "": none is. level: 1: a trace is
    left out where what it read is as it was; 2: every call is traced.
    """

    config: Config
    miss: str = ""
    verify: float = 0.0
    trusted_users: frozenset[int] = frozenset()
    report: Path | None = None
    remote: str = ""
    level: int = 2

    @classmethod
    def from_environment(cls, config: Config | None = None, environ: Mapping[str, str] | None = None) -> "CuteConfig":
        """The configuration of this process: of `fusekit exec` if that started it, else with the store of `config`.
        Raises UsageError for a value that a variable cannot have.
        """
        environ = os.environ if environ is None else environ
        report, level = None, 2
        if config is None and EXEC in environ:
            config, report, level = _unpacked(environ[EXEC])
        miss = environ.get("FUSEKIT_MISS", "")
        if miss not in ("", "warn", "error"):
            raise UsageError(f"FUSEKIT_MISS = '{miss}'; it is warn or error; set one of them, or leave it out")
        text = environ.get("FUSEKIT_VERIFY", "")
        try:
            verify = float(text or 0)
        except ValueError:
            verify = -1.0
        if not 0 <= verify <= 1:
            raise UsageError(f"FUSEKIT_VERIFY = '{text}'; it is a share of the hits, 0 to 1; set such a number: 0.01")
        users = [part for part in environ.get("FUSEKIT_TRUSTED_USERS", "").split(":") if part.strip()]
        for user in users:
            if not user.isascii() or not user.isdecimal():
                raise UsageError(
                    f"FUSEKIT_TRUSTED_USERS names '{user}'; it takes numbers of users, with : between"
                    " them; `id -u NAME` gives one"
                )
        if config is None:
            config = Config.from_environment(environ=environ)
        remote = environ.get("FUSEKIT_REMOTE", "")
        return cls(config, miss, verify, frozenset(map(int, users)), report, remote, level)


_TOOLKIT = frozenset({"CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_PATH"})
EXEC = "FUSEKIT_EXEC"
"""Set by `fusekit exec` for its children."""


def program_environment() -> dict[str, str]:
    """What a program has of the environment of this process."""
    return dict(os.environ)


def exec_environment(cute: CuteConfig, folder: Path, report: Path | None, *, carries: bool = False) -> dict[str, str]:
    """The environment of a program that `fusekit exec` starts: this one, with `folder` before Python's path, the
    configuration, and the file for its events. carries: it carries other caches as well.
    """
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    values = {field.name: getattr(cute.config, field.name) for field in fields(cute.config)}
    packed = json.dumps({**values, "report": report, "level": cute.level, "carries": carries}, default=str)
    return {**program_environment(), "PYTHONPATH": os.pathsep.join(paths), EXEC: packed}


def refuses_misses() -> bool:
    """Whether this process may compile nothing with the CuTe DSL: FUSEKIT_MISS=error."""
    return os.environ.get("FUSEKIT_MISS") == "error"


def compiler_environment() -> dict[str, str]:
    """The variables by which this process sets the CuTe DSL, and by which that finds a CUDA toolkit."""
    return {name: value for name, value in os.environ.items() if name.startswith("CUTE_DSL_") or name in _TOOLKIT}


def _unpacked(text: str) -> tuple[Config, Path | None, int]:
    values = json.loads(text)
    level = values.pop("level", 2)
    values.pop("carries", None)
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(map(Path, value))
        elif isinstance(value, str):
            values[name] = Path(value)
    report = values.pop("report")
    return Config(**values), report, level


def _flag(variable: str, meaning: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise UsageError(f"{variable} = '{value}'; 1 {meaning}, 0 does not")
    return value == "1"


def _named(
    option: str, given: str | os.PathLike[str] | None, variable: str, environ: Mapping[str, str], what: str = "a store"
) -> Path | None:
    """The path of an option, else of a variable; None if neither is given, or the variable is empty."""
    if given is not None:
        return _absolute(option, os.fspath(given), what)
    return _absolute(variable, environ[variable], what) if environ.get(variable) else None


def compiler_cache() -> Path | None:
    """The folder of the compiler's cache of installed files; None for a user without a home folder."""
    return _user_cache("fusekit-compiler")


def _user_cache(name: str) -> Path | None:
    from platformdirs import user_cache_path  # imported only if no store is given

    try:
        path = user_cache_path(name, appauthor=False)
    except RuntimeError:  # neither HOME nor an entry in the list of users, as in some containers
        return None
    return path if path.is_absolute() else None


def _cache_folder() -> Path:
    path = _user_cache("fusekit")
    if path is None:
        raise UsageError(
            "no store is given, and this user has no home folder for one; name it with --store or FUSEKIT_STORE"
        )
    return path


def _several(variable: str, environ: Mapping[str, str], what: str = "a store") -> tuple[Path, ...]:
    named = [_absolute(variable, part, what) for part in environ.get(variable, "").split(":") if part.strip()]
    return tuple(dict.fromkeys(named))


def _absolute(source: str, text: str, what: str = "a store") -> Path:
    if not text:
        raise UsageError(f"{source} is empty; it names the path of {what}; give it or leave {source} out")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{source} = '{text}' names no path of {what}: {error}; give an absolute path") from error
    try:
        return Path(os.path.abspath(path))  # noqa: PTH100 - resolves `..` without following links
    except FileNotFoundError:
        raise UsageError(
            f"{source} = '{text}' is a relative path of {what}, and the current folder is gone; give an absolute path"
        ) from None
