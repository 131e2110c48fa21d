"""From patterns on the command line to name records of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusekit.errors import IntegrityError, is_glob
from fusekit.store import NameListing, NameRecord, Store
from fusekit.store.names import layer_record
from fusekit_cli.options import Session

if TYPE_CHECKING:
    from fusekit.library import Library


def chosen(store: Store, pattern: str, arch: str | None) -> list[NameListing]:
    """As `stored`, but for a kernel (`file/kernel`) only the variant that `load` takes, for each architecture.
    UsageError if `load` takes none.
    """
    listings = stored(store, pattern, arch)
    records = to_load(store, [listed.record for listed in listings], pattern)
    return [listed for record in records for listed in listings if listed.record is record]


def to_load(store: Store, records: Sequence[NameRecord], pattern: str) -> list[NameRecord]:
    """`records`, or for a kernel (`file/kernel`) the one that `load` takes, for each architecture, with the tuning
    tables of `store`.
    """
    if len(records) < 2 or is_glob(pattern) or "/" not in pattern:
        return list(records)
    from fusekit.choice import tuning
    from fusekit.choice.variants import choose

    return [choose(variants, tuning=tuning.load(store, arch)) for (_, arch), variants in _kernels(records).items()]


def is_layer(name: str, records: Sequence[NameRecord]) -> bool:
    """Whether `records` are the kernels of the layer `name` (`file/layer`)."""
    return bool(records) and all(record.name.startswith(f"{name}.") and record.spec.get("layer") for record in records)


def is_whole_layer(store: Store, name: str, records: Sequence[NameRecord]) -> bool:
    """Whether `records` are the kernels of the layer `name`, which has a record in `store`."""
    return is_layer(name, records) and bool(store.recorded(layer_record(name)))


def note_unbuilt(session: Session, store: Store, name: str, records: Sequence[NameRecord]) -> None:
    """Print that `name`, if it is a layer of which a store has `records`, has no record there."""
    if is_layer(name, records) and not is_whole_layer(store, name, records):
        session.note(
            f"{name} is incomplete: the store has no record of the layer, so kernels of it are missing, or a fusekit"
            " before 0.2 built them; a build of its spec completes it, and compiles only what is missing"
        )


def check_alike(listings: Sequence[NameListing]) -> None:
    """Raises UsageError if variants of one kernel do not compute the same."""
    from fusekit.choice import variants

    for records in _kernels([listed.record for listed in listings]).values():
        variants.check_alike(records)


def _kernels(records: Sequence[NameRecord]) -> dict[tuple[str, str], list[NameRecord]]:
    """The variants of each kernel, for each architecture."""
    kernels: dict[tuple[str, str], list[NameRecord]] = {}
    for record in records:
        kernels.setdefault((record.name.partition("@")[0], record.arch), []).append(record)
    return kernels


def stored(store: Store, pattern: str, arch: str | None) -> list[NameListing]:
    """The names in `store` that match `pattern` (a name, a file's stem or a glob), sorted, at least one.

    NotBuiltError if none matches; IntegrityError if only damaged records match.
    """
    listing = store.listing(pattern, arch)
    if listing.names:
        return list(listing.names)
    if listing.problems and not is_glob(pattern):
        raise IntegrityError(listing.problems[0])
    detail = f"left out: {listing.problems[0]}" if listing.problems else ""
    if arch is not None and (others := sorted({other for _, other in store.recorded(pattern)} - {arch})):
        detail = f"only for {', '.join(others)}"
    raise store.not_built(pattern, arch, detail)


def note_runs(library: Library) -> None:
    """Note in the store which GPUs the kernels ran on that this process has loaded."""
    for key, ordinal in sorted(library.opened):
        library.store.note_run(key, library.devices.get(ordinal).name)
