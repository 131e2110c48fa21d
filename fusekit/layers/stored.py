"""The layers in a library's stores, from the specs of their kernels."""

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
    """The options of every layer in the stores by name, without those that `options_of` refuses."""
    of_fc2 = library.store.names("*/*.fc2*")  # every layer has one
    layers: dict[str, Options] = {}
    for name in sorted({listing.record.name.rpartition(".")[0] for listing in of_fc2}):
        with suppress(IntegrityError, UsageError):
            if (options := stored_options(name, _specs(_records(library, name)))) is not None:
                layers[name] = options
    return layers


def _records(library: Library, name: str) -> list[NameRecord]:
    return [listing.record for listing in library.store.names(f"{name}.*")]


def _specs(records: Iterable[NameRecord]) -> dict[str, Mapping[str, Any]]:
    return {record.name: record.spec for record in records}


def records_of(library: Library, name: str) -> list[NameRecord]:
    """The records of the names of a layer's kernels. Raises UsageError for a name that no layer can have."""
    if not _NAME.fullmatch(name):
        there = [*layers_of(library)]
        stored = f"the store has {some(there)}" if there else "the store has none yet"
        raise UsageError(f"'{name}' names no layer; a layer is named file/layer, such as 'model/moe'; {stored}")
    return _records(library, name)


def options_of(library: Library, name: str, records: Iterable[NameRecord]) -> Options:
    """The options of a layer, from its kernels. Raises NotBuiltError if there are none, UsageError for a kernel."""
    options = stored_options(name, _specs(records))
    if options is None:
        if kernels := [listing.record.name for listing in library.store.names(f"{name}@*")]:
            raise UsageError(
                f"'{name}' is a kernel, and not a layer of a model: library.load('{name}') loads it; it is stored as "
                f"{', '.join(sorted(kernels))}"
            )
        raise library.store.not_built(name)
    return options
