"""The source files that decide a kernel, found by following imports in the syntax tree, without running any of them.

Followed are `fusekit.kernels`, `fusekit.compiler` and `fusekit.abi`, from the family module and from what compiles its
plan (`fusekit.compiler.trace`) on. Of other rooms that a followed file imports from, such as constants of
`fusekit.spec`, the file itself counts, and its own imports are not followed. The values of a spec, with what it derives
from them (`fusekit.spec.model`, `fusekit.spec.budget`), always take part. The DSL reaches a key by its version. The
proof of a launch record changes nothing in it: its modules are left out.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fusekit.errors import BuildError

_FOLLOWED = ("kernels", "compiler", "abi")
_ALWAYS = ("fusekit.compiler.trace", "fusekit.spec.budget", "fusekit.spec.model")
_APART = frozenset({"fusekit.errors", "fusekit.compiler.prove", "fusekit.compiler.recorder"})
# What else a followed file may import. `cuda` gives the type of a stream and nothing that reaches a cubin.
_KNOWN = frozenset({"fusekit", "cutlass", "cuda"}) | sys.stdlib_module_names
_DYNAMIC = frozenset({"importlib", "imp", "runpy", "pkgutil"})
# What it imports is foreign, and named by fields of its own (fusekit.compiler.foreign).
_FOREIGN = frozenset({"compiler/extern.py", "compiler/fakes.py"})


def closure(root: str, package: Path | None = None) -> dict[str, str]:
    """Path relative to the package, with '/' -> SHA-256 of the file, for every source file behind the module `root`.

    package: the folder of `fusekit`; default: this one's. Raises BuildError for an import whose source cannot be
    identified: of a package that no key names, or one computed at run time.
    """
    package = package or Path(__file__).parents[1]
    digests: dict[str, str] = {}
    pending = [root, *_ALWAYS]
    while pending:
        module = pending.pop()
        for path in _files(module, package):
            name = path.relative_to(package).as_posix()
            if name not in digests:
                data = path.read_bytes()
                digests[name] = hashlib.sha256(data).hexdigest()
                if name.startswith(tuple(f"{room}/" for room in _FOLLOWED)):
                    pending += _imports(data, path, package)
    return dict(sorted(digests.items()))


def changed(digests: Mapping[str, str], package: Path | None = None) -> list[str]:
    """Which of the files that `closure` gave are no longer the same, or gone. Safe from any thread.

    While none of them is, neither is the closure: imports stand in the files. So nothing is parsed again, which several
    threads of CPython 3.11 cannot do at once.
    """
    package = package or Path(__file__).parents[1]
    return [name for name, digest in digests.items() if _digest(package / name) != digest]


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _files(module: str, package: Path) -> list[Path]:
    """The files that an import of `module` runs: its packages' own below fusekit, and its own."""
    parts = module.split(".")[1:]
    files = []
    for count in range(1, len(parts) + 1):
        at = package.joinpath(*parts[:count])
        if (at / "__init__.py").is_file():
            files.append(at / "__init__.py")
        elif at.with_suffix(".py").is_file():
            files.append(at.with_suffix(".py"))
        elif count < len(parts):
            raise BuildError(f"source of {module} not found at {at}; reinstall fusekit")
    return files


def _imports(data: bytes, path: Path, package: Path) -> list[str]:
    """The modules to follow from one file; a name imported from a package may be a module of it, so both are given."""
    try:
        tree = ast.parse(data, str(path))
    except SyntaxError as error:
        raise BuildError(f"{path}: {error}; mend it") from error
    here = ["fusekit", *path.relative_to(package).with_suffix("").parts]
    # Names stand anywhere, import statements only among statements, of which there are few.
    nodes = list(ast.walk(tree) if b"__import__" in data or not data.isascii() else _statements(tree))
    if any(isinstance(node, ast.Name) and node.id == "__import__" for node in nodes):
        raise _unidentified(path, "__import__")
    found = list(stated(nodes, here))
    foreign = path.relative_to(package).as_posix() in _FOREIGN
    for module in found:
        top = module.partition(".")[0]
        if foreign and top == "importlib":
            continue
        if top not in _KNOWN or top in _DYNAMIC:
            raise _unidentified(path, module)
    own = [module for module in found if module.startswith("fusekit.")]
    return [module for module in own if not {module, module.rpartition(".")[0]} & _APART]


def stated(nodes: Iterable[ast.AST], here: list[str]) -> Iterator[str]:
    """What the import statements among `nodes` name; a name out of a package may be a module of it, so both are given.

    here: the parts of the name of the file that they are in, `__init__` included.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*here[: -node.level], *([node.module] if node.module else [])] if node.level else [node.module or ""]
            )
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement below `tree`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, blocks, ())
            if isinstance(inside, list):  # the body of an expression is none
                waiting += inside
        yield node


def _unidentified(path: Path, what: str) -> BuildError:
    return BuildError(
        f"{path.name} imports {what}, whose source no key can name; a kernel imports fusekit, cutlass and the standard"
        " library, by plain import statements; take it out"
    )
