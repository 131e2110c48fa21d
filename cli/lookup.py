"""From what a person typed to name records of the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusekit.errors import IntegrityError, UsageError, is_glob
from fusekit.store import NameListing, NameRecord, Store
from fusekit_cli.options import Session


def chosen(store: Store, pattern: str, arch: str | None) -> list[NameListing]:
    """As `stored`, but where `pattern` is a kernel (`file/kernel`) only the variant, for each architecture, that
    `load` takes. UsageError where `load` takes none of them.
    """
    found = stored(store, pattern, arch)
    records = to_load(store, [listed.record for listed in found], pattern)
    return [listed for record in records for listed in found if listed.record is record]


def to_load(store: Store, records: Sequence[NameRecord], pattern: str) -> list[NameRecord]:
    """`records`, or where `pattern` is a kernel (`file/kernel`) of each architecture the one that `load` takes, by the
    tuning tables of `store`.
    """
    if len(records) < 2 or is_glob(pattern) or "/" not in pattern:
        return list(records)
    from fusekit.choice import tuning
    from fusekit.choice.variants import choose

    return [choose(each, tuning=tuning.load(store, arch)) for (_, arch), each in _kernels(records).items()]


def is_layer(name: str, records: Sequence[NameRecord]) -> bool:
    """Whether `name` (`file/layer`) means these records as the kernels of a layer."""
    return bool(records) and all(record.name.startswith(f"{name}.") and record.spec.get("layer") for record in records)


def unbuilt(name: str, parts: Iterable[str], records: Sequence[NameRecord]) -> list[str]:
    """The kernels of the layer `name` that are not among `records`. parts: those that it needs."""
    there = {record.name.partition("@")[0] for record in records}
    return [kernel for part in parts if (kernel := f"{name}.{part}") not in there]


def note_unbuilt(session: Session, name: str, records: Sequence[NameRecord]) -> None:
    """Says which kernels are missing where `name` is a layer, of which a store has `records`."""
    if not is_layer(name, records):
        return
    from fusekit.plan.layer import program, stored_options

    try:
        options = stored_options(name, {record.name: record.spec for record in records})
    except (IntegrityError, UsageError) as error:  # its kernels are of use without it
        session.note(str(error))
        return
    assert options is not None
    if missing := unbuilt(name, program(options).parts, records):
        session.note(f"{name} is not whole; not built: {', '.join(missing)}")


def check_alike(found: Sequence[NameListing]) -> None:
    """Raises UsageError where variants of one kernel among `found` do not compute the same."""
    from fusekit.choice import variants

    for records in _kernels([listed.record for listed in found]).values():
        variants.check_alike(records)


def _kernels(records: Sequence[NameRecord]) -> dict[tuple[str, str], list[NameRecord]]:
    """The variants of each kernel, for each architecture."""
    kernels: dict[tuple[str, str], list[NameRecord]] = {}
    for record in records:
        kernels.setdefault((record.name.partition("@")[0], record.arch), []).append(record)
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
    raise store.not_built(pattern, arch, detail)
