"""From what a person typed to name records of the store."""

from __future__ import annotations

from collections.abc import Sequence

from fusekit.errors import IntegrityError, NotBuiltError
from fusekit.store import NameListing, NameRecord, Store
from fusekit.store.names import is_glob


def chosen(store: Store, pattern: str, arch: str | None) -> list[NameListing]:
    """As `stored`, but where `pattern` is a kernel (`file/kernel`) only the variant, for each architecture, that
    `load` takes. UsageError where `load` takes none of them.
    """
    found = stored(store, pattern, arch)
    if len(found) == 1 or is_glob(pattern) or "/" not in pattern:
        return found
    from fusekit.choice import tuning
    from fusekit.choice.variants import choose

    records = [choose(records, tuning=tuning.load(store, each)) for (_, each), records in _kernels(found).items()]
    return [listed for record in records for listed in found if listed.record is record]


def check_alike(found: Sequence[NameListing]) -> None:
    """Raises UsageError where variants of one kernel among `found` do not compute the same."""
    from fusekit.choice import variants

    for records in _kernels(found).values():
        variants.check_alike(records)


def _kernels(found: Sequence[NameListing]) -> dict[tuple[str, str], list[NameRecord]]:
    """The variants of each kernel, for each architecture."""
    kernels: dict[tuple[str, str], list[NameRecord]] = {}
    for listed in found:
        kernels.setdefault((listed.record.name.partition("@")[0], listed.record.arch), []).append(listed.record)
    return kernels


def stored(store: Store, pattern: str, arch: str | None) -> list[NameListing]:
    """What `pattern` (a name, a file's stem or a glob) means in `store`, sorted, at least one.

    NotBuiltError when nothing does; IntegrityError when the only records that would are damaged.
    """
    listing = store.listing(pattern, arch)
    if listing.names:
        return list(listing.names)
    if listing.problems and not is_glob(pattern):
        raise IntegrityError(listing.problems[0])
    detail = f"left out: {listing.problems[0]}" if listing.problems else ""
    if arch is not None and (others := sorted({other for _, other in store.recorded(pattern)} - {arch})):
        detail = f"only for {', '.join(others)}"
    raise NotBuiltError.of(pattern, arch, detail, store.absent())
