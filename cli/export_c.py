"""`fusekit export --lang c`: stored kernels as C source, or a loader of bundles, for programs without Python."""

from __future__ import annotations

from collections.abc import Mapping
from operator import methodcaller
from pathlib import Path

import click

from fusekit.errors import FusekitError, NotBuiltError, StoreError
from fusekit_cli import output
from fusekit_cli.lookup import check_alike, chosen, is_layer, note_unbuilt
from fusekit_cli.options import Session


def run(session: Session, out: Path, names: tuple[str, ...], prefix: str, arch: str | None = None) -> None:
    """Write the two files and print their paths."""
    from fusekit.cabi import Exported, generate
    from fusekit.choice.variants import check_name
    from fusekit.runtime.wellformed import launch_record

    store = session.open_store()
    kernels: dict[str, Exported] = {}
    for name in names:
        listings = chosen(store, name, arch)
        check_alike(listings)
        records = [listed.record for listed in listings]
        note_unbuilt(session, name, records)
        if is_layer(name, records):
            session.note(
                f"{name} is a layer: each of its kernels has functions of its own; `fusekit show {name}` shows in "
                "which order they are launched, and on what memory"
            )
        for listed in listings:
            record = listed.record
            check_name(record)
            stored = store.load(record.key)
            if stored is None:
                raise NotBuiltError.of(
                    record.name, record.arch, f"its name points to entry {record.key}, which no root holds"
                )
            entry, cubin = stored
            launch = launch_record(entry)
            if record.name in kernels and kernels[record.name].record != launch:
                raise FusekitError(f"{record.name} is stored for several architectures; choose one with --arch")
            kernels[record.name] = Exported(record.name, launch, cubin, dict(record.defaults))
    _answer(session, out, generate(list(kernels.values()), prefix), sorted(kernels), prefix)


def run_loader(session: Session, out: Path, prefix: str) -> None:
    """Write the loader of bundles and print the paths of its files."""
    from fusekit.cabi import generate_loader

    _answer(session, out, generate_loader(prefix), [], prefix)


def _answer(session: Session, out: Path, texts: Mapping[str, str], kernels: list[str], prefix: str) -> None:
    written = _write(out, texts)
    document = {"files": written, "kernels": kernels, "prefix": prefix}
    output.answer(session, document, lambda: click.echo("\n".join(written)))


def _write(out: Path, texts: Mapping[str, str]) -> list[str]:
    """Write each file to the folder `out`, atomically, replacing existing ones; returns their paths."""
    from fusekit.store.publishing import replace_file

    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            replace_file(out / file, methodcaller("write", text.encode()))
            written.append(str(out / file))
    except OSError as error:
        raise StoreError(f"{out}: {error.strerror}; choose a folder that can be written to") from error
    return written
