"""`fusekit specs`: what the packaged spec files have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from fusekit_cli import complete, output
from fusekit_cli.lookup import targets
from fusekit_cli.options import Session, common

if TYPE_CHECKING:
    from fusekit.spec import Spec
    from fusekit.store.lockfile import Build

_SIZES = {"hidden": "H", "intermediate": "I", "experts": "X", "topk": "K", "shared": "J", "tokens": "T"}  # of a layer


@click.command("specs")
@click.argument("patterns", metavar="[TARGET]...", nargs=-1, shell_complete=complete.packaged)
@common
def command(session: Session, patterns: tuple[str, ...]) -> None:
    """List the layers and kernels of the packaged spec files, or of those that TARGET names, as for `fusekit build`.

    KERNELS counts variants, and for a layer those of all its kernels. BYTES are those of their cubins, where a lock of
    the packaged kernels lists all. Sizes of a layer: H hidden, I intermediate, X experts, K of them for a token, J
    columns of the shared expert, T tokens. Those of a kernel are its `problem`.
    """
    from fusekit.spec.catalog import find
    from fusekit.spec.schemas import layer_name

    groups: dict[str, list[Spec]] = {}
    with targets(session, patterns):
        specs = find(patterns)
    for spec in specs:
        groups.setdefault(layer_name(spec) or spec.name, []).append(spec)
    locked = _locked()
    rows = [_row(name, specs, locked) for name, specs in groups.items()]

    def text() -> None:
        headings = ("NAME", "WHAT", "SIZES", "KERNELS", "BYTES")
        cells = [
            (row["name"], row["what"], " ".join(f"{key}={value}" for key, value in row["sizes"].items()),
             row["kernels"], "" if row["bytes"] is None else output.size(row["bytes"]))
            for row in rows
        ]  # fmt: skip
        output.table(
            session, headings, cells, right=("KERNELS", "BYTES"), spare=("BYTES", "WHAT", "KERNELS"), prose=("SIZES",)
        )

    output.answer(session, rows, text)


def _row(name: str, specs: list[Spec], locked: Mapping[tuple[str, str], Build]) -> dict[str, Any]:
    first: Any = specs[0]
    layer = getattr(first, "layer", None)
    if layer is not None:
        sizes = {letter: getattr(layer, field) for field, letter in _SIZES.items()}
    else:
        problem = getattr(first, "problem", None)
        sizes = {} if problem is None else {field.name: getattr(problem, field.name) for field in fields(problem)}
    built = [locked.get((spec.full_name, spec.arch)) for spec in specs]
    cubins = {each.cubin_sha256: each.bytes for each in built if each is not None}
    return {
        "name": name,
        "what": first.op if layer is None else f"{layer.kind} layer",
        "sizes": {letter: size for letter, size in sizes.items() if size},
        "kernels": len(specs),
        "bytes": None if None in built else sum(cubins.values()),
    }


def _locked() -> dict[tuple[str, str], Build]:
    """What the locks of the packaged kernels list, by full name and architecture."""
    from fusekit.spec.catalog import packaged_folder
    from fusekit.store.lockfile import read_lock

    paths = sorted(packaged_folder().with_name("cache_manifests").glob("*.json"))
    return {
        where: builds[0] for path in paths for where, builds in read_lock(path, folder=True).kernels.items()
    }  # fmt: skip
