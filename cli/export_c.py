"""`fusekit export --lang c`: stored kernels as C source, or a loader of bundles, for programs without Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fusekit.errors import FusekitError, NotBuiltError, StoreError
from fusekit_cli import output
from fusekit_cli.lookup import check_alike, chosen, is_layer, is_whole_layer, stored
from fusekit_cli.lookup import kernels as kernels_of
from fusekit_cli.options import Session

if TYPE_CHECKING:
    from fusekit.abi import LaunchRecord
    from fusekit.cabi import Exported, ExportedLayer
    from fusekit.store import NameRecord, Store


def run(session: Session, out: Path, names: tuple[str, ...], prefix: str, arch: str | None = None) -> None:
    """Write the two files and print their paths."""
    from fusekit.cabi import generate

    kernels, layers, _ = chosen_exports(session, names, arch)
    texts = generate(list(kernels.values()), prefix, list(layers.values()))
    _answer(session, out, texts, sorted(kernels), prefix, sorted(layers))


def chosen_exports(
    session: Session, names: tuple[str, ...], arch: str | None
) -> tuple[dict[str, Exported], dict[str, ExportedLayer], list[str]]:
    """Kernels, with those of layers, and layers, by name; which of the kernels were named."""
    from fusekit.cabi import Exported, ExportedLayer
    from fusekit.choice.variants import check_name
    from fusekit.layers import record_of

    store = session.open_store()
    kernels: dict[str, Exported] = {}
    layers: dict[str, ExportedLayer] = {}
    named_kernels: list[str] = []
    for name in names:
        listings = stored(store, name, arch)
        layer = is_whole_layer(store, name, [listed.record for listed in listings])
        listings = listings if layer else kernels_of(chosen(store, name, arch))
        check_alike(listings)
        records = [listed.record for listed in listings]
        if not layer and is_layer(name, records):
            raise NotBuiltError.of(
                name, arch, "kernels of it are, but no record of the layer: a build of it has not ended, or a fusekit"
                " before 0.2 built them"
            )  # fmt: skip
        if layer:
            record = record_of(store, name, _one_arch(name, records))
            layers[name] = ExportedLayer(record, {key: each.name for key, each in record.kernels.items()})
            for key, each in record.kernels.items():
                kernels[each.name] = Exported(
                    each.name, *_loaded(store, each.name, record.arch, key), dict(each.defaults)
                )
            continue
        for listed in listings:
            named = listed.record
            check_name(named)
            launch, cubin = _loaded(store, named.name, named.arch, named.key)
            if named.name in kernels and kernels[named.name].record != launch:
                raise FusekitError(f"{named.name} is stored for several architectures; choose one with --arch")
            kernels[named.name] = Exported(named.name, launch, cubin, dict(named.defaults))
            named_kernels.append(named.name)
    return kernels, layers, list(dict.fromkeys(named_kernels))


def _one_arch(name: str, records: Sequence[NameRecord]) -> str:
    archs = sorted({record.arch for record in records})
    if len(archs) > 1:
        raise FusekitError(f"{name} is stored for several architectures ({', '.join(archs)}); choose one with --arch")
    return archs[0]


def _loaded(store: Store, name: str, arch: str, key: str) -> tuple[LaunchRecord, bytes]:
    from fusekit.runtime.wellformed import launch_record

    loaded = store.load(key)
    if loaded is None:
        raise NotBuiltError.of(name, arch, f"its name points to entry {key}, which no root holds")
    return launch_record(loaded[0]), loaded[1]


def run_loader(session: Session, out: Path, prefix: str) -> None:
    """Write the loader of bundles and print the paths of its files."""
    from fusekit.cabi import generate_loader

    _answer(session, out, generate_loader(prefix), [], prefix)


def _answer(
    session: Session, out: Path, texts: Mapping[str, str], kernels: list[str], prefix: str, layers: Sequence[str] = ()
) -> None:
    written = _write(out, texts)
    document = {"files": written, "kernels": kernels, "layers": list(layers), "prefix": prefix}
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
