"""From patterns on the command line to name records of the store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fusekit.errors import FusekitError, IntegrityError, UsageError, is_glob
from fusekit.store import NameListing, NameRecord, Store
from fusekit.store.entries import ADOPTED, CARRIED, HOST_OBJECT, of_program
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
    tables of `store`. What `fusekit exec` stored has no variants: then all.
    """
    if len(records) < 2 or is_glob(pattern) or "/" not in pattern or all(of_program(each.spec) for each in records):
        return list(records)
    from fusekit.choice import tuning
    from fusekit.choice.variants import choose

    return [choose(variants, tuning=tuning.load(store, arch)) for (_, arch), variants in _kernels(records).items()]


def kernels(listings: Sequence[NameListing]) -> list[NameListing]:
    """Those that are kernels. UsageError if there are only others, which `fusekit exec` stored."""
    found = [listed for listed in listings if of_program(listed.record.spec) is None]
    if listings and not found:
        raise UsageError(no_kernel(listings[0].record))
    return found


def no_kernel(record: NameRecord) -> str:
    """What `record` is of, which `fusekit exec` stored, and how a kernel is made of it."""
    name, kind = record.name, of_program(record.spec)
    if kind == HOST_OBJECT:
        return (
            f"{name} is no kernel with a launch record, but what `fusekit exec` compiled for a program; make a kernel "
            f"of it: fusekit adopt {name}"
        )
    label = record.spec[CARRIED]
    package = label.get("package", "PACKAGE") if isinstance(label, dict) else "PACKAGE"
    return (
        f"{name} has no kernels with launch records: it is of the cache of {package}, which a program finds with"
        f" fusekit exec --with {package} -- PROGRAM"
    )


def without_spec(store: Store, pattern: str, arch: str | None) -> list[NameRecord]:
    """What `fusekit exec` or `fusekit adopt` put into the store and `pattern` matches: no spec builds it."""
    found = []
    if ".toml" not in pattern:
        for listed in store.listing(pattern, arch).names:
            entry = None if of_program(listed.record.spec) else store.find_entry(listed.record.key)
            if entry is None or ADOPTED in entry.fields:
                found.append(listed.record)
    return found


@contextlib.contextmanager
def targets(session: Session, patterns: Iterable[str]) -> Iterator[None]:
    """Inside, `patterns` are looked up as targets of a build. The error says of what else the store has that no spec
    builds it.
    """
    try:
        yield
    except UsageError as error:
        for pattern in patterns:
            found: list[NameRecord] = []
            with contextlib.suppress(FusekitError):
                found = without_spec(session.open_store(), pattern, None)
            if found:
                more = f" and {len(found) - 1} more" if found[1:] else ""
                raise UsageError(
                    f"'{pattern}' has no spec, so no command builds, lists or locks it: `fusekit exec` or `fusekit "
                    f"adopt` made {found[0].name}{more}; fusekit explain {found[0].name} says of what"
                ) from error
        raise


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
