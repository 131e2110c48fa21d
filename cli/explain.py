"""`fusekit explain`: why a build would take a kernel from the store, or would not."""

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
    """Show whether a build of TARGET would hit the store, and which key fields differ if it would not. TARGET is as for
    `fusekit build`.

    The fields of a key are `spec.<key>`, `toolchain.<distribution>`, `source.<file>`, `options`, `arch`,
    `schema`. Without the compiler the toolchain's fields, and so the key, are not known, and only the other fields are
    compared.
    """
    from fusekit.compiler.explain import explained
    from fusekit.compiler.identity import Identity
    from fusekit.compiler.targets import select

    store = session.open_store()
    specs = select(patterns, arch, namespace, session.project)
    try:
        identity = Identity()
        explanations = [explained(store, spec, identity) for spec in specs]
    except ToolchainError as error:
        identity = Identity(toolchain={"unknown": "unknown"})  # a key needs one; the rows omit it
        explanations = [explained(store, spec, identity, compiler=False) for spec in specs]
        session.note(str(error))

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
