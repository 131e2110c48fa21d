"""What a foreign kernel is made from, as key fields: distributions, their files, the module that holds the source.

Nothing of it is imported or run. Of a source that belongs to no distribution (a file of the user's, a provider of
fusekit's) the file counts and every module that it imports and that belongs to none, wherever on Python's path. Of the
distributions that those import, that have the source, or that the spec lists, and of all that these require, however
many levels away, the version counts, and every file of those that build on the CuTe DSL: they require it, import it,
or require one that does. An import that no requirement states is followed from the source's own distributions, from
those that require the DSL, and from files that import it. What is loaded all the same and is in no key is refused in
the compile process (`unkeyed`).
"""

from __future__ import annotations

import ast
import csv
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from importlib import machinery, metadata
from pathlib import Path
from typing import Any, cast

from fusekit.compiler.digests import digest, private, read_all
from fusekit.compiler.options import variables
from fusekit.compiler.sources import stated
from fusekit.compiler.toolchain import IMPORTED, normal
from fusekit.config import compiler_cache
from fusekit.errors import BuildError, install
from fusekit.spec import ExternSpec

_EXTRAS = {"quack-kernels": "quack", "nvidia-cudnn-frontend": "cudnn"}
_DSL = "nvidia-cutlass-dsl"
KEYED_BY_VERSION = frozenset(
    {"cutlass", "iket", "nvidia_cutlass_dsl", "cuda", "fusekit"}
)  # whose versions and sources a key has
_ENDS = machinery.all_suffixes()
_ABSENT = "absent"
_FROM = re.compile(
    rb"(?:^|[;:])[ \t]*from[ \t]+([A-Za-z_][\w.]*)|\b(?:import_module|__import__)\([ \t]*['\"]([A-Za-z_][\w.]*)",
    re.MULTILINE,
)
_IMPORT = re.compile(rb"(?:^|[;:])[ \t]*import[ \t]+([A-Za-z_][\w., \t]*)", re.MULTILINE)
_FIRST = re.compile(r"^([^/,\n]+)", re.MULTILINE)  # part of the paths in a RECORD
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


@dataclass(frozen=True, slots=True)
class _Package:
    """A distribution. files: relative name -> SHA-256; imports: top-level names; kernels: those that files that import
    the DSL name; requires: distributions that are needed without any extra.
    """

    version: str
    files: Mapping[str, str]
    imports: frozenset[str]
    kernels: frozenset[str]
    requires: tuple[str, ...]
    on_dsl: bool

    @property
    def digest(self) -> str:
        return hashlib.sha256(
            "".join(f"{file}\0{self.files[file]}\n" for file in sorted(self.files)).encode()
        ).hexdigest()

    @property
    def builds(self) -> bool:
        return self.on_dsl or bool(self.kernels)


@dataclass(slots=True)
class Foreign:
    """Digests as of now; each distribution and module is read once. cache: folder that keeps digests of files."""

    cache: Path | None = field(default_factory=compiler_cache)
    _packages: dict[tuple[str, bool], _Package | None] = field(default_factory=dict)
    _modules: dict[str, tuple[dict[str, str], frozenset[str]]] = field(default_factory=dict)
    _owners: dict[str, list[str]] | None = None
    _loaded: dict[str, bool] = field(default_factory=dict)

    def fields(self, spec: ExternSpec) -> dict[str, str]:
        """The labelled key fields. Raises BuildError for a distribution or a module that is not installed."""
        entries: dict[str, str] = {}
        listed = {normal(name) for name in spec.distributions}
        for name in sorted(listed):
            distribution(name)  # which names what to install
        module = spec.source.partition(":")[0]
        owners = self.owned(module.partition(".")[0])
        first = listed | set(owners)
        imported: set[str] = set()
        if not owners:
            entries |= self._modules_of(module)
            for top in sorted(self._modules[module][1] - KEYED_BY_VERSION):
                imported |= set(self.owned(top))
                if not self.owned(top):
                    entries[f"foreign.version.{top}"] = _ABSENT
        whole, versions = self._reached(first, imported)
        for name in sorted(whole | first):
            package = self._package(name, first)
            assert package is not None
            entries[f"foreign.files.{name}"] = package.digest
            tops = (
                package.imports - KEYED_BY_VERSION - sys.stdlib_module_names
                if self._leads(name, first)
                else frozenset[str]()
            )
            for top in sorted(tops.union(other for other, names in self._all_owners().items() if name in names)):
                if not self.owned(top) and _root(top) is not None:  # as of an editable installation
                    entries |= self._modules_of(top, whole=True)
        for file in spec.files:
            path = folder_of(module) / file
            entries[f"foreign.file.{file}"] = digest(str(path)) if path.is_file() else _ABSENT
        given = variables(spec.env)
        entries |= {f"foreign.env.{name}": json.dumps(given.get(name)) for name in spec.env}
        for name in sorted(versions):
            package = self._package(name, first)
            entries[f"foreign.version.{name}"] = _ABSENT if package is None else package.version
        return dict(sorted(entries.items()))

    def _modules_of(self, module: str, *, whole: bool = False) -> dict[str, str]:
        if module not in self._modules or whole:
            self._modules[module] = _followed(module, self.owned, whole=whole)
        return {f"foreign.module.{name}": digest for name, digest in self._modules[module][0].items()}

    def _reached(self, first: Set[str], imported: Set[str]) -> tuple[set[str], set[str]]:
        """(Distributions whose files count, those whose version counts) from `first` and what is `imported` on."""
        edges: dict[str, tuple[set[str], set[str]]] = {}  # name -> what it requires, what its files import besides
        pending = [*first, *imported]
        while pending:
            name = pending.pop()
            if name in edges:
                continue
            package = self._package(name, first)
            if package is None:
                edges[name] = set(), set()
                continue
            tops = package.imports if self._leads(name, first) else package.kernels
            uses = {owner for top in tops - KEYED_BY_VERSION - sys.stdlib_module_names for owner in self.owned(top)} - {
                name
            }
            edges[name] = set(package.requires), uses - set(package.requires)
            pending += [*edges[name][0], *edges[name][1]]
        whole = {name for name in edges if (package := self._package(name, first)) is not None and package.builds}
        while more := {name for name, ends in edges.items() if name not in whole and whole & (ends[0] | ends[1])}:
            whole |= more
        versions, pending = set[str](), [*first, *imported]
        while pending:
            name = pending.pop()
            if name not in versions:
                versions.add(name)
                pending += [*edges[name][0], *(edges[name][1] & whole)]
        return whole & versions, versions

    def _leads(self, name: str, first: Set[str]) -> bool:
        """Whether what any file of a distribution imports is followed."""
        package = self._package(name, first)
        return name in first or (package is not None and package.on_dsl)

    def _package(self, name: str, first: Set[str]) -> _Package | None:
        """None where it is not installed. Of one that is neither in `first` nor requires the DSL its Python files."""
        key = name, name in first
        if key not in self._packages:
            try:
                installed = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                self._packages[key] = None
            else:
                self._packages[key] = _read(name, installed, name in first, self.cache)
        return self._packages[key]

    def path_to(self, start: str, module: str) -> list[str] | None:
        """The distributions that have `module`; none of them where its file counts for a source in the module `start`;
        None where it is in no key.
        """
        owners = self.owned(module.partition(".")[0])
        if owners:
            return owners
        if start not in self._modules:
            self._modules[start] = _followed(start, self.owned)
        path = module.replace(".", "/")
        known = any(name in self._modules[start][0] for name in (f"{path}.py", f"{path}/__init__.py"))
        return [] if known else None

    def owned(self, top: str) -> list[str]:
        """The installed distributions that have the top-level package, fusekit's own not. Of those that list other
        files than an import would load, such as editable ones, none: their sources count.
        """
        if top in KEYED_BY_VERSION:
            return []
        names = self._all_owners().get(top, [])
        if top not in self._loaded:
            root = _root(top) if names else None
            self._loaded[top] = root is not None and any(_lists(distribution(name), top, root) for name in names)
        return names if self._loaded[top] else []

    def on_dsl(self, name: str) -> bool:
        """Whether a distribution requires the DSL."""
        package = self._packages.get((name, False)) or self._packages.get((name, True))
        return package.on_dsl if package is not None else _requires_dsl(distribution(name))

    def builds(self, name: str) -> bool:
        """Whether a distribution requires the DSL or has a file that imports it."""
        package = self._package(name, frozenset())
        return package is not None and package.builds

    def _all_owners(self) -> dict[str, list[str]]:
        """Top-level name -> the distributions that have it, the DSL's apart."""
        if self._owners is None:
            owners: dict[str, set[str]] = {}
            for installed in metadata.distributions():
                # The folder's name gives as much as the metadata in it, which take a millisecond to read.
                folder = getattr(getattr(installed, "_path", None), "name", None)
                name = normal(folder.partition("-")[0] if folder else installed.metadata["Name"] or "")
                for top in () if name.startswith(_DSL) else _tops(installed):
                    owners.setdefault(top, set()).add(name)
            self._owners = {top: sorted(names) for top, names in owners.items()}
        return self._owners


def describe(fields: dict[str, str]) -> dict[str, dict[str, str]]:
    """Version and licence of each distribution whose files are in a key, from its metadata."""
    names = [label.removeprefix("foreign.files.") for label in fields if label.startswith("foreign.files.")]
    return {name: {"version": distribution(name).version, "licence": licence(name)} for name in names}


def licence(name: str) -> str:
    """The licence in a distribution's metadata, in one line."""
    facts: Any = distribution(name).metadata
    stated = facts.get("License-Expression") or ""
    if not stated:
        classifiers = [
            classifier for classifier in facts.get_all("Classifier") or () if classifier.startswith("License ::")
        ]
        stated = (
            ", ".join(classifier.rpartition(" :: ")[2] for classifier in classifiers)
            or facts.get("License")
            or _licence_file(name)
        )
    return str(stated).strip().splitlines()[0][:100]


def _licence_file(name: str) -> str:
    """The first line of a distribution's licence, where its metadata names none."""
    files = (file for file in distribution(name).files or () if file.name.upper().startswith(("LICENSE", "LICENCE")))
    for file in files:
        return file.read_text().strip() or "not stated"
    return "not stated"


def distribution(name: str) -> metadata.Distribution:
    """The installed distribution; BuildError, with what to install, where there is none."""
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        remedy = install(_EXTRAS[name]) if name in _EXTRAS else f"pip install '{name}'"
        raise BuildError(f"{name} is not installed, whose kernels the spec names; {remedy}") from None


def search_path() -> list[str]:
    """Where the module of a source is looked for: as an import would, then the current folder."""
    here = str(Path.cwd())
    paths = [entry or here for entry in sys.path]
    return paths if here in paths else [*paths, here]


def _read(name: str, installed: metadata.Distribution, whole: bool, cache: Path | None) -> _Package:
    """whole: its data files count too, as they do where it requires the DSL."""
    stated = installed.requires or []
    needed = [line for line in stated if "extra ==" not in line.replace("extra==", "extra ==")]
    required = [normal(match[1]) for line in needed if (match := _REQUIREMENT.match(line)) is not None]
    on_dsl = _requires_dsl(installed)
    base = os.path.realpath(str(installed.locate_file("")))
    paths = {f"{base}/{file}": file for file in _listed(installed) if whole or on_dsl or file.endswith(".py")}
    rows: dict[str, list[Any]] = read_all(f"foreign {name}", paths, facts, private(cache))
    imports = [frozenset(tops) for _, tops in rows.values()]
    kernels = frozenset[str]().union(*(tops for tops in imports if "cutlass" in tops))
    return _Package(
        installed.version,
        {paths[path]: row[0] for path, row in rows.items()},
        frozenset[str]().union(*imports),
        kernels,
        tuple(sorted({requirement for requirement in required if not requirement.startswith(_DSL)} - {name})),
        on_dsl,
    )


def _requires_dsl(installed: metadata.Distribution) -> bool:
    return any(normal(line).startswith(_DSL) for line in installed.requires or ())


def _tops(installed: metadata.Distribution) -> set[str]:
    """The top-level names of a distribution."""
    return set((installed.read_text("top_level.txt") or "").split()) or {
        top
        for name in _FIRST.findall(installed.read_text("RECORD") or "")
        if not name.endswith((".dist-info", ".pth")) and (top := name.partition(".")[0]).isidentifier()
    }


def _listed(installed: metadata.Distribution) -> list[str]:
    """The files of a distribution, byte code and records apart, and others in its packages that Python may import."""
    record = installed.read_text("RECORD")
    if record is None:
        listed = [file.as_posix() for file in installed.files or ()]
    else:
        listed = [line[0] for line in csv.reader(record.splitlines()) if line]
    files = {file for file in listed if not file.startswith(("/", "..")) and "__pycache__/" not in file}
    files = {file for file in files if not file.endswith((".dist-info/RECORD", ".dist-info/INSTALLER"))}
    base = os.path.realpath(str(installed.locate_file("")))
    for top in sorted({file.partition("/")[0] for file in files if file.count("/") == 1 and "/__init__.py" in file}):
        for folder, folders, names in os.walk(f"{base}/{top}"):
            folders[:] = [name for name in folders if name != "__pycache__"]
            inside = folder.removeprefix(f"{base}/")
            files |= {f"{inside}/{name}" for name in names if name.endswith(IMPORTED)}
    return sorted(files)


def facts(path: str) -> list[Any]:
    """[SHA-256, the top-level names that a Python file imports] of a file."""
    if not path.endswith(".py"):
        return [digest(path), []]
    data = Path(path).read_bytes()
    tops = {name.decode().partition(".")[0] for pair in _FROM.findall(data) for name in pair if name}
    for names in _IMPORT.findall(data):
        tops |= {word[0].decode().partition(".")[0] for part in names.split(b",") if (word := part.split())}
    return [hashlib.sha256(data).hexdigest(), sorted(tops)]


# -- modules that belong to no distribution


def _followed(
    module: str, owners: Callable[[str], list[str]], *, whole: bool = False
) -> tuple[dict[str, str], frozenset[str]]:
    """(path -> digest, top-level packages of distributions and absent ones) of a module and of all that it imports.

    owners: of a top-level package, the distributions that have it. whole: also of all modules below `module`.
    """
    top = module.partition(".")[0]
    roots: dict[str, Path | None] = {top: folder_of(module)}
    pending, digests, others = [module], dict[str, str](), set[str]()
    if whole:
        base = cast(Path, roots[top])
        pending += [".".join(path.relative_to(base).with_suffix("").parts) for path in (base / top).rglob("*.py")]
    while pending:
        name = pending.pop()
        root = roots[name.partition(".")[0]]
        assert root is not None
        for path in _files(root, name):
            label = path.relative_to(root).as_posix()
            if label in digests:
                continue
            data = path.read_bytes()
            digests[label] = hashlib.sha256(data).hexdigest()
            if path.suffix != ".py":
                continue
            for imported in _imports(data, path, root):
                first = imported.partition(".")[0]
                if first != top and (first in KEYED_BY_VERSION or first in sys.stdlib_module_names or owners(first)):
                    others |= {first} - sys.stdlib_module_names
                    continue
                if first not in roots:
                    roots[first] = _root(first)
                if roots[first] is None:
                    others.add(first)
                elif first not in KEYED_BY_VERSION or imported.startswith("fusekit.providers"):
                    # Of fusekit the providers alone: its compiler is in every key.
                    pending.append(imported)
    if not digests:
        raise BuildError(f"source {module}: there is no such module below {roots[top]}; fix the source")
    return digests, frozenset(others)


def folder_of(module: str) -> Path:
    """The folder that the top-level package or module of a source lies in. Raises BuildError where there is none."""
    top = module.partition(".")[0]
    root = _root(top)
    if root is None:
        raise BuildError(
            f"source {module}: there is no module {top} on Python's path or in the current folder; install it, or build"
            " from the folder that it is in"
        )
    return root


def _lists(distribution: metadata.Distribution, top: str, root: Path) -> bool:
    """Whether a distribution lists files of the top-level package that lies in `root`."""
    if Path(str(distribution.locate_file(""))).resolve() != root.resolve():
        return False
    record = distribution.read_text("RECORD")
    if record is None:
        return any(str(file).partition("/")[0].partition(".")[0] == top for file in distribution.files or ())
    return any(name.partition(".")[0] == top for name in _FIRST.findall(record))


def _root(top: str) -> Path | None:
    """The folder that the top-level package or module lies in; None where there is none."""
    spec = machinery.PathFinder.find_spec(top, search_path())
    if spec is None:
        spec = importlib.util.find_spec(top)  # of an editable installation; runs nothing of a top-level package
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
        return Path(spec.origin).parent
    return None


def _files(root: Path, module: str) -> list[Path]:
    """The files below `root` that an import of `module` runs."""
    files: list[Path] = []
    at = root
    for part in module.split("."):
        at = at / part
        places = [folder / f"{name}{end}" for folder, name in ((at, "__init__"), (at.parent, part)) for end in _ENDS]
        files += [path for path in places if path.is_file()][:1]
    return files


def _imports(data: bytes, path: Path, root: Path) -> Iterable[str]:
    try:
        tree = ast.parse(data, str(path))
    except SyntaxError as error:
        raise BuildError(f"{path.name}: {error}; fix it") from error
    nodes = list(ast.walk(tree))
    return [*stated(nodes, list(path.relative_to(root).with_suffix("").parts)), *_called(nodes)]


def _called(nodes: Iterable[ast.AST]) -> Iterable[str]:
    """The modules that calls of `import_module` and `__import__` name as text."""
    for node in nodes:
        if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
            continue
        function, name = node.func, node.args[0].value
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if called in ("import_module", "__import__") and isinstance(name, str) and name and not name.startswith("."):
            yield name
