"""The option of commands that read a bundle, a wheel or a remote: --from."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from fusekit.errors import NotBuiltError
from fusekit_cli import complete
from fusekit_cli.options import Session

if TYPE_CHECKING:
    from fusekit.share.push_pull import Survey
    from fusekit.store import Store


sourced = click.option(
    "--from", "source", metavar="WHERE", shell_complete=complete.files,
    help="Read a bundle (a file, a URL, or - for standard input), a wheel (a file) or a remote (a folder or a URL), "
    "not the store.",
)  # fmt: skip


def look(
    session: Session, source: str, patterns: Sequence[str] = (), arch: str | None = None, *, entries: bool = False,
    cubins: bool | None = None,
) -> Survey:  # fmt: skip
    """The kernels of `source` that match `patterns`, checked, with signatures if keys are trusted. A bundle is checked
    in full.
    """
    from fusekit.runtime.wellformed import WELLFORMED
    from fusekit.share.bundle_import import read_bundle
    from fusekit.share.push_pull import Survey, survey
    from fusekit.share.remote import Remote
    from fusekit.share.source import bundle_source, is_bundle
    from fusekit.store import names

    trust = session.open_store().trust
    if _is_wheel(source):
        from fusekit.share.wheel import unpacked

        with unpacked(Path(source)) as folder:
            return survey(
                Remote(str(folder)), trust, patterns, arch, entries=entries, cubins=cubins, inspect=WELLFORMED
            )
    if not is_bundle(source):
        return survey(Remote(source), trust, patterns, arch, entries=entries, cubins=cubins, inspect=WELLFORMED)
    records, by_key = read_bundle(bundle_source(source, sys.stdin.buffer), trust, WELLFORMED)
    known = dict.fromkeys(record.name for record in records)
    wanted = {name for pattern in patterns or ("*",) for name in names.matching(pattern, known)}
    chosen = tuple(record for record in records if arch in (None, record.arch) and record.name in wanted)
    keys = {record.key for record in chosen} if patterns or arch else by_key.keys()
    return Survey(chosen, {key: by_key[key] for key in keys}, len({by_key[key].cubin_sha256 for key in keys}))


@contextlib.contextmanager
def opened(
    session: Session, source: str | None, patterns: Sequence[str] = (), arch: str | None = None
) -> Iterator[tuple[Store, list[str]]]:
    """A store with the kernels of `source` that match `patterns`, or more, and what is wrong with others; without a
    `source`, the store of the command line.
    """
    from fusekit.runtime.wellformed import WELLFORMED
    from fusekit.share.bundle_import import import_bundle
    from fusekit.share.push_pull import pull
    from fusekit.share.remote import Remote
    from fusekit.share.source import bundle_source, is_bundle
    from fusekit.share.wheel import unpacked
    from fusekit.store import Store

    store = session.open_store()
    if source is None:
        yield store, []
        return
    with contextlib.ExitStack() as stack:
        if _is_wheel(source):
            yield Store(stack.enter_context(unpacked(Path(source))), trust=store.trust), []
            return
        scratch = Store(
            Path(stack.enter_context(TemporaryDirectory(prefix="fusekit-from-")), "store"), trust=store.trust
        )
        problems = []
        if is_bundle(source):
            import_bundle(scratch, bundle_source(source, sys.stdin.buffer), inspect=WELLFORMED)
        else:
            problems = [why for _, why in pull(scratch, Remote(source), patterns, arch, inspect=WELLFORMED).failed]
        yield scratch, problems


def _is_wheel(source: str) -> bool:
    return source.endswith(".whl") and "://" not in source


def shown(source: str) -> str:
    """`source` without credentials."""
    from fusekit.share.remote import hidden_url

    return hidden_url(source)


def absent(source: str, patterns: Sequence[str], arch: str | None) -> NotBuiltError:
    """The error for names that `source` lacks."""
    what = " ".join(patterns) or "any kernel"
    return NotBuiltError(
        f"{shown(source)} does not hold {what}{f' for {arch}' if arch else ''}; `fusekit ls --from` lists what "
        "it holds",
        name=what,
    )
