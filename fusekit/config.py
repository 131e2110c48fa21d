"""The one frozen configuration, and the one place where the environment is read.

| variable | meaning |
|---|---|
| `FUSEKIT_STORE` | folder of the writable store; default: the platform's user cache folder |
| `FUSEKIT_STORES` | read-only store layers, `:`-separated, searched after the writable one |
| `NO_COLOR` | when set to anything, output has no colour |
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fusekit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Config:
    """What the library needs to know about its surroundings.

    store: absolute path of the writable store (it need not exist yet). layers: absolute paths of read-only stores, in
    the order in which they are searched after `store`. color: whether a terminal may be coloured.
    """

    store: Path
    layers: tuple[Path, ...] = ()
    color: bool = True

    @classmethod
    def from_environment(
        cls, store: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None
    ) -> "Config":
        """The configuration of this process; `store` (a folder) wins over FUSEKIT_STORE. Makes no folder.

        A layer that is named twice, or is the writable store itself, counts once. Raises UsageError for a path that
        cannot be expanded (`~nobody/x`) or is empty.
        """
        environ = os.environ if environ is None else environ
        if store is not None:
            root = _absolute("--store", os.fspath(store))
        elif environ.get("FUSEKIT_STORE"):
            root = _absolute("FUSEKIT_STORE", environ["FUSEKIT_STORE"])
        else:
            from platformdirs import user_cache_path  # only here: a named store need not pay for this import

            root = user_cache_path("fusekit", appauthor=False)
        named = [_absolute("FUSEKIT_STORES", part) for part in environ.get("FUSEKIT_STORES", "").split(":") if part]
        layers = tuple(layer for layer in dict.fromkeys(named) if layer != root)
        return cls(store=root, layers=layers, color=not environ.get("NO_COLOR"))

    @property
    def roots(self) -> tuple[Path, ...]:
        """Every store layer in search order, the writable one first."""
        return (self.store, *self.layers)


def _absolute(source: str, text: str) -> Path:
    if not text:
        raise UsageError(f"{source} is empty; a store is a folder; give its path or leave {source} out")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{source} = '{text}' names no folder: {error}; give an absolute path") from error
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolves `..` without following links
