"""`fusekit explain`: why a build would find a kernel in the store, or would not."""

from __future__ import annotations

import click

from fusekit.errors import ToolchainError
from fusekit_cli import complete, output
from fusekit_cli.options import Session, common, namespaced, one_arch


@click.command("explain")
@click.argument("patterns", metavar="TARGET...", nargs=-1, required=True, shell_complete=complete.packaged)
@one_arch
@namespaced
@common
def command(session: Session, patterns: tuple[str, ...], arch: str | None, namespace: str | None) -> None:
    """Say whether a build of TARGET would hit the store, and which key field differs if it would not. A TARGET is what
    `fusekit build` takes.

    A field is what a key is made of: `spec.<key>`, `toolchain.<distribution>`, `source.<file>`, `options`, `arch`,
    `schema`. Without the compiler the toolchain's fields, and so the key, are unknown: the others are compared.
    """
    from fusekit.compiler.build import select
    from fusekit.compiler.explain import explained
    from fusekit.compiler.identity import Identity

    store = session.open_store()
    specs = select(patterns, arch, namespace)
    try:
        identity = Identity()
        found = [explained(store, spec, identity) for spec in specs]
    except ToolchainError as error:
        identity = Identity(toolchain={"unknown": "unknown"})  # a key cannot do without; the rows leave it out
        found = [explained(store, spec, identity, compiler=False) for spec in specs]
        session.note(str(error))

    def text() -> None:
        for each in found:
            click.echo(f"{each.name}  {each.arch}  {each.status}: {each.reason}")
            if each.differs:
                rows = [
                    (f"  {row.field}", *("(absent)" if value is None else value for value in (row.stored, row.now)))
                    for row in each.differs
                ]
                output.table(session, ("  FIELD", "STORED", "NOW"), rows)

    output.answer(session, output.one_or_many(found), text)
