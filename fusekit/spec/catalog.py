"""The packaged spec files, and finding kernels by path, name or glob."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from fusekit.errors import UsageError
from fusekit.spec.family import Spec
from fusekit.spec.parse import parse_file
from fusekit.spec.values import nearest


def packaged_folder() -> Path:
    """The folder of the packaged spec files: inside an installed package, else beside the package in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "kernel_specs"
    return installed if installed.is_dir() else package.parent / "kernel_specs"


def packaged_files() -> tuple[Path, ...]:
    """The packaged spec files, by name."""
    return tuple(sorted(packaged_folder().glob("*.toml")))


def find(patterns: Sequence[str] = ()) -> tuple[Spec, ...]:
    """The kernels that the patterns name, in their order, each once; no pattern: every packaged one.

    A pattern is the path of a spec file (it ends in `.toml`), or a packaged file's stem, a kernel's name
    `file/kernel`, a full name `file/kernel@variant`, or a glob over any of the three. Only files that can match are
    read. Raises UsageError for a pattern that names nothing, or for two files that give the same name to different
    kernels; SpecError for a bad file.
    """
    found: dict[tuple[str, str], Spec] = {}
    for pattern in patterns or ("*",):
        for spec in _path(pattern) if pattern.endswith(".toml") else _match(pattern):
            earlier = found.setdefault((spec.full_name, spec.arch), spec)
            if earlier != spec:
                raise UsageError(
                    f"'{pattern}' gives {spec.full_name} another meaning than an earlier target; names are made from "
                    "the file's stem; rename one of the files, or build them one after the other"
                )
    return tuple(found.values())


def _path(pattern: str) -> tuple[Spec, ...]:
    path = Path(pattern)
    if path.name == pattern and not path.exists() and (packaged := packaged_folder() / pattern).is_file():
        path = packaged
    return parse_file(path)


def _match(pattern: str) -> list[Spec]:
    files = packaged_files()
    stem_pattern = pattern.partition("/")[0] if "/" in pattern else None
    candidates = [path for path in files if stem_pattern is None or fnmatchcase(path.stem, stem_pattern)]
    if stem_pattern is None and any(path.stem == pattern for path in files):
        candidates = [path for path in candidates if path.stem == pattern]
    specs = [spec for path in candidates for spec in parse_file(path)]
    matches = partial(_matches, pattern)
    return [spec for spec in specs if matches(spec)] or _nothing(pattern, specs)


def _matches(pattern: str, spec: Spec) -> bool:
    return any(fnmatchcase(text, pattern) for text in (spec.file, spec.name, spec.full_name))


def _nothing(pattern: str, specs: list[Spec]) -> list[Spec]:
    stems = [path.stem for path in packaged_files()]
    if "@" in pattern:
        names = [spec.full_name for spec in specs]
    elif "/" in pattern and specs:
        names = list(dict.fromkeys(spec.name for spec in specs))
    else:
        names = stems
    hint = nearest(pattern, names) or (
        f"; there are {', '.join(names[:8])}" if names else "; no spec files are installed"
    )
    raise UsageError(f"'{pattern}' names no packaged kernel{hint}; or give the path of a .toml file")
