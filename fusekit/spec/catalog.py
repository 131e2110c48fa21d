"""The packaged spec files, and finding kernels by path, name or glob."""

import glob
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fusekit.errors import SpecError, UsageError, some
from fusekit.plan.arch import ARCHES, DEFAULT
from fusekit.spec import document
from fusekit.spec.extern import EXTERN
from fusekit.spec.parse import parse_file, parse_text
from fusekit.spec.schemas import Spec, layer_name, layer_of
from fusekit.spec.values import nearest

STDIN = "-"


@dataclass(frozen=True, slots=True)
class Found:
    """The kernels that one target selects in one spec file.

    specs: the kernels that it names. every: all of the file, under the name `file` (with the namespace, if there is
    one). means: whether the target means a full name, such as one that the file had before it was edited. source: what
    messages call the file. packaged: its architecture may be another than the file says.
    """

    file: str
    specs: tuple[Spec, ...]
    every: tuple[Spec, ...]
    means: Callable[[str], bool]
    source: str
    packaged: bool = False


def packaged_folder() -> Path:
    """The folder of the packaged spec files: inside an installed package, else next to the package in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "kernel_specs"
    return installed if installed.is_dir() else package.parent / "kernel_specs"


def packaged_files() -> tuple[Path, ...]:
    """The packaged spec files, by name."""
    return tuple(sorted(packaged_folder().glob("*.toml")))


@dataclass(frozen=True, slots=True)
class Options:
    """How files are read. namespace: of every file. archs: the packaged files also have their kernels for these
    architectures, instead of the one that they name. defaults: of spec files that are not packaged.
    """

    namespace: str | None = None
    archs: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


def find(patterns: Sequence[str] = (), namespace: str | None = None) -> tuple[Spec, ...]:
    """The kernels that `targets` finds, each once, in their order."""
    return specs_of(targets(patterns, namespace))


def specs_of(targets: Sequence[Found]) -> tuple[Spec, ...]:
    """The kernels of `targets`, each once. UsageError for two files that give the same name to different kernels."""
    known: dict[tuple[str, str], Spec] = {}
    for target in targets:
        for spec in target.specs:
            earlier = known.setdefault((spec.full_name, spec.arch), spec)
            if earlier != spec:
                raise UsageError(
                    f"{target.source} gives {spec.full_name} another meaning than an earlier target; names are made"
                    " from the file's stem; rename one of the files, give it a namespace, or build them one after the"
                    " other"
                )
    return tuple(known.values())


def targets(
    patterns: Sequence[str] = (), namespace: str | None = None, archs: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> tuple[Found, ...]:  # fmt: skip
    """The kernels that patterns select, file by file, in their order; no pattern: every packaged file.

    A pattern is one of

    - the path of a spec file (`specs/moe.toml`), or a glob over such paths (`specs/*.toml`);
    - kernels and layers of those: `specs/moe.toml/fc1`, `moe.toml/fc1@128x128-c2x1`, `specs/*.toml/fc*`;
    - a folder, which means every spec file in it;
    - a packaged file's stem, the name of a kernel or a layer `file/kernel`, a full name `file/kernel@variant`, or a
      glob over any of the three;
    - `-`: a spec on stdin, whose stem is `stdin`.

    What names something packaged is not looked for as a folder; `./name` is never packaged. namespace, archs, defaults:
    see `Options`. Only files that can match are read. Raises UsageError for a pattern that names nothing, SpecError for
    a bad file.
    """
    options = Options(namespace, archs, defaults or {})
    return tuple(target for pattern in patterns or ("*",) for target in _found(pattern, options))


def of_model(
    config: Path, tokens: Sequence[int] = (), archs: Sequence[str] = (), namespace: str | None = None
) -> Found:  # fmt: skip
    """The kernels that `fusekit new` writes for the Hugging Face `config` (a file, or a folder with config.json), under
    the name of its folder, or of the file. tokens: of a launch; for several counts there are the variants of each, in
    layers for the first; of one name, that of the first count.
    """
    from fusekit.choice.tuning import features
    from fusekit.spec.hf_config import MAX_BYTES, read_model
    from fusekit.spec.model_kernels import Request
    from fusekit.spec.new_spec import new_spec

    path = config / "config.json" if config.is_dir() else config
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}; a model is a config.json, or a folder that holds one") from None
    stem = re.sub(r"[^a-z0-9._-]+", "-", (path.parent.name if path.stem == "config" else path.stem).lower())
    request = Request(stem.strip("-._")[:64] or "model", origin=path.name)
    model = read_model(text, str(path))
    counts, every = tokens or (request.tokens,), dict[tuple[str, str], Spec]()
    kernels: dict[tuple[str, str], Spec] = {}
    for arch in archs or (DEFAULT.name,):
        for count in counts:
            wanted = new_spec(model, replace(request, arch=arch, tokens=count))
            for spec in parse_text(wanted.text, request.name, str(path), namespace):
                alike: Any = kernels.setdefault((spec.name, spec.arch), spec)
                # Variants of one kernel have one problem, and those of a layer one table.
                same: Any = replace(spec, layer=layer_of(alike), problem=alike.problem)
                if features(same.canonical()) == features(alike.canonical()):  # or `load` could not choose
                    every.setdefault((spec.full_name, spec.arch), same)
    return _of_file(tuple(every.values()), request.name, "*", str(path))


def _found(pattern: str, options: Options) -> list[Found]:
    namespace, archs = options.namespace, options.archs
    if pattern == STDIN:
        specs = parse_text(_stdin(), "stdin", "stdin", namespace, unsaid=archs, defaults=options.defaults)
        return [_of_file(specs, "stdin", "*", "stdin")]
    path, kernels = _split(pattern)
    if path is not None:
        targets = [_of_path(file, kernels, options) for file in _files(path)]
        return [target for target in targets if target.specs] or _nothing_in(pattern, kernels, targets)
    packaged = _packaged(pattern, namespace, archs)
    if packaged:
        return packaged
    if os.path.isdir(pattern):  # noqa: PTH112 - False for a path that cannot be looked at, too
        files = sorted(Path(pattern).glob("*.toml"))
        if not files:
            raise UsageError(f"'{pattern}' is a folder without a .toml file; name the folder of the spec files")
        return [_of_path(file, "*", options) for file in files]
    raise _nothing(pattern)


def stored_name(pattern: str) -> str:
    """The name in a store of what `FILE.toml` or `FILE.toml/NAME` names; any other pattern is one already."""
    path, kernels = _split(pattern)
    if path is None:
        return pattern
    file = _files(path)[0] if not glob.has_magic(path) else Path(path)
    namespace = document.parse(document.read(file), str(file)).get("namespace") if file.is_file() else None
    stem = f"{namespace}.{file.stem}" if namespace else file.stem
    return stem if kernels == "*" else f"{stem}/{kernels}"


def _split(pattern: str) -> tuple[str | None, str]:
    """The path of a spec file and what is named in it; no path where no part of `pattern` ends in `.toml`."""
    if pattern.endswith(".toml"):
        return pattern, "*"
    path, separator, kernels = pattern.rpartition(".toml/")
    if not separator or "/" in kernels:
        return None, ""
    return f"{path}.toml", kernels or "*"


def _files(path: str) -> list[Path]:
    """The files that `path`, which may be a glob, means; a packaged one where there is no such file here."""
    plain = Path(path)
    if os.path.exists(path):  # noqa: PTH110 - False for a path that cannot be looked at, too
        return [plain]
    if glob.has_magic(path):
        if files := sorted(map(Path, glob.glob(path))):  # noqa: PTH207 - patterns may be absolute
            return files
        raise UsageError(f"'{path}' matches no file; give the path of a spec file, a folder or a packaged name")
    packaged = packaged_folder() / path
    return [packaged if plain.name == path and os.path.isfile(packaged) else plain]  # noqa: PTH113 - likewise


def _of_path(path: Path, kernels: str, options: Options) -> Found:
    specs = parse_file(path, options.namespace, unsaid=options.archs, defaults=options.defaults)
    return _of_file(specs, path.stem, kernels, str(path))


def _of_file(every: tuple[Spec, ...], stem: str, kernels: str, source: str) -> Found:
    pattern = stem if kernels == "*" else f"{stem}/{kernels}"
    return _found_in(every, stem, pattern, source)


def _found_in(every: tuple[Spec, ...], stem: str, pattern: str, source: str, packaged: bool = False) -> Found:
    layers = {name.partition("/")[2] for spec in every if (name := layer_name(spec))}

    def means(name: str) -> bool:
        # Patterns know nothing of namespaces, which stand before the stem.
        rest = name.partition("/")[2]
        kernel = rest.partition("@")[0]
        layer = kernel.rpartition(".")[0]
        forms = (stem, f"{stem}/{kernel}", f"{stem}/{rest}", *([f"{stem}/{layer}"] if layer in layers else ()))
        return any(fnmatchcase(text, pattern) for text in forms)

    specs = tuple(spec for spec in every if means(spec.full_name))
    return Found(every[0].file if every else stem, specs, every, means, source, packaged)


def _packaged(pattern: str, namespace: str | None, archs: Sequence[str]) -> list[Found]:
    files = packaged_files()
    stem_pattern = pattern.partition("/")[0] if "/" in pattern else None
    candidates = [path for path in files if stem_pattern is None or fnmatchcase(path.stem, stem_pattern)]
    if stem_pattern is None and any(path.stem == pattern for path in files):
        candidates = [path for path in candidates if path.stem == pattern]
    targets = [
        _found_in(_for_archs(path, namespace, archs), path.stem, pattern, path.name, packaged=True)
        for path in candidates
    ]
    return [target for target in targets if target.specs]


def _for_archs(path: Path, namespace: str | None, archs: Sequence[str]) -> tuple[Spec, ...]:
    """The kernels of a packaged file, and those for others of `archs` that fusekit's kernels run on."""
    specs = parse_file(path, namespace)
    if any(spec.op == EXTERN for spec in specs):  # their sources say what they are for
        return specs
    for arch in archs:
        if arch in ARCHES and all(spec.arch != arch for spec in specs):
            specs += parse_file(path, namespace, arch)
    return specs


def _stdin() -> str:
    data = sys.stdin.buffer.read(document.MAX_BYTES + 1)
    if len(data) > document.MAX_BYTES:
        raise SpecError(f"stdin: more than {document.MAX_BYTES} bytes; a spec has at most that many; split it")
    return document.decode(data, "stdin")


def _nothing_in(pattern: str, kernels: str, targets: list[Found]) -> list[Found]:
    specs = [spec for target in targets for spec in target.every]
    known = list(dict.fromkeys(name.partition("/")[2] for name in _names(specs, kernels)))
    hint = nearest(kernels, known) or f"; there are {some(known)}"
    raise UsageError(f"'{pattern}' names no kernel of {targets[0].source}{hint}")


def _names(specs: Iterable[Spec], pattern: str) -> list[str]:
    """Suggestions for `pattern`: full names if it is one; else kernels, and layers instead of their kernels."""
    if "@" in pattern:
        return [spec.full_name for spec in specs]
    if "." in pattern.rpartition("/")[2]:
        return [spec.name for spec in specs]
    return [layer_name(spec) or spec.name for spec in specs]


def _nothing(pattern: str) -> UsageError:
    stems = [path.stem for path in packaged_files()]
    stem, slash, _ = pattern.partition("/")
    if slash and stem in stems:
        specs = parse_file(packaged_folder() / f"{stem}.toml")
        names = list(dict.fromkeys(_names(specs, pattern)))
    else:
        names = stems
    hint = nearest(pattern, names) or (f"; there are {some(names)}" if names else "; no spec files are installed")
    path = f"{stem}.toml{pattern[len(stem) :]}"
    if stem and os.path.isfile(f"{stem}.toml"):  # noqa: PTH113 - likewise
        return UsageError(f"'{pattern}' names no packaged kernel; for the file {stem}.toml here give its path: {path}")
    other = " Or" if hint.endswith("?") else "; or"
    return UsageError(
        f"'{pattern}' names no packaged kernel{hint}{other} give the path of a .toml file, which /KERNEL may follow"
    )
