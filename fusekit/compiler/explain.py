"""Why a build would find a kernel in the store, or would not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusekit.errors import BuildError, IntegrityError, OtherSchemaError, SignatureError
from fusekit.store import Entry, Store, key_of

if TYPE_CHECKING:
    from fusekit.compiler.identity import Identity
    from fusekit.spec import Spec
    from fusekit.store import NameRecord


@dataclass(frozen=True, slots=True)
class Difference:
    """A key field that is not as it was; None where one side has no such field."""

    field: str
    stored: str | None
    now: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """key: None where it cannot be made. status: `hit`, `miss`, `damaged` (a build replaces it), `untrusted` (so does
    one that signs with a trusted key), or `unknown`, as without a compiler. reason: in words. differs: where the store
    knows the name under another key.
    """

    name: str
    arch: str
    key: str | None
    status: str
    reason: str
    differs: tuple[Difference, ...] = ()


def check_usable(entry: Entry) -> None:
    """Raises IntegrityError for an entry whose launch record no launcher could use: to a builder it is missing."""
    from fusekit.abi import LaunchRecord, RecordError

    try:
        LaunchRecord.from_json(dict(entry.launch))
    except RecordError as error:
        raise IntegrityError(f"entry {entry.key}: launch record: {error}", key=entry.key) from error


def explained(store: Store, spec: Spec, identity: Identity, *, compiler: bool = True) -> Explanation:
    """`explain` of a spec; one whose package is missing is unknown."""
    try:
        fields = identity.key_fields(spec)
    except BuildError as error:
        return Explanation(spec.full_name, spec.arch, None, "unknown", str(error))
    return explain(store, spec, fields, compiler=compiler)


def explain(store: Store, spec: Spec, fields: Mapping[str, str], *, compiler: bool = True) -> Explanation:
    """What a build of `spec`, with the key fields that it has now, would meet in `store`. compiler: whether one is
    installed; without one the toolchain's fields mean nothing, and there is no key.
    """
    key = key_of(fields) if compiler else None
    status, reason, differs = _met(store, spec, fields, key)
    if not compiler:
        status, reason = "unknown", f"no compiler to make a key with; {reason}"
    return Explanation(spec.full_name, spec.arch, key, status, reason, differs)


def _nearest(store: Store, record: NameRecord, fields: Mapping[str, str]) -> Entry | None:
    """The entry of the build of a name that differs least from `fields`; the last one if several do."""
    entries = [store.find_entry(build.key) for build in store.candidates(record)]
    present = [entry for entry in entries if entry is not None]
    return min(present, key=lambda entry: len(entry.fields.items() ^ fields.items()), default=None)


def _met(
    store: Store, spec: Spec, fields: Mapping[str, str], key: str | None
) -> tuple[str, str, tuple[Difference, ...]]:
    """Status, reason, and what differs: of the entry of `key`, or of the one that has the spec's name."""
    try:
        if key is not None and (stored := store.load(key, mark=False)) is not None:
            check_usable(stored[0])
            return "hit", f"the store has entry {key}", ()
        record = store.find_name(spec.full_name, spec.arch)
        entry = None if record is None else _nearest(store, record, fields)
    except OtherSchemaError as error:
        return "miss", str(error), ()
    except SignatureError as error:
        return "untrusted", str(error), ()
    except IntegrityError as error:
        return "damaged", f"a build would replace it: {error}", ()
    if record is None:
        return "miss", "the store has no kernel of this name", ()
    if entry is None:
        return "miss", f"its name points to entry {record.key}, which no root holds", ()
    differs = tuple(
        Difference(label, entry.fields.get(label), fields.get(label))
        for label in sorted({*entry.fields, *fields})
        if entry.fields.get(label) != fields.get(label) and (key is not None or not label.startswith("toolchain."))
    )
    fields_that_differ = ", ".join(field.field for field in differs)
    what = f"what differs: {fields_that_differ}" if differs else "all but the toolchain is the same"
    return "miss", f"the store has this name{'' if key is None else ' under another key'}; {what}", differs
