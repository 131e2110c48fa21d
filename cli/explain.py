"""`fusekit explain`: why a build would find a kernel in the store, or would not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import IntegrityError, ToolchainError
from fusekit.store import Store, key_of
from fusekit_cli import output
from fusekit_cli.options import Session, common

if TYPE_CHECKING:
    from fusekit.spec import KernelSpec


@click.command("explain")
@click.argument("patterns", metavar="NAME...", nargs=-1, required=True)
@click.option("--arch", help="Only this architecture, such as sm_90a.")
@common
def command(session: Session, patterns: tuple[str, ...], arch: str | None) -> None:
    """Say whether a build of NAME (or of a spec file) would hit the store, and which key field differs if it would
    not.

    A field is what a key is made of: `spec.<key>`, `toolchain.<distribution>`, `source.<file>`, `options`, `arch`,
    `schema`. Without the compiler the toolchain's fields, and so the key, are unknown: the others are compared.
    """
    from fusekit.compiler.identity import Identity
    from fusekit.spec import find

    store = session.open_store()
    specs = [spec for spec in find(patterns) if arch in (None, spec.arch)]
    try:
        identity = Identity()
        documents = [_explain(store, spec, identity.key_fields(spec)) for spec in specs]
    except ToolchainError as error:
        identity = Identity(toolchain={"unknown": "unknown"})  # a key cannot do without; the rows leave it out
        documents = [_without_compiler(store, spec, identity.key_fields(spec)) for spec in specs]
        session.note(str(error))

    def text() -> None:
        for document in documents:
            click.echo(f"{document['name']}  {document['arch']}  {document['status']}: {document['reason']}")
            if document["differs"]:
                rows = [
                    (
                        f"  {row['field']}",
                        *("(absent)" if row[side] is None else row[side] for side in ("stored", "now")),
                    )
                    for row in document["differs"]
                ]
                output.table(session, ("  FIELD", "STORED", "NOW"), rows)

    output.answer(session, output.one_or_many(documents), text)


Differences = Sequence[dict[str, str | None]]


def _document(spec: KernelSpec, key: str | None, status: str, reason: str, differs: Differences = ()) -> dict[str, Any]:
    named = {"name": spec.full_name, "arch": spec.arch, "key": key}
    return named | {"status": status, "reason": reason, "differs": list(differs)}


def _explain(store: Store, spec: KernelSpec, fields: Mapping[str, str]) -> dict[str, Any]:
    key = key_of(fields)
    say = partial(_document, spec, key)
    try:
        if store.load(key, mark=False) is not None:
            return say("hit", f"the store has entry {key}")
        record = store.find_name(spec.full_name, spec.arch)
        entry = None if record is None else store.find_entry(record.key)
    except IntegrityError as error:
        return say("damaged", f"a build would replace it: {error}")
    if record is None:
        return say("miss", "the store has no kernel of this name")
    if entry is None:
        return say("miss", f"its name stands for entry {record.key}, which no layer holds")
    differs = _differences(entry.fields, fields)
    return say("miss", f"the store has this name under another key; what differs: {_labels(differs)}", differs)


def _without_compiler(store: Store, spec: KernelSpec, fields: Mapping[str, str]) -> dict[str, Any]:
    say = partial(_document, spec, None, "unknown")
    try:
        record = store.find_name(spec.full_name, spec.arch)
        entry = None if record is None else store.find_entry(record.key)
    except IntegrityError as error:
        return say(f"no compiler to make a key with; what the store has is damaged: {error}")
    if entry is None:
        return say("no compiler to make a key with, and the store has no kernel of this name")
    differs = [row for row in _differences(entry.fields, fields) if not str(row["field"]).startswith("toolchain.")]
    found = f"what differs: {_labels(differs)}" if differs else "all but the toolchain is the same"
    return say(f"no compiler to make a key with; the store has this name, and {found}", differs)


def _differences(stored: Mapping[str, str], now: Mapping[str, str]) -> Differences:
    return [
        {"field": label, "stored": stored.get(label), "now": now.get(label)}
        for label in sorted({*stored, *now})
        if stored.get(label) != now.get(label)
    ]


def _labels(differs: Differences) -> str:
    return ", ".join(str(row["field"]) for row in differs)
