"""The source that decides a kernel, found by following imports in the syntax tree, without running any of it.

Followed are `fusekit.kernels`, `fusekit.compiler`, `fusekit.plan` and `fusekit.abi`, from the planner, from the
modules that the kernel's plan names (its operands, its activation, its epilogue), and from what compiles it
(`fusekit.compiler.trace`) on. Of other rooms that a followed file imports from, such as constants of `fusekit.spec`,
the module itself counts, and neither its imports nor its package. The DSL reaches a key by its version. The proof of a
launch record changes nothing in it: its modules are left out; so is the table of operations that work token by token,
of which a spec has its own row.

Of a file its syntax tree counts, not how it is written down: no comment, no line's number or length reaches a cubin.
What is for people does not count either: docstrings, the text of a `raise`; and of an operand its key, words and rules,
since what comes of them is in the spec. The package of an operation that is not fusekit's counts whole, with what
it imports of fusekit.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fusekit.compiler.digests import load, private, save
from fusekit.config import compiler_cache
from fusekit.errors import BuildError

_FOLLOWED = ("kernels", "compiler", "plan", "abi")
_ALWAYS = ("fusekit.compiler.trace",)
_APART = frozenset({"fusekit.errors", "fusekit.compiler.prove", "fusekit.compiler.recorder", "fusekit.plan.tokens"})
# What else a followed file may import. `cuda` gives the type of a stream and nothing that reaches a cubin.
_KNOWN = frozenset({"fusekit", "cutlass", "cuda"}) | sys.stdlib_module_names
_DYNAMIC = frozenset({"importlib", "imp", "runpy", "pkgutil"})
# What these import by name is named elsewhere: a foreign package in fields of its own (fusekit.compiler.foreign),
# operands, activations and the architecture by the plan, a kernel that works token by token by its operation's row.
_BY_NAME = frozenset(
    {"compiler/fakes.py", "compiler/gemm.py", "compiler/source_call.py", "compiler/tokens.py"}
    | {"plan/operands/__init__.py", "plan/activations/__init__.py", "plan/arch/__init__.py", "plan/packages.py"}
)
_OPERANDS = "plan/operands/"
_KEPT = 512  # texts whose parts are kept; a package has half as many
_FOR_PEOPLE = frozenset({"field", "FIELD", "words", "refused", "rules"})


@dataclass(frozen=True, slots=True)
class _File:
    """raw: SHA-256 of its bytes; digest: of what counts; imports: modules to follow."""

    path: Path
    raw: str
    digest: str
    imports: tuple[str, ...]


class Parsed:
    """What a key needs of a source file, (digest, imports), by the file's name and text: parsing takes longer than all
    else of a key. Kept in `folder` for the next process, unless that is None.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path: Path | None = None
        self._rows: dict[str, Any] = {}
        self._used: dict[str, Any] = {}
        self._new = False
        if folder is not None:
            rules = Path(__file__).read_bytes() + sys.version.encode()
            self._path = folder / f"sources-{_sha(rules)[:32]}.json"
            self._rows = load(self._path)

    def __call__(self, name: str, data: bytes) -> tuple[str, tuple[str, ...]]:
        """Raises SyntaxError, and BuildError for an import whose source cannot be identified."""
        mark = _sha(f"{name}\0".encode() + data)
        if mark not in self._rows:
            words, nodes = _what_counts(ast.parse(data, name), name)
            self._rows[mark] = [_sha(" ".join(words).encode()), _imports(nodes, name) if _followed(name) else []]
            self._new = True
        digest, imports = self._used[mark] = self._rows[mark]
        return digest, tuple(imports)

    def save(self) -> None:
        """Writes what is new."""
        if self._new and self._path is not None:
            save(self._path, self._rows if len(self._rows) <= _KEPT else self._used)
            self._new = False


@dataclass(frozen=True, slots=True)
class Sources:
    """The source files of a package, each read once. package: the folder of `fusekit`; default: this one's. parsed:
    what is known of texts already.
    """

    package: Path = field(default_factory=lambda: Path(__file__).parents[1])
    _files: dict[str, _File] = field(default_factory=dict)
    _paths: dict[str, str] = field(default_factory=dict)
    parsed: Parsed = field(default_factory=lambda: Parsed(private(compiler_cache())))

    def closure(self, roots: Iterable[str]) -> dict[str, str]:
        """Path relative to the package, with '/' -> digest, for every source file after the modules `roots`.

        Raises BuildError for an import whose source cannot be identified: of a package that no key names, or one
        computed at run time.
        """
        digests: dict[str, str] = {}
        pending, seen = [*roots, *_ALWAYS], set[str]()
        while pending:
            module = pending.pop()
            if module in seen:
                continue
            seen.add(module)
            if module.partition(".")[0] != "fusekit":
                for name, file in _whole_package(module).items():
                    digests[name] = self._files.setdefault(name, file).digest
                    pending += file.imports
                continue
            around, name = module.rpartition(".")[0], self._file(module)
            if _followed(name) and "." in around:
                pending.append(around)
            if name and name not in digests:
                file = self._read(name, self.package / name)
                digests[name] = file.digest
                pending += file.imports
        self.parsed.save()
        return dict(sorted(digests.items()))

    def changed(self, digests: Mapping[str, str]) -> list[str]:
        """Which of the files that `closure` gave are no longer the same, or gone. Safe from any thread.

        While none of them is, neither is the closure: imports are in the files. So nothing is parsed again, which
        several threads of CPython 3.11 cannot do at once.
        """
        files = {name: self._files.get(name) for name in digests}
        return [
            name
            for name, file in files.items()
            if file is None or file.digest != digests[name] or file.raw != _raw(file.path)
        ]

    def _file(self, module: str) -> str:
        """The path of the module's own file, below the package; "" for what is no module, but a name in one."""
        if module not in self._paths:
            around, _, last = module.rpartition(".")
            inside = self._file(around) if "." in around else "__init__.py"
            if not inside:
                raise BuildError(f"source of {around} not found in {self.package}; reinstall fusekit")
            here = inside.removesuffix("__init__.py")  # of a package: a module that is a file holds names alone
            paths = (f"{here}{last}/__init__.py", f"{here}{last}.py") if last and here != inside else ()
            self._paths[module] = next((path for path in paths if (self.package / path).is_file()), "")
        return self._paths[module]

    def _read(self, name: str, path: Path) -> _File:
        if name not in self._files:
            data = path.read_bytes()
            try:
                digest, imports = self.parsed(name, data)
            except SyntaxError as error:
                raise BuildError(f"{path}: {error}; fix it") from error
            self._files[name] = _File(path, _sha(data), digest, imports)
        return self._files[name]


def closure(root: str, package: Path | None = None, modules: Iterable[str] = ()) -> dict[str, str]:
    """The closure of one planner's module, and of `modules` that a plan names; see `Sources.closure`."""
    return (Sources() if package is None else Sources(package)).closure((root, *modules))


def _whole_package(module: str) -> dict[str, _File]:
    """Every file of the package of an operation that is not fusekit's; they lead to what they import of fusekit."""
    top = module.partition(".")[0]
    spec = find_spec(top)
    if spec is None or not spec.origin:
        raise BuildError(f"the package {top} is not found; install it")
    origin = Path(spec.origin)
    folder = origin.parent if spec.submodule_search_locations else origin
    files = {}
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
        data = path.read_bytes()
        here = [top, *path.relative_to(folder).with_suffix("").parts]
        modules = stated(ast.walk(ast.parse(data, str(path))), here)
        imports = [module for module in modules if module.startswith("fusekit.")]
        name = f"{top}/{path.relative_to(folder).as_posix()}" if folder.is_dir() else path.name
        files[name] = _File(path, _sha(data), _sha(data), tuple(imports))
    return files


def _followed(name: str) -> bool:
    return name.partition("/")[0] in _FOLLOWED


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _raw(path: Path) -> str | None:
    try:
        return _sha(path.read_bytes())
    except OSError:
        return None


def _what_counts(tree: ast.AST, name: str) -> tuple[list[str], list[ast.AST]]:
    """A file's tokens without what is for people, the same in every version of Python; and the imports
    and the names of imports among them.
    """
    words: list[str] = []
    imports: list[ast.AST] = []
    operand = name.startswith(_OPERANDS)

    def put(value: Any) -> None:
        kind = type(value)
        if kind is ast.Name:  # most nodes are of these two kinds
            words.append(f"={value.id}")
            if value.id == "__import__":
                imports.append(value)
        elif kind is ast.Constant or not issubclass(kind, ast.AST):
            words.append(repr(getattr(value, "value", value)))
        elif kind is ast.Raise or _is_text(value) or (operand and _is_for_people(value)):
            words.append("pass")
        else:
            if kind in (ast.Import, ast.ImportFrom):
                imports.append(value)
            words.append(kind.__name__)
            for field in kind._fields:
                part = getattr(value, field, None)
                if isinstance(part, list):
                    if part:
                        words.append(field)
                        for item in part:
                            put(item)
                        words.append("]")
                elif part is not None and field != "ctx":
                    words.append(field)
                    put(part)
            words.append(")")

    put(tree)
    return words, imports


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_for_people(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in _FOR_PEOPLE
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return bool(targets) and all(isinstance(target, ast.Name) and target.id in _FOR_PEOPLE for target in targets)


def _imports(nodes: list[ast.AST], name: str) -> list[str]:
    """The modules to follow from one file; a name imported from a package may be a module of it, so both are given."""
    if any(isinstance(node, ast.Name) for node in nodes):
        raise _unidentified(name, "__import__")
    modules = list(stated(nodes, ["fusekit", *name.removesuffix(".py").split("/")]))
    for module in modules:
        top = module.partition(".")[0]
        if name in _BY_NAME and top == "importlib":
            continue
        if top not in _KNOWN or top in _DYNAMIC:
            raise _unidentified(name, module)
    internal = [module for module in modules if module.startswith("fusekit.")]
    return [module for module in internal if not {module, module.rpartition(".")[0]} & _APART]


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


def _unidentified(name: str, what: str) -> BuildError:
    return BuildError(
        f"{name.rpartition('/')[2]} imports {what}, whose source no key can name; a kernel imports fusekit, cutlass and"
        " the standard library, by plain import statements; take it out"
    )
