"""`fusekit export --lang c`: stored kernels as C source, or a loader of bundles, for programs without Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fusekit.errors import FusekitError, NotBuiltError, StoreError
from fusekit_cli import output
from fusekit_cli.lookup import check_alike, chosen, is_whole_layer, note_unbuilt, stored
from fusekit_cli.options import Session

if TYPE_CHECKING:
    from fusekit.abi.layer_record import LayerRecord
    from fusekit.store import NameRecord, Store


def run(session: Session, out: Path, names: tuple[str, ...], prefix: str, arch: str | None = None) -> None:
    """Write the two files and print their paths."""
    from fusekit.cabi import Exported, ExportedLayer, generate
    from fusekit.choice.variants import check_name
    from fusekit.runtime.wellformed import launch_record

    store = session.open_store()
    kernels: dict[str, Exported] = {}
    layers: dict[str, ExportedLayer] = {}
    for name in names:
        listings = stored(store, name, arch)
        layer = is_whole_layer(name, [listed.record for listed in listings])
        listings = listings if layer else chosen(store, name, arch)
        check_alike(listings)
        records = [listed.record for listed in listings]
        note_unbuilt(session, name, records)
        if layer:
            record, used = layer_record_of(store, name, records)
            layers[name] = ExportedLayer(record, {each.key: each.name for each in used})
            listings = [listed for listed in listings if listed.record in used]
        for listed in listings:
            named = listed.record
            check_name(named)
            loaded = store.load(named.key)
            if loaded is None:
                raise NotBuiltError.of(
                    named.name, named.arch, f"its name points to entry {named.key}, which no root holds"
                )
            entry, cubin = loaded
            launch = launch_record(entry)
            if named.name in kernels and kernels[named.name].record != launch:
                raise FusekitError(f"{named.name} is stored for several architectures; choose one with --arch")
            kernels[named.name] = Exported(named.name, launch, cubin, dict(named.defaults))
    texts = generate(list(kernels.values()), prefix, list(layers.values()))
    _answer(session, out, texts, sorted(kernels), prefix, sorted(layers))


def layer_record_of(store: Store, name: str, records: Sequence[NameRecord]) -> tuple[LayerRecord, list[NameRecord]]:
    """The record of a layer, with the variants that are taken where no device is known, and those of its kernels."""
    from fusekit.choice import tuning
    from fusekit.choice.variants import choose
    from fusekit.plan.layer import program, stored_options
    from fusekit.plan.layer.record import layer_record
    from fusekit.plan.operations import OPERATIONS

    archs = sorted({record.arch for record in records})
    if len(archs) > 1:
        raise FusekitError(f"{name} is stored for several architectures ({', '.join(archs)}); choose one with --arch")
    options = stored_options(name, {record.name: record.spec for record in records})
    assert options is not None
    plan, table = program(options), tuning.load(store, archs[0])
    variants = {
        part: [record for record in records if record.name.startswith(f"{name}.{part}@")] for part in plan.parts
    }
    used: dict[str, NameRecord] = {}

    def key(part: str, tokens: int) -> str:
        keys, dims = plan.parts[part], plan.dims(tokens)
        operation, problem = OPERATIONS[keys["op"]], {"T": dims["T"]}
        if operation.gemm:
            problem = {**keys["problem"], "M": dims["M"] if operation.ragged else dims["T"]}
        found = choose(variants[part], problem, table)
        used[found.key] = found
        return found.key

    record = layer_record(options, archs[0], key)
    named = {key for ladder in record.parts.values() for _, key in ladder}
    return record, [each for key, each in used.items() if key in named]


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
