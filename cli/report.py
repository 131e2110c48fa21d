"""`fusekit report`: one page of HTML about the kernels of a store, a bundle or a wheel."""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import FusekitError, NotBuiltError
from fusekit_cli import complete, output, sources
from fusekit_cli.lookup import kernels
from fusekit_cli.options import Session, common, one_arch, stored_names
from fusekit_cli.progress import progress

if TYPE_CHECKING:
    from fusekit.choice.tuning import Tuning
    from fusekit.plan.occupancy import Occupancy
    from fusekit.store import Entry, NameRecord, Store


@click.command("report")
@click.argument("file", metavar="OUT.html", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("patterns", metavar="[NAME]...", nargs=-1, shell_complete=complete.stored, callback=stored_names)
@one_arch
@click.option("--sass", "machine_code", is_flag=True, help="With the machine code of each kernel, by nvdisasm.")
@sources.sourced
@common
def command(
    session: Session, file: Path, patterns: tuple[str, ...], arch: str | None, machine_code: bool, source: str | None
) -> int:  # fmt: skip
    """Write a page about the kernels that NAME matches (none: all): by model, with resources, occupancy, proof, sizes
    and signers; a click shows arguments, launch and spec of one.

    The page is one file, which sorts and searches by itself and loads nothing. Exit code 1 if a kernel cannot be read:
    the others are on the page; 3 if there is none.
    """
    from fusekit.choice import tuning
    from fusekit.store.entries import KIND, OF_PROGRAMS
    from fusekit_cli.report_page import html

    output.check_folder("OUT.html", file)
    with sources.opened(session, source, patterns, arch) as (store, problems):
        records = _records(store, patterns, arch, problems)
        where = sources.shown(source) if source is not None else ", ".join(sorted({root for _, root in records}))
        tables = {each: tuning.load(store, each) for each in {record.arch for record, _ in records}}
        kernels: list[dict[str, Any]] = []
        entries: list[Entry] = []
        for record, root in records:
            try:
                entry = store.find_entry(record.key)
                if entry is None:
                    raise store.not_built(record.name, record.arch, f"entry {record.key} is in no root")
                if entry.fields.get(KIND) in OF_PROGRAMS:
                    continue
                kernels.append(_kernel(store, record, entry, root if source is None else where, tables[record.arch]))
            except FusekitError as error:
                problems.append(str(error))
                continue
            entries.append(entry)
        if machine_code:
            _add_machine_code(session, store, kernels, entries)
        signed = any(kernel["signed"] for kernel in kernels)
        data = html(where, kernels, _figures(kernels), _notes(store, signed, machine_code)).encode()
    output.save("OUT.html", file, data)
    problems = [*dict.fromkeys(problems)]
    document = {"file": str(file), "bytes": len(data), "kernels": len(kernels), "left_out": problems}
    output.answer(
        session, document,
        lambda: click.echo(f"{file}: {output.plural(len(kernels), 'kernel')}, {output.size(len(data))}"),
    )  # fmt: skip
    output.note_left_out(session, problems)
    return 1 if problems else 0


def _records(
    store: Store, patterns: Sequence[str], arch: str | None, problems: list[str]
) -> list[tuple[NameRecord, str]]:
    """The names that `patterns` match, each once, sorted, with their roots."""
    records: dict[tuple[str, str], tuple[NameRecord, str]] = {}
    for pattern in patterns or ("*",):
        listing = store.listing(pattern, arch)
        problems += listing.problems
        if not listing.names and not listing.problems:
            if patterns or arch:
                raise store.not_built(pattern, arch)
            roots = ", ".join(str(root.path) for root in store.roots)
            raise NotBuiltError(f"there is no kernel in {roots}; `fusekit build` fills the store", name=pattern)
        found = kernels(listing.names) if patterns else listing.names
        records |= {(each.record.name, each.record.arch): (each.record, str(each.root)) for each in found}
    return [records[name] for name in sorted(records)]


def _kernel(store: Store, record: NameRecord, entry: Entry, root: str, table: Tuning) -> dict[str, Any]:
    """The cells of a kernel, what a search finds it by, and the sections of its panel: (title, text or rows)."""
    from fusekit_cli.show import (
        ARGUMENT,
        argument_rows,
        block_of,
        describe,
        occupancy_of,
        rendered,
        set_values,
        short_proof,
    )

    document = describe(record, entry, root)
    resources, spec = document["resources"], document["spec"]
    threads, shared = block_of(entry)
    fits = occupancy_of(entry)
    signers = _signers(store, entry)
    times = _times(record, table)
    gpus = [*store.ran(record.key), *(device for device, *_ in times)]
    rest = {name: document[name] for name in ("key", "root", "lowest_driver", "cubin", "resources")}
    if signers:
        rest["signed_by"] = signers
    launched = {name: value for name, value in entry.launch.items() if name not in ("arguments", "schema")}
    sections: list[tuple[str, Any]] = [
        ("Arguments", [ARGUMENT, *argument_rows(document["arguments"])]),
        ("Spec", _lines(set_values(spec))),
        ("Launch", _lines(set_values(rendered(launched)))),
        ("Times", [("GPU", "PROBLEM", "US"), *times]),
        ("Proof", _lines(short_proof(entry.proof))),
        ("Entry", _lines(rest)),
        ("Toolchain", _lines({**entry.toolchain, "seconds": entry.seconds})),
    ]
    about = [spec.get("summary", ""), "" if fits is None else _sentence(fits, threads)]
    found_by = [record.name, record.key, record.arch, *_lines(set_values(spec)).split(), *signers]
    return {
        "model": record.name.partition("/")[0],
        "name": record.name,
        "arch": record.arch,
        "op": spec.get("op"),
        "registers": resources.get("registers"),
        "spills": resources.get("spill_bytes"),
        "shared": shared,
        "threads": threads,
        "occupancy": None if fits is None else fits.share,
        "proved": entry.proof.get("launches"),
        "ran": ", ".join(dict.fromkeys(gpu.removeprefix("NVIDIA ") for gpu in gpus)),
        "cubin": entry.cubin_bytes,
        "cubin_sha256": entry.cubin_sha256,
        "signed": ", ".join(signers),
        "search": " ".join(found_by).lower(),
        "about": ". ".join(filter(None, about)),
        "sections": [(title, content) for title, content in sections if content and len(content) > 1],
    }


def _sentence(fits: Occupancy, threads: int) -> str:
    return (
        f"{output.plural(fits.ctas, 'CTA')} of {threads} threads on a multiprocessor: {fits.warps} of "
        f"{fits.most_warps} warps, limited by {' and '.join(fits.limits)}"
    )


def _signers(store: Store, entry: Entry) -> list[str]:
    """Who signed `entry`: the comments of trusted keys, and the ids of keys where none is trusted."""
    ids = sorted(store.signatures(entry.to_bytes()))
    if store.trust is None:
        return ids
    return [key.comment or key.id for key in store.trust.keys if key.id in ids]


def _times(record: NameRecord, table: Tuning) -> list[tuple[str, str, str]]:
    """GPU, problem and microseconds of each measurement of the variant of `record`."""
    from fusekit.choice.tuning import features

    variant, wanted = record.name.partition("@")[2], features(record.spec)
    return [
        (row.device, " ".join(f"{dim}={size}" for dim, size in row.problem.items()), f"{us:.1f}")
        for row in table.rows
        if row.features == wanted
        for name, us in row.variants
        if name == variant and us is not None
    ]


def _lines(document: Mapping[str, Any]) -> str:
    return "\n".join(output.tree_lines(document))


def _add_machine_code(
    session: Session, store: Store, kernels: Sequence[dict[str, Any]], entries: Sequence[Entry]
) -> None:
    from fusekit_cli.sass import sass

    def read(entry: Entry) -> str:
        text = sass(store.read_cubin(entry))
        return base64.b64encode(zlib.compress(text.encode(), 9)).decode()

    with progress(session, "disassembling") as update, ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, (kernel, code) in enumerate(zip(kernels, pool.map(read, entries), strict=True), 1):
            kernel["sections"].append(("SASS", {"deflated": code}))
            update(done, len(kernels), kernel["name"], 0)


def _figures(kernels: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    cubins = {kernel["cubin_sha256"]: kernel["cubin"] for kernel in kernels}
    signed = sum(bool(kernel["signed"]) for kernel in kernels)
    return {
        "kernels": f"{len(kernels):,}",
        "spec files": f"{len({kernel['model'] for kernel in kernels}):,}",
        "architectures": ", ".join(sorted({kernel["arch"] for kernel in kernels})),
        "of cubins": output.size(sum(cubins.values())),
        "launches proved": f"{sum(kernel['proved'] or 0 for kernel in kernels):,}",
        "with spills": f"{sum(bool(kernel['spills']) for kernel in kernels):,}",
        "signed": f"{signed:,} of {len(kernels):,}",
    }


def _notes(store: Store, signed: bool, machine_code: bool) -> list[str]:
    import fusekit

    notes = [
        "Occupancy: warps on a multiprocessor, of those that it holds, by CUDA's rules for registers, shared memory "
        "and threads. One large CTA with warps of several roles is usual for a GEMM: low is not slow.",
        "Proved: launches for which the launch record gave the bytes that the compiler's host code gives, on the CPU.",
        "Ran on: GPUs on which fusekit run or bench launched this build in this store, and those that have a time in a "
        "tuning table for what the kernel computes and its variant, maybe of an earlier build.",
    ]
    if store.trust is not None:
        notes.append("Signatures are checked: all that is here is signed by a trusted key.")
    elif signed:
        notes.append(
            "Signed by: ids of keys, which are not checked; set FUSEKIT_TRUSTED_KEYS, and only what they signed is "
            "read."
        )
    if not machine_code:
        notes.append("fusekit report --sass adds the machine code.")
    return [*notes, f"fusekit {fusekit.__version__}"]
