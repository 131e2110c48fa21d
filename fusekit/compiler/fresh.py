"""What a compile process runs first: from then on modules are imported from their source.

Keys are made of the text of sources. Python takes byte code for a source's by its size and the second in which it was
written, which copies keep. So only the standard library, which is in no key, is imported from Python's byte code. Of
other files the code is kept in the user's cache folder by the digest of its source. A module that is there as byte code
alone is refused. Imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import sys
from collections.abc import Callable
from importlib import _bootstrap_external
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import MAGIC_NUMBER
from types import CodeType
from typing import Any

_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120 - pathlib is imported afterwards
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_DIGEST = 32


def main() -> None:
    """Serves: see `forkserver.main`."""
    descriptor, folder = prepare()
    from fusekit.compiler import forkserver

    forkserver.main(descriptor, folder)


def prepare() -> tuple[int, str]:
    """The arguments: a socket and the folder that keeps code, or ""; entries of sys.path follow them. Nothing imported
    from byte code is left.
    """
    descriptor, folder, *sys.path[:] = sys.argv[2:]
    install(folder)
    for name, module in list(sys.modules.items()):  # by files of installed packages that run before anything else
        if isinstance(getattr(module, "__loader__", None), SourceFileLoader) and not standard(module.__file__ or ""):
            del sys.modules[name]
    return int(descriptor), folder


def standard(path: str) -> bool:
    """Whether it is a file of Python's own library."""
    return path.startswith(_STANDARD) and not any(part in path for part in _INSTALLED)


def install(folder: str) -> None:
    """Replaces how this process gets the code of modules. folder: keeps it; "": each is compiled."""
    stored: Callable[[Any, str], CodeType | None] = SourceFileLoader.get_code
    sourceless: Callable[[Any, str], CodeType | None] = SourcelessFileLoader.get_code

    def get_code(self: Any, name: str) -> CodeType | None:
        return stored(self, name) if standard(self.path) else code_of(self, folder)

    def refuse(self: Any, name: str) -> CodeType | None:
        if standard(self.path):
            return sourceless(self, name)
        raise ImportError(f"{self.path} is byte code without its source, which no key can name; install the source")

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]
    SourcelessFileLoader.get_code = refuse  # type: ignore[method-assign,assignment]


def code_of(loader: Any, folder: str) -> CodeType:
    """The code of the loader's source."""
    data: bytes = loader.get_data(loader.path)
    if not folder:
        return loader.source_to_code(data, loader.path)  # type: ignore[no-any-return]
    where = f"{loader.path}\0{sys.flags.optimize}".encode(errors="surrogateescape")
    mark = hashlib.sha256(MAGIC_NUMBER + where + b"\0" + data).digest()
    kept = f"{folder}/{hashlib.sha256(MAGIC_NUMBER + where).hexdigest()[:32]}.code"
    try:
        with open(kept, "rb") as file:  # noqa: PTH123
            content = file.read()
        body = content[2 * _DIGEST :]
        if content[:_DIGEST] == mark and content[_DIGEST : 2 * _DIGEST] == hashlib.sha256(body).digest():
            return marshal.loads(body)  # type: ignore[no-any-return]
    except OSError:
        pass
    code: CodeType = loader.source_to_code(data, loader.path)
    body = marshal.dumps(code)
    with contextlib.suppress(OSError):  # compiled again next time
        kept_body = mark + hashlib.sha256(body).digest() + body
        _bootstrap_external._write_atomic(kept, kept_body, 0o600)  # type: ignore[attr-defined]
    return code


if __name__ == "__main__":
    main()
