"""`fusekit export`: kernels of the store in one file."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from fusekit.errors import UsageError
from fusekit_cli import complete, output
from fusekit_cli.lookup import note_unbuilt
from fusekit_cli.options import Session, common, given, one_arch, signing, stored_names
from fusekit_cli.terminal import writing

STDOUT = "-"


@click.command("export")
@click.argument("file", metavar="FILE", type=click.Path(), required=False)
@click.argument("patterns", metavar="[NAME]...", nargs=-1, shell_complete=complete.stored, callback=stored_names)
@one_arch
@click.option(
    "--lang", type=click.Choice(["c", "tvm-ffi"]), help="Write C source into the folder FILE, or a library of TVM-FFI."
)
@click.option("--prefix", default="fusekit", show_default=True, help="Prefix of every public name in the source.")
@click.option("--loader", is_flag=True, help="With --lang c: source that loads kernels from bundles, without kernels.")
@click.option("--wheel", metavar="NAME-VERSION", help="Write a Python wheel of this name; then there is no FILE.")
@click.option(
    "-o",
    "--folder",
    metavar="DIR",
    type=click.Path(),
    default="dist",
    show_default=True,
    help="With --wheel: where the wheel is written.",
)
@click.option(
    "--force", is_flag=True, help="Replace a bundle or wheel that another key has signed, or this export would not."
)
@signing
@common
def command(
    session: Session, file: str | None, patterns: tuple[str, ...], arch: str | None, lang: str | None, prefix: str,
    loader: bool, wheel: str | None, folder: str, force: bool,
) -> None:  # fmt: skip
    """Write the kernels that NAME matches (none: all) to FILE, a bundle. The same kernels give the same bytes. FILE may
    be - for standard output.

    With --wheel, every argument is a NAME, and the kernels go into DIR/NAME_VERSION-py3-none-any.whl. Where pip has
    installed it, every store has them, read-only.

    With --lang c, FILE is a folder for PREFIX.h and PREFIX.c: typed functions that load and launch the kernels, with
    their cubins, and launch the passes of a layer (file/layer). The source is C11 and C++17, needs only libdl, and
    opens the driver at run time.

    With --lang tvm-ffi, FILE is one shared library with a TVM-FFI function for each kernel and each pass of a layer,
    which PyTorch, JAX, C++ and Rust load. It takes a C compiler and the package apache-tvm-ffi.

    With --lang c --loader the source has no kernels, but functions that load those of a bundle, by name, at run time;
    it takes no NAME, reads no store, and is the same for every bundle.
    """
    if wheel is not None:
        if lang is not None:
            raise UsageError("export --wheel holds kernels for Python; leave --lang out")
        first = () if file is None else (stored_names(click.get_current_context(), click.Option(["--name"]), file),)
        _wheel(session, wheel, Path(folder), (*first, *patterns), arch, force=force)
        return
    if given("folder"):
        raise UsageError("export -o is for wheels; give --wheel NAME-VERSION with it, or a bundle as FILE")
    if file is None:
        raise click.MissingParameter(param_hint="FILE", param_type="argument")
    if loader and lang != "c":
        raise UsageError("export --loader writes source; give --lang c with it")
    if lang != "c" and given("prefix"):
        raise UsageError("export --prefix is for source; give --lang c with it")
    if lang == "tvm-ffi":
        if session.sign is not None:
            raise UsageError("export --lang tvm-ffi writes a library, which is not signed; leave --sign out")
        if not patterns:
            raise UsageError("export --lang tvm-ffi names what the library holds; give at least one NAME")
        from fusekit_cli.export_tvm_ffi import run as run_tvm_ffi

        run_tvm_ffi(session, Path(file), patterns, arch)
        return
    if lang == "c":
        if session.sign is not None:
            raise UsageError("export --lang c writes source, which is not signed; leave --sign out")
        from fusekit_cli.export_c import run, run_loader

        if loader:
            if patterns or arch:
                raise UsageError(
                    "export --lang c --loader takes no NAME and no --arch: the loader is the same for every kernel; put"
                    " kernels into a bundle with: fusekit export kernels.tar NAME"
                )
            run_loader(session, Path(file), prefix)
            return
        if not patterns:
            raise UsageError("export --lang c names the kernels that the source holds; give at least one NAME")
        run(session, Path(file), patterns, prefix, arch)
        return
    from fusekit.share.bundle import signed_by
    from fusekit.share.loader import export_bundle
    from fusekit.share.selection import select

    store = session.open_store()
    signer = None if store.signer is None else store.signer.public.id
    if file != STDOUT and not force:
        _check_signer(file, signed_by(Path(file)), signer, "another FILE")
    selection = select(store, patterns, arch)
    output.note_left_out(session, selection.left_out)
    with _place(session, file) as path:
        done = export_bundle(store, selection, path)
    for name in patterns:
        note_unbuilt(session, store, name, [listed.record for listed in store.names(name, arch)])
    document = {
        "entries": done.entries,
        "names": done.names,
        "bytes": done.bytes,
        "digest": done.digest,
        "signed_by": signer,
    }

    def text() -> None:
        held = f"{output.plural(done.names, 'name')}, {output.plural(done.entries, 'entry')}, {output.size(done.bytes)}"
        signed = f", signed by {document['signed_by']}" if document["signed_by"] else ""
        (session.note if file == STDOUT else click.echo)(f"{file}: {held}{signed}")

    if file == STDOUT:
        text()
    else:
        output.answer(session, document, text)


def _check_signer(file: str | Path, before: str, signer: str | None, remedy: str) -> None:
    """Refuse to replace a file that the key `before` signed, "" for none, by one that `signer` does."""
    if before not in ("", signer):
        by = "is not signed" if signer is None else f"is signed by {signer}"
        raise UsageError(f"{file} is signed by {before}, and this export {by}; give --force to replace it, or {remedy}")


def _wheel(
    session: Session, wheel: str, folder: Path, patterns: tuple[str, ...], arch: str | None, *, force: bool
) -> None:
    from fusekit.share.selection import select
    from fusekit.share.wheel import check_wheel_name, export_wheel, signed_by, wheel_path

    name, version = check_wheel_name(wheel)
    store = session.open_store()
    signer = None if store.signer is None else store.signer.public.id
    if not force:
        file = wheel_path(name, version, folder)
        _check_signer(file, signed_by(file), signer, "another NAME-VERSION")
    selection = select(store, patterns, arch)
    output.note_left_out(session, selection.left_out)
    path, done = export_wheel(store, selection, name, version, folder)
    for pattern in patterns:
        note_unbuilt(session, store, pattern, [listed.record for listed in store.names(pattern, arch)])
    document = {
        "file": str(path), "entries": done.entries, "names": done.names, "bytes": done.bytes, "signed_by": signer
    }  # fmt: skip

    def text() -> None:
        held = f"{output.plural(done.names, 'name')}, {output.plural(done.entries, 'entry')}, {output.size(done.bytes)}"
        click.echo(f"{path}: {held}{f', signed by {signer}' if signer else ''}")
        session.note(f"next: pip install {shlex.quote(str(path))}")

    output.answer(session, document, text)


@contextmanager
def _place(session: Session, file: str) -> Iterator[Path]:
    """The path to write a bundle to; for stdout a temporary file, which is copied to stdout at the end."""
    if file != STDOUT:
        yield Path(file).absolute()
        return
    if session.json:
        raise UsageError("export - writes the bundle to stdout, and so does --json; leave one of them out")
    if sys.stdout.isatty():
        raise UsageError("export - writes a bundle to stdout, which is a terminal; redirect it to a file or a program")
    with TemporaryDirectory(prefix="fusekit-export-") as folder:
        path = Path(folder) / "bundle"
        yield path
        with path.open("rb") as bundle, writing():
            shutil.copyfileobj(bundle, sys.stdout.buffer)
            sys.stdout.buffer.flush()
