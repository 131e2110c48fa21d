"""What a foreign kernel is made from, as key fields: distributions, their files, the module that holds the source.

Nothing of it is imported or run. Of a source in an installed distribution every file of that distribution counts. Of
another module (a file of the user's, a provider of fusekit's) the file counts and every module that it imports and that
belongs to no distribution, wherever on Python's path; of the distributions that those import, every file where the
distribution builds on the CuTe DSL, else the version. `distributions` of the spec names those that no import statement
shows.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import machinery, metadata
from pathlib import Path
from typing import Any

from fusekit.compiler.sources import stated
from fusekit.compiler.toolchain import normal, version
from fusekit.errors import BuildError, install
from fusekit.spec import ExternSpec

_EXTRAS = {"quack-kernels": "quack", "nvidia-cudnn-frontend": "cudnn"}
_DSL = "nvidia-cutlass-dsl"
_OWN = frozenset({"cutlass", "cuda", "fusekit"})  # whose versions and sources a key has
_ABSENT = "absent"
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


@dataclass(slots=True)
class Foreign:
    """Digests as of now; each distribution and module is read once."""

    _files: dict[str, str] = field(default_factory=dict)
    _modules: dict[str, tuple[dict[str, str], frozenset[str]]] = field(default_factory=dict)
    _owners: dict[str, list[str]] | None = None
    _loaded: dict[str, bool] = field(default_factory=dict)

    def fields(self, spec: ExternSpec) -> dict[str, str]:
        """The labelled key fields. Raises BuildError for a distribution or a module that is not installed."""
        found: dict[str, str] = {}
        whole = {normal(name) for name in spec.distributions}
        for name in sorted(whole):
            distribution(name)  # which says what to install
        module = spec.source.partition(":")[0]
        owners = self._owned(module.partition(".")[0])
        whole |= set(owners)
        if not owners:
            if module not in self._modules:
                self._modules[module] = _followed(module, self._owned)
            digests, imported = self._modules[module]
            found |= {f"foreign.module.{name}": digest for name, digest in digests.items()}
            for top in sorted(imported - _OWN):
                names = self._owned(top)
                whole |= {name for name in names if _builds_on_dsl(name)}
                found |= {f"foreign.version.{name}": distribution(name).version for name in names}
                if not names:
                    found[f"foreign.version.{top}"] = _ABSENT
        for name in sorted(whole):
            found[f"foreign.version.{name}"] = distribution(name).version
            if name not in self._files:
                self._files[name] = _digest_of(name)
            found[f"foreign.files.{name}"] = self._files[name]
            for needed in _requires(name):
                found.setdefault(f"foreign.version.{needed}", version(needed, _ABSENT))
        return dict(sorted(found.items()))

    def behind(self, start: str, module: str) -> list[str] | None:
        """The distributions that have `module`; none of them where its file counts for a source in the module `start`;
        None where it is in no key.
        """
        owners = self._owned(module.partition(".")[0])
        if owners:
            return owners
        if start not in self._modules:
            self._modules[start] = _followed(start, self._owned)
        path = module.replace(".", "/")
        known = any(name in self._modules[start][0] for name in (f"{path}.py", f"{path}/__init__.py"))
        return [] if known else None

    def _owned(self, top: str) -> list[str]:
        """The installed distributions that have the top-level package, fusekit's own not. Of those that list other
        files than an import would load, such as editable ones, none: their sources count.
        """
        if top in _OWN:
            return []
        if self._owners is None:
            self._owners = {name: sorted({normal(each) for each in made})
                            for name, made in metadata.packages_distributions().items()}  # fmt: skip
        names = self._owners.get(top, [])
        if top not in self._loaded:
            root = _root(top) if names else None
            self._loaded[top] = root is not None and any(_lists(distribution(name), top, root) for name in names)
        return names if self._loaded[top] else []


def describe(fields: dict[str, str]) -> dict[str, dict[str, str]]:
    """Of each distribution whose files are in a key: version and licence, as its metadata has them."""
    names = [label.removeprefix("foreign.files.") for label in fields if label.startswith("foreign.files.")]
    return {name: {"version": distribution(name).version, "licence": licence(name)} for name in names}


def licence(name: str) -> str:
    """What the metadata of a distribution says of its licence, in a line."""
    told: Any = distribution(name).metadata
    stated = told.get("License-Expression") or ""
    if not stated:
        classifiers = [each for each in told.get_all("Classifier") or () if each.startswith("License ::")]
        stated = (
            ", ".join(each.rpartition(" :: ")[2] for each in classifiers) or told.get("License") or _licence_file(name)
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


def _digest_of(name: str) -> str:
    """SHA-256 over path and content of every file of a distribution that is there, byte code and records apart."""
    digest = hashlib.sha256()
    for file in sorted(distribution(name).files or (), key=str):
        path = Path(str(file.locate()))
        if file.suffix in (".pyc", ".pyo") or "__pycache__" in file.parts or file.name in ("RECORD", "INSTALLER"):
            continue
        if ".." in file.parts or not path.is_file():  # scripts outside, and what was removed
            continue
        digest.update(f"{file.as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _requires(name: str) -> list[str]:
    """The distributions that one needs without any extra, the CuTe DSL apart, which a key names as its compiler."""
    found = set()
    for line in distribution(name).requires or ():
        match = _REQUIREMENT.match(line)
        if match is not None and "extra ==" not in line.replace("extra==", "extra =="):
            found.add(normal(match[1]))
    return sorted(each for each in found if not each.startswith(_DSL))


def _builds_on_dsl(name: str) -> bool:
    return any(normal(line).startswith(_DSL) for line in distribution(name).requires or ())


# -- modules that belong to no distribution


def _followed(module: str, owners: Callable[[str], list[str]]) -> tuple[dict[str, str], frozenset[str]]:
    """(path -> digest, top-level packages of distributions and absent ones) of a module and of all that it imports.

    owners: of a top-level package, the distributions that have it.
    """
    top = module.partition(".")[0]
    roots: dict[str, Path | None] = {top: _root(top)}
    if roots[top] is None:
        raise BuildError(
            f"source {module}: there is no module {top} on Python's path or in the current folder; install it, or build"
            " from the folder that it is in"
        )
    pending, digests, others = [module], dict[str, str](), set[str]()
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
            for found in _imports(data, path, root):
                first = found.partition(".")[0]
                if first != top and (first in _OWN or first in sys.stdlib_module_names or owners(first)):
                    others |= {first} - sys.stdlib_module_names
                    continue
                if first not in roots:
                    roots[first] = _root(first)
                if roots[first] is None:
                    others.add(first)
                elif first not in _OWN or found.startswith("fusekit.providers"):
                    # Of fusekit the providers alone: its compiler is in every key.
                    pending.append(found)
    if not digests:
        raise BuildError(f"source {module}: there is no such module below {roots[top]}; mend the source")
    return digests, frozenset(others)


def _lists(found: metadata.Distribution, top: str, root: Path) -> bool:
    """Whether a distribution lists files of the top-level package that lies in `root`."""
    if Path(str(found.locate_file(""))).resolve() != root.resolve():
        return False
    return any(str(file).partition("/")[0].partition(".")[0] == top for file in found.files or ())


def _root(top: str) -> Path | None:
    """The folder that the top-level package or module lies in; None where there is none."""
    found = machinery.PathFinder.find_spec(top, search_path())
    if found is None:
        found = importlib.util.find_spec(top)  # of an editable installation; runs nothing of a top-level package
    if found is not None and found.submodule_search_locations:
        return Path(next(iter(found.submodule_search_locations))).parent
    if found is not None and found.origin is not None and Path(found.origin).is_file():
        return Path(found.origin).parent
    return None


def _files(root: Path, module: str) -> list[Path]:
    """The files below `root` that an import of `module` runs."""
    files: list[Path] = []
    at = root
    for part in module.split("."):
        at = at / part
        plain = [at / "__init__.py", at.with_name(f"{part}.py")]
        files += [path for path in plain if path.is_file()][:1]
        files += list(at.parent.glob(f"{part}.*.so")) if not files else []
    return files


def _imports(data: bytes, path: Path, root: Path) -> Iterable[str]:
    try:
        tree = ast.parse(data, str(path))
    except SyntaxError as error:
        raise BuildError(f"{path.name}: {error}; mend it") from error
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
