"""`fusekit key`: create and show signing keys, and sign kernels."""

from __future__ import annotations

from pathlib import Path

import click

from fusekit.errors import UsageError
from fusekit_cli import complete, output
from fusekit_cli.options import Session, common, one_arch, signing, stored_names


@click.group("key")
@common
def command(session: Session) -> None:
    """Create and show Ed25519 keys, and sign the kernels in the store.

    FUSEKIT_SIGNING_KEY, or --sign, names the private key that signs what is built, exported and locked.
    FUSEKIT_TRUSTED_KEYS names files of public keys, one a line; if it is set, nothing else is loaded.
    """


@command.command("new")
@click.argument("file", metavar="FILE", type=click.Path())
@click.option("--comment", default="", help="The owner of the key, for the public key's line.")
@common
def new(session: Session, file: str, comment: str) -> None:
    """Create a key pair: FILE, which only you may read, and FILE.pub, the line for lists of trusted keys."""
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
    """Show the public keys of FILE: a list of trusted keys, or a private key, whose public key is shown."""
    from fusekit.store.signature import read_any_keys

    keys = read_any_keys(Path(file).absolute())
    documents = [{"id": key.id, "comment": key.comment, "line": key.line()} for key in keys]

    def text() -> None:
        for key in keys:
            click.echo(f"{key.id}  {key.line()}")

    output.answer(session, documents, text)


@command.command("sign")
@click.argument("patterns", metavar="[NAME]...", nargs=-1, shell_complete=complete.stored, callback=stored_names)
@one_arch
@signing
@common
def sign(session: Session, patterns: tuple[str, ...], arch: str | None) -> None:
    """Check, then sign, the kernels of the writable store that NAME matches (none: all, and tuning tables).

    Sign only kernels that you trust, whoever built them. Builds with a signing key sign their kernels themselves.
    """
    from fusekit.runtime.wellformed import WELLFORMED
    from fusekit.share.selection import select, sign_selection, sign_tuning
    from fusekit.store import Store

    signer = session.open_store().signer
    if signer is None:
        raise UsageError("there is no signing key; name one with --sign or FUSEKIT_SIGNING_KEY")
    store = Store(session.config.store, signing_key=session.config.signing_key)  # no trust: they may be unsigned
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
