"""Why a build would find a kernel in the store, or would not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusekit.errors import BuildError, IntegrityError, OtherSchemaError
from fusekit.store import Entry, Store, key_of

if TYPE_CHECKING:
    from fusekit.compiler.identity import Identity
    from fusekit.spec import Spec


@dataclass(frozen=True, slots=True)
class Difference:
    """A key field that is not as it was; None where one side has no such field."""

    field: str
    stored: str | None
    now: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """key: None where it cannot be made. status: `hit`, `miss`, `damaged` (a build replaces it), or `unknown` without a
    compiler. reason: in words. differs: where the store knows the name under another key.
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
    """`explain` of a spec, or `explain_without_compiler`; a spec whose package is missing is one that is unknown."""
    try:
        fields = identity.key_fields(spec)
    except BuildError as error:
        return Explanation(spec.full_name, spec.arch, None, "unknown", str(error))
    return explain(store, spec, fields) if compiler else explain_without_compiler(store, spec, fields)


def explain(store: Store, spec: Spec, fields: Mapping[str, str]) -> Explanation:
    """What a build of `spec`, with the key fields that it has now, would meet in `store`."""
    key = key_of(fields)

    def say(status: str, reason: str, differs: tuple[Difference, ...] = ()) -> Explanation:
        return Explanation(spec.full_name, spec.arch, key, status, reason, differs)

    try:
        if (found := store.load(key, mark=False)) is not None:
            check_usable(found[0])
            return say("hit", f"the store has entry {key}")
        record = store.find_name(spec.full_name, spec.arch)
        entry = None if record is None else store.find_entry(record.key)
    except OtherSchemaError as error:
        return say("miss", str(error))
    except IntegrityError as error:
        return say("damaged", f"a build would replace it: {error}")
    if record is None:
        return say("miss", "the store has no kernel of this name")
    if entry is None:
        return say("miss", f"its name stands for entry {record.key}, which no layer holds")
    differs = _differences(entry, fields)
    return say("miss", f"the store has this name under another key; what differs: {_labels(differs)}", differs)


def explain_without_compiler(store: Store, spec: Spec, fields: Mapping[str, str]) -> Explanation:
    """What can be told where no compiler is installed: of the `fields` of now, the toolchain's mean nothing."""

    def say(reason: str, differs: tuple[Difference, ...] = ()) -> Explanation:
        return Explanation(spec.full_name, spec.arch, None, "unknown", reason, differs)

    try:
        record = store.find_name(spec.full_name, spec.arch)
        entry = None if record is None else store.find_entry(record.key)
    except OtherSchemaError as error:
        return say(f"no compiler to make a key with; {error}")
    except IntegrityError as error:
        return say(f"no compiler to make a key with; what the store has is damaged: {error}")
    if entry is None:
        return say("no compiler to make a key with, and the store has no kernel of this name")
    differs = tuple(each for each in _differences(entry, fields) if not each.field.startswith("toolchain."))
    found = f"what differs: {_labels(differs)}" if differs else "all but the toolchain is the same"
    return say(f"no compiler to make a key with; the store has this name, and {found}", differs)


def _differences(entry: Entry, now: Mapping[str, str]) -> tuple[Difference, ...]:
    return tuple(
        Difference(label, entry.fields.get(label), now.get(label))
        for label in sorted({*entry.fields, *now})
        if entry.fields.get(label) != now.get(label)
    )


def _labels(differs: Iterable[Difference]) -> str:
    return ", ".join(each.field for each in differs)
