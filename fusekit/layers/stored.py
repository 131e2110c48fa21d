"""Layers of a library's stores, by what the names of their kernels stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fusekit.errors import IntegrityError, UsageError, some
from fusekit.plan.layer import Options, stored_options

if TYPE_CHECKING:
    from fusekit.library import Library
    from fusekit.store import NameRecord

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def layers_of(library: Library) -> dict[str, Options]:
    """Every layer of the stores by name, as `options_of` gives it; what that refuses is left out."""
    of_fc2 = library.store.names("*/*.fc2*")  # every layer has one
    found: dict[str, Options] = {}
    for name in sorted({listing.record.name.rpartition(".")[0] for listing in of_fc2}):
        with suppress(IntegrityError, UsageError):
            if (options := stored_options(name, _specs(_records(library, name)))) is not None:
                found[name] = options
    return found


def _records(library: Library, name: str) -> list[NameRecord]:
    return [listing.record for listing in library.store.names(f"{name}.*")]


def _specs(records: Iterable[NameRecord]) -> dict[str, Mapping[str, Any]]:
    return {record.name: record.spec for record in records}


def records_of(library: Library, name: str) -> list[NameRecord]:
    """What the names of a layer's kernels stand for. Raises UsageError for what is no layer's name."""
    if not _NAME.fullmatch(name):
        there = [*layers_of(library)]
        stored = f"the store has {some(there)}" if there else "the store has none yet"
        raise UsageError(f"'{name}' names no layer; a layer is named file/layer, such as 'model/moe'; {stored}")
    return _records(library, name)


def options_of(library: Library, name: str, records: Iterable[NameRecord]) -> Options:
    """What the kernels of a layer say of it. Raises NotBuiltError where there are none, UsageError for a kernel."""
    options = stored_options(name, _specs(records))
    if options is None:
        if kernels := [listing.record.name for listing in library.store.names(f"{name}@*")]:
            raise UsageError(
                f"'{name}' is a kernel, and not a layer of a model: library.load('{name}') loads it; it is stored as "
                f"{', '.join(sorted(kernels))}"
            )
        raise library.store.not_built(name)
    return options
