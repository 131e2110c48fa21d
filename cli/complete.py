"""Shell completion of arguments: names of packaged specs or of the store, stage by stage, and spec files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from fusekit.errors import FusekitError, is_glob
from fusekit.store.names import layer_of
from fusekit_cli.options import Session


def files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files and folders, completed by the shell."""
    return [CompletionItem(incomplete, type="file")]


def families(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Model types that `new` reads."""
    from fusekit.spec.hf_families import FAMILIES

    return sorted(name for name in FAMILIES if name.startswith(incomplete))


def doors(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Trainers and servers of `new --for`."""
    from fusekit.spec.doors import DOORS

    return [name for name in DOORS if name.startswith(incomplete)]


def packaged(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of packaged specs, and spec files."""
    from fusekit.spec.catalog import packaged_files
    from fusekit.spec.parse import parse_file

    files = {path.stem: path for path in packaged_files()}

    def names(path: Path) -> list[str]:
        with contextlib.suppress(FusekitError):
            return [spec.full_name.partition("/")[2] for spec in parse_file(path)]
        return []

    file, kernels_of, rest = incomplete.partition(".toml/")
    if kernels_of:
        return _inside(f"{file}.toml", rest, names(Path(f"{file}.toml").expanduser()))
    return _staged(incomplete, files, lambda stem: names(files[stem])) + _spec_files(incomplete)


def stored(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names in the store of this command line; reads no record."""
    kernels: dict[str, set[str]] = {}
    with contextlib.suppress(FusekitError, OSError):
        for full_name, _ in ctx.ensure_object(Session).open_store().recorded():
            if layer_of(full_name) is not None:
                continue
            stem, _, name = full_name.partition("/")
            kernels.setdefault(stem, set()).add(name)
    return _staged(incomplete, kernels, lambda stem: kernels[stem])


def _staged(incomplete: str, stems: Iterable[str], names: Callable[[str], Iterable[str]]) -> list[str]:
    """Files, then the kernels of one, then the variants of one. Globs stay as typed.

    names: gives each "kernel@variant" of a file.
    """
    file, slash, rest = incomplete.partition("/")
    if not slash:
        offers = _offers(file, stems)
        only = offers[0] if offers and offers[1:] == [] and offers[0] != file else None
        return offers if only is None else offers + [f"{only}/{kernel}" for kernel in _offers("", _whole(names(only)))]
    return _inside(file, rest, [name for stem in stems if fnmatchcase(stem, file) for name in names(stem)])


def _inside(file: str, rest: str, inside: list[str]) -> list[str]:
    """The kernels of one file, then the variants of one. rest: what is typed after `file`."""
    kernel, at, variant = rest.partition("@")
    if at:
        variants = [name.partition("@")[2] for name in inside if fnmatchcase(name.partition("@")[0], kernel)]
        return [f"{file}/{kernel}@{offer}" for offer in _offers(variant, variants)]
    # First only the name of a layer is offered, then its kernels, which are called layer.part.
    offers = _offers(kernel, _whole(inside)) or _offers(kernel, _kernels(inside))
    if len(offers) == 1 and not is_glob(kernel):
        offers += _offers(f"{offers[0]}@", inside) + _offers(f"{offers[0]}.", _kernels(inside))
    return [f"{file}/{offer}" for offer in offers]


def _kernels(names: Iterable[str]) -> list[str]:
    return [name.partition("@")[0] for name in names]


def _whole(names: Iterable[str]) -> list[str]:
    """Kernels, with those of a layer replaced by the layer."""
    return [kernel.rpartition(".")[0] or kernel for kernel in _kernels(names)]


def _offers(typed: str, values: Iterable[str]) -> list[str]:
    """The values that begin with `typed`; or `typed` itself, if it is a glob that matches one."""
    if is_glob(typed):
        return [typed] if any(fnmatchcase(value, f"{typed}*") for value in values) else []
    return sorted({value for value in values if value.startswith(typed)})


def _spec_files(incomplete: str) -> list[str]:
    typed, start = incomplete.rpartition("/")[::2]
    lead = incomplete.removesuffix(start)
    offers = []
    with contextlib.suppress(OSError, RuntimeError):
        folder = Path(f"{typed}/" if typed or incomplete.startswith("/") else ".").expanduser()
        for path in sorted(folder.iterdir()):
            hidden = path.name.startswith(".") and not start
            if path.name.startswith(start) and not hidden:
                if path.suffix == ".toml":
                    offers.append(f"{lead}{path.name}")
                elif incomplete and path.is_dir():
                    offers.append(f"{lead}{path.name}/")
    return offers
