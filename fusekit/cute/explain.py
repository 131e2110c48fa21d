"""What of the store no spec builds: of what it was made, and whether the same would be made or used here now."""

from __future__ import annotations

from collections.abc import Mapping

from fusekit.compiler.explain import Difference, Explanation, check_usable
from fusekit.config import CuteConfig, program_environment
from fusekit.cute import adopt
from fusekit.cute.blobs import machine_fields, open_store
from fusekit.cute.packages import PACKAGES, fields_of, versions_of
from fusekit.errors import BuildError, FusekitError, IntegrityError, SignatureError, ToolchainError
from fusekit.store import Entry, NameRecord, Store, key_of
from fusekit.store.entries import CARRIED, HOST_OBJECT, of_program
from fusekit.store.names import split

_PYTHON = ("python3",)


def explained(cute: CuteConfig, record: NameRecord) -> Explanation:
    """Why a program would get what `record` names, or `fusekit adopt` make the same kernel, or not. record: of an entry
    of `fusekit exec`, or of a kernel that was adopted.
    """
    store = open_store(cute)
    kind = of_program(record.spec)
    try:
        stored = store.load(record.key, mark=False)
        if stored is not None and kind is None:
            check_usable(stored[0])
    except SignatureError as error:
        return _of(record, "untrusted", str(error))
    except IntegrityError as error:
        return _of(record, "damaged", str(error))
    if stored is None:
        return _of(record, "miss", f"its name points to entry {record.key}, which no root holds")
    try:
        explain = {HOST_OBJECT: _host_object, CARRIED: _carried, None: _adopted}[kind]
        return explain(store, record, stored[0])
    except FusekitError as error:
        return _of(record, "unknown", str(error))
    except (AttributeError, LookupError, TypeError, ValueError):
        return _of(record, "damaged", f"its name record or entry is not as fusekit writes it: fusekit rm {record.name}")


def _of(record: NameRecord, status: str, reason: str, differs: tuple[Difference, ...] = ()) -> Explanation:
    return Explanation(record.name, record.arch, record.key, status, reason, differs)


def _compared(stored: Mapping[str, str], now: Mapping[str, str]) -> tuple[Difference, ...]:
    labels = sorted(label for label in {*stored, *now} if stored.get(label) != now.get(label))
    return tuple(Difference(label, stored.get(label), now.get(label)) for label in labels)


def _words(differs: tuple[Difference, ...]) -> str:
    return ", ".join(row.field for row in differs)


def _program(record: NameRecord) -> str:
    """The function that it was compiled for, as the end of a sentence."""
    label = record.spec[HOST_OBJECT]
    return f"`fusekit exec` compiled for {label.get('module')}:{label.get('function')}"


def _host_object(store: Store, record: NameRecord, entry: Entry) -> Explanation:
    """The rest of the key is known when a program has traced."""
    now = machine_fields()
    common = [label for label in entry.fields if label in now or label.startswith("toolchain.")]
    differs = _compared({label: entry.fields[label] for label in common}, now)
    if differs:
        reason = f"programs compile anew here; what differs: {_words(differs)}"
        return _of(record, "miss", f"what {_program(record)}; {reason}", differs)
    reason = (
        f"a program whose trace gives the same takes it, and FUSEKIT_MISS=warn says why one does not; to launch it by a"
        f" name: fusekit adopt {record.name}"
    )
    return _of(record, "hit", f"what {_program(record)}; {reason}")


def _carried(store: Store, record: NameRecord, entry: Entry) -> Explanation:
    package = PACKAGES.get(record.spec[CARRIED].get("package", ""))
    if package is None:
        return _of(record, "miss", "it is of the cache of a package that this fusekit does not know; update fusekit")
    what = f"what {package.name} compiled under `fusekit exec --with {package.name}`"
    now = fields_of(package, versions_of(_PYTHON, program_environment(), [package]))
    differs = _compared({**entry.fields, "content": ""}, {**now, "content": ""})
    if differs:
        reason = f"it is not laid out for the python3 on PATH here; what differs: {_words(differs)}"
        return _of(record, "miss", f"{what}; {reason}", differs)
    reason = f"it is laid out for the python3 on PATH by: fusekit exec --with {package.name} -- CMD"
    return _of(record, "hit", f"{what}; {reason}")


def _adopted(store: Store, record: NameRecord, entry: Entry) -> Explanation:
    of = adopt.entry_of(store, entry)
    if of is None:
        reason = "whose entry is gone: it is launched as it is; to make it again, run the program: fusekit exec -- CMD"
        return _of(record, "unknown", f"`fusekit adopt` made it of what `fusekit exec` compiled, {reason}")
    origin = f"`fusekit adopt` made it of {of.name}, which {_program(of)}"
    command = _command(record, of)
    try:
        now = adopt.fields_now(store, record, of)
    except ToolchainError:
        raise
    except BuildError as error:
        return _of(record, "miss", f"{origin}; it is launched as it is, and not made again here: {error}")
    if key_of(now) == record.key:
        return _of(record, "hit", f"{origin}; this would give the same kernel: {command}")
    differs = _compared(entry.fields, now)
    reason = f"it is launched as it is; made again it has another key, as these differ: {_words(differs)}"
    return _of(record, "miss", f"{origin}; {reason}; to do that: {command}", differs)


def _command(record: NameRecord, of: NameRecord) -> str:
    """The command that adopts `of` as `record`."""
    file, kernel, variant = split(record.name)
    name = "" if record.name == adopt.name_of(of.name) else f" --as {file}/{kernel}@{variant}"
    roles = {name: table.get("role") for name, table in record.spec["arguments"].items()}
    given = "".join(f" --role {name}={role}" for name, role in roles.items() if role in ("input", "output"))
    return f"fusekit adopt {of.name}{name}{given}"
