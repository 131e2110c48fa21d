"""What other packages add to fusekit: operations, activations, operands, each by an entry point of its group.

An entry point has the name of what it adds, and leads to it as "module:attribute". The metadata of the installed
packages is read once a process, and none of them is imported before something of it is asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusekit.errors import SpecError, SpecWarning

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

OPERATIONS, ACTIVATIONS, OPERANDS = "fusekit.operations", "fusekit.activations", "fusekit.operands"


@cache
def provided(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of `group` by name."""
    from importlib.metadata import entry_points

    return {point.name: point for point in sorted(entry_points(group=group))}


def load(group: str, name: str) -> Any:
    """What the entry point `name` of `group` leads to. Raises SpecError, which names the package, where it cannot be
    imported.
    """
    point = provided(group)[name]
    try:
        return point.load()
    except Exception as error:
        raise SpecError(
            f"{what(group, name)} cannot be imported: {type(error).__name__}: {error}; install {package(group, name)} "
            "again, or uninstall it"
        ) from error


def usable(group: str, load: Callable[[str], Any]) -> tuple[str, ...]:
    """The names of `group` that `load` does not refuse with SpecError. For the others a warning gives the reason: a
    package that cannot be used takes nothing but its own with it.
    """
    names = []
    for name in provided(group):
        try:
            load(name)
        except SpecError as error:
            warnings.warn(f"left out: {error}", SpecWarning, stacklevel=2)
        else:
            names.append(name)
    return tuple(names)


def package(group: str, name: str) -> str:
    """The distribution that has the entry point `name`."""
    point = provided(group)[name]
    return point.dist.name if point.dist else point.module.partition(".")[0]


def what(group: str, name: str) -> str:
    """The entry point in words, for errors."""
    return f"the {group.rpartition('.')[2].removesuffix('s')} {name} of the package {package(group, name)}"


def attribute(reference: str) -> Any:
    """What "module:attribute" names; a module where there is no attribute."""
    module, _, name = reference.partition(":")
    loaded = import_module(module)
    return getattr(loaded, name) if name else loaded
