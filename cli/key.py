"""`fusekit key`: keys that sign, and what they sign."""

from __future__ import annotations

from pathlib import Path

import click

from fusekit.errors import UsageError
from fusekit_cli import complete, output
from fusekit_cli.options import Session, common, one_arch, signing


@click.group("key")
@common
def command(session: Session) -> None:
    """Make and show Ed25519 keys, and sign what is in the store.

    FUSEKIT_SIGNING_KEY, or --sign, names the private key that signs what is built, exported and locked.
    FUSEKIT_TRUSTED_KEYS names files of public keys, one a line; if it is set, nothing else is loaded.
    """


@command.command("new")
@click.argument("file", metavar="FILE", type=click.Path())
@click.option("--comment", default="", help="Whose key it is; stands in the public key's line.")
@common
def new(session: Session, file: str, comment: str) -> None:
    """Make a key pair: FILE, which only you may read, and FILE.pub, the line for others' lists of trusted keys."""
    from fusekit.store.signature import generate

    path = Path(file).absolute()
    public = generate(path, comment)
    document = {"id": public.id, "private": str(path), "public": f"{path}.pub", "line": public.line()}

    def text() -> None:
        click.echo(f"key {public.id}\nprivate  {path}\npublic   {path}.pub\n{public.line()}")

    output.answer(session, document, text)


@command.command("show")
@click.argument("file", metavar="FILE", type=click.Path())
@common
def show(session: Session, file: str) -> None:
    """Show the public keys of FILE: a list of trusted keys, or a private key whose public half is wanted."""
    from fusekit.store.signature import read_any_keys

    keys = read_any_keys(Path(file).absolute())
    documents = [{"id": key.id, "comment": key.comment, "line": key.line()} for key in keys]

    def text() -> None:
        for key in keys:
            click.echo(f"{key.id}  {key.line()}")

    output.answer(session, documents, text)


@command.command("sign")
@click.argument("patterns", metavar="[NAME]...", nargs=-1, shell_complete=complete.stored)
@one_arch
@signing
@common
def sign(session: Session, patterns: tuple[str, ...], arch: str | None) -> None:
    """Sign the kernels of the writable store that NAME means (none: all, and tuning tables), once all is checked.

    By that you vouch for them, whoever built them. What is built with a signing key is signed at once.
    """
    from fusekit.runtime.wellformed import WELLFORMED
    from fusekit.share.selection import select, sign_selection, sign_tuning
    from fusekit.store import Store

    signer = session.open_store().signer
    if signer is None:
        raise UsageError("no signing key is given; signing needs one; name it with --sign or FUSEKIT_SIGNING_KEY")
    store = Store(session.config.store, signing_key=session.config.signing_key)  # trusted or not: it is to be signed
    selection = select(store, patterns, arch)
    sign_selection(store, selection)
    tables = [] if patterns else sign_tuning(store, WELLFORMED.tuning, arch)
    held = {"entries": len(selection.entries), "names": len(selection.records), "tuning": tables}
    document = {"id": signer.public.id, **held}

    def text() -> None:
        signed = f"{output.plural(len(selection.records), 'name')} and {output.plural(len(selection.entries), 'entry')}"
        tuning = f", and the tuning tables of {', '.join(tables)}," if tables else ""
        click.echo(f"{signed}{tuning} signed by {signer.public.id}")

    output.answer(session, document, text)
