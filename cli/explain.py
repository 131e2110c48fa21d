"""`fusekit explain`: why a build would take a kernel from the store, or would not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from fusekit.errors import ToolchainError, UsageError
from fusekit_cli import complete, output
from fusekit_cli.lookup import without_spec
from fusekit_cli.options import Session, common, namespaced, one_arch

if TYPE_CHECKING:
    from fusekit.spec import Spec
    from fusekit.store import NameRecord, Store


@click.command("explain")
@click.argument("patterns", metavar="TARGET...", nargs=-1, required=True, shell_complete=complete.packaged)
@one_arch
@namespaced
@common
def command(session: Session, patterns: tuple[str, ...], arch: str | None, namespace: str | None) -> None:
    """Show whether a build of TARGET would hit the store, and which key fields differ if it would not. TARGET is as for
    `fusekit build`.

    The fields of a key are `spec.<key>`, `toolchain.<distribution>`, `source.<file>`, `options`, `arch`,
    `schema`. Without the compiler the toolchain's fields, and so the key, are not known, and only the other fields are
    compared.

    Of what `fusekit exec` and `fusekit adopt` put into the store, which no spec builds: of what it is, whether programs
    take it here, and the command that makes a kernel of it.
    """
    from fusekit.compiler.explain import explained
    from fusekit.compiler.identity import Identity

    store = session.open_store()
    specs, others = _specs(session, store, patterns, arch, namespace)
    try:
        identity = Identity()
        explanations = [explained(store, spec, identity) for spec in specs]
    except ToolchainError as error:
        identity = Identity(toolchain={"unknown": "unknown"})  # a key needs one; the rows omit it
        explanations = [explained(store, spec, identity, compiler=False) for spec in specs]
        session.note(str(error))
    if others:
        from fusekit.config import CuteConfig
        from fusekit.cute.explain import explained as of_program

        cute = CuteConfig.from_environment(session.config)
        explanations += [of_program(cute, record) for record in others]

    def show() -> None:
        for explanation in explanations:
            text = f"{explanation.name}  {explanation.arch}  {explanation.status}: {explanation.reason}"
            for line in output.lines([text]):
                click.echo(line)
            if explanation.differs:
                rows = [
                    (f"  {row.field}", *("(absent)" if value is None else value for value in (row.stored, row.now)))
                    for row in explanation.differs
                ]
                output.table(session, ("  FIELD", "STORED", "NOW"), rows, spare=("STORED",), prose=("NOW",))

    output.answer(session, output.one_or_many(explanations), show)


def _specs(
    session: Session, store: Store, patterns: Sequence[str], arch: str | None, namespace: str | None
) -> tuple[tuple[Spec, ...], list[NameRecord]]:
    """The specs that `patterns` name, and names of the store that no spec has."""
    from fusekit.compiler.targets import select

    try:
        return select(patterns, arch, namespace, session.project), []
    except UsageError:
        stored = {pattern: without_spec(store, pattern, arch) for pattern in patterns}
        if not any(stored.values()):
            raise
    rest = [pattern for pattern, records in stored.items() if not records]
    others = {(record.name, record.arch): record for records in stored.values() for record in records}
    return (select(rest, arch, namespace, session.project) if rest else ()), [*others.values()]
