"""What is to be built: the specs that targets, architectures and a project name, and whether they may be."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError, ToolchainError, UsageError
from fusekit.spec import ExternSpec, Spec
from fusekit.spec.catalog import Found, of_model, specs_of
from fusekit.spec.catalog import targets as find_targets
from fusekit.store.entries import toolchain_label

if TYPE_CHECKING:
    from fusekit.project import Project

Targets = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Arches = str | Sequence[str] | None


def look_up(
    targets: Targets = (), namespace: str | None = None, arch: Arches = None, project: Project | None = None
) -> tuple[Found, ...]:
    """What `targets` (one or several) mean, file by file; packaged files also for the architectures `arch`.

    project: gives the targets if there are none, the architectures where `arch` is None, and defaults of spec files.
    """
    archs = [] if arch is None else several("arch", arch)
    patterns = [os.fspath(target) for target in several("targets", targets)]
    if project is None:
        return find_targets(patterns, namespace, archs)
    if not archs and project.arch:
        chosen = look_up(targets, namespace, [*project.arch], project)
        return tuple(_of_archs(found, project.arch) if found.packaged else found for found in chosen)
    if patterns or not (project.specs or project.models):
        return find_targets(patterns, namespace, archs, project.defaults)
    chosen = find_targets(project.specs, namespace, archs, project.defaults) if project.specs else ()
    return (*chosen, *(of_model(config, project.tokens, archs, namespace) for config in project.models))


def several(argument: str, given: Any) -> list[Any]:
    """One name or several as a list. Raises ArgumentError for what are no names."""
    alone = isinstance(given, str | bytes | os.PathLike) or not isinstance(given, Iterable)
    names = [given] if alone else [*given]
    for name in names:
        ArgumentError.unless(str | os.PathLike, argument, name, "a name, or a list of names")
    return names


def _of_archs(found: Found, archs: Sequence[str]) -> Found:
    return replace(found, specs=tuple(spec for spec in found.specs if spec.arch in archs))


def select(
    targets: Targets = (), arch: Arches = None, namespace: str | None = None, project: Project | None = None
) -> tuple[Spec, ...]:
    """The specs that `targets` and `arch` name; UsageError when an architecture has none of them. project: see
    `look_up`.
    """
    return of_arch(specs_of(look_up(targets, namespace, arch, project)), arch)


def check_toolchain(project: Project | None, toolchain: Mapping[str, str]) -> None:
    """Raises ToolchainError if `project` lists toolchains and the installed one is none of them."""
    label = toolchain_label(toolchain)
    if project is not None and project.toolchains and label not in project.toolchains:
        raise ToolchainError(
            f"{project.path} lists the toolchains {', '.join(project.toolchains)}, and {label} is installed here; "
            f'install one of those, or add "{label}" to `toolchains`'
        )


@dataclass(frozen=True, slots=True)
class Trusted:
    """The specs that may be built, and the names of those that may not."""

    specs: tuple[Spec, ...]
    left_out: tuple[str, ...] = ()


def trust(specs: tuple[Spec, ...], allow_extern: bool, *, named: bool) -> Trusted:
    """What may be built: building a foreign kernel runs the Python that its spec names, so that is asked for.

    named: whether the targets were given; then what may not be built is a UsageError, else it is left out.
    """
    if allow_extern:
        return Trusted(specs)
    foreign = [spec for spec in specs if isinstance(spec, ExternSpec)]
    if foreign and named:
        sources = ", ".join(dict.fromkeys(spec.source for spec in foreign[:3]))
        raise UsageError(
            f"{foreign[0].full_name} is a foreign kernel: building it runs {sources}; if you trust that code, allow it"
            " with --allow-extern, or FUSEKIT_ALLOW_EXTERN=1"
        )
    left = tuple(dict.fromkeys(spec.full_name for spec in foreign))
    return Trusted(tuple(spec for spec in specs if not isinstance(spec, ExternSpec)), left)


def of_arch(specs: tuple[Spec, ...], arch: Arches) -> tuple[Spec, ...]:
    """The specs for the architectures `arch` (None: all). Raises UsageError where one of them has none."""
    if arch is None:
        return specs
    wanted = set(several("arch", arch))
    known = sorted({spec.arch for spec in specs})
    for name in sorted(wanted - set(known)):
        raise UsageError(f"arch '{name}': none of the kernels named is for it; they are for {', '.join(known)}")
    return tuple(spec for spec in specs if spec.arch in wanted)
