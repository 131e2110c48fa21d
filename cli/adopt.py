"""`fusekit adopt`: what `fusekit exec` compiled, as kernels with names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import NotBuiltError, UsageError
from fusekit_cli import complete, output
from fusekit_cli.options import Session, common, one_arch, stored_names

if TYPE_CHECKING:
    from fusekit.store import NameRecord, Store


@click.command("adopt")
@click.argument(
    "patterns", metavar="NAME...", nargs=-1, required=True, shell_complete=complete.stored, callback=stored_names
)
@one_arch
@click.option("--as", "given", metavar="FILE/KERNEL", default="", help="Name of the kernel. Default: adopted/...")
@click.option(
    "--role", "roles", multiple=True, metavar="ARGUMENT=ROLE", help="input, output or inout; may be repeated."
)
@common
def command(
    session: Session, patterns: tuple[str, ...], arch: str | None, given: str, roles: tuple[str, ...]
) -> int:  # fmt: skip
    """Make a kernel of each entry that `fusekit exec` stored and NAME matches: read its launch record out of the host
    code, prove it, and publish it with the cubin.

    Such a kernel is loaded by its name and launched without the DSL, from Python, C and TVM-FFI. Neither the program
    nor its packages are needed. Arguments are named as those of the host function. What was compiled does not tell what
    a kernel writes: every tensor is inout, unless --role says input or output. Exit code 1 if an entry cannot be
    adopted; the others are.
    """
    from fusekit.config import CuteConfig
    from fusekit.cute.blobs import open_store

    store = open_store(CuteConfig.from_environment(session.config))
    found = entries(store, patterns, arch)
    if not found:
        raise UsageError(
            f"{', '.join(patterns)}: none is of `fusekit exec`, whose entries are adopted; `fusekit ls` shows all names"
        )
    return adopt(session, store, found, given, _roles(roles))


def entries(store: Store, patterns: Collection[str], arch: str | None) -> list[NameRecord]:
    """The names of compile entries that `patterns` match."""
    from fusekit.store.entries import HOST_OBJECT

    found: dict[tuple[str, str], NameRecord] = {}
    for pattern in patterns:
        listing = store.listing(pattern, arch)
        if not listing.names:
            raise NotBuiltError(
                f"{pattern!r} is not in the store: run the program first, as fusekit exec -- python program.py, or"
                " without a GPU as fusekit warm -- python program.py; fusekit ls shows what is there",
                name=pattern,
            )
        found |= {(each.record.name, each.record.arch): each.record for each in listing.names}
    return [record for _, record in sorted(found.items()) if HOST_OBJECT in record.spec]


def adopt(
    session: Session, store: Store, found: list[NameRecord], given: str = "", roles: Mapping[str, str] | None = None
) -> int:
    """Adopt the entries that `found` names. Returns the exit code."""
    from fusekit.cute.adopt import adopt_all

    done, failed = adopt_all(store, found, given, roles)
    document: dict[str, Any] = {
        "adopted": [
            {"name": each.name, "arch": each.arch, "key": each.key, "of": each.of, "proved": each.is_new}
            for each in done
        ],
        "failed": {name: str(error) for name, error in failed.items()},
    }

    def text() -> None:
        for each in done:
            click.echo(f"{each.name}  {each.arch}  {each.entry.proof['launches']} launches proved")
        if done:
            more = "" if roles else ", and adopt it again with --role ARGUMENT=ROLE where a tensor is no inout"
            session.note(f"next: fusekit show {done[0].name}{more}")

    output.answer(session, document, text)
    for name, error in failed.items():
        session.error(f"{name} is not adopted: {error}")
    return 1 if failed else 0


def _roles(given: tuple[str, ...]) -> dict[str, str]:
    roles = {}
    for each in given:
        name, equals, role = each.partition("=")
        if not equals:
            raise UsageError(f"--role {each}: it is ARGUMENT=ROLE, such as --role x=input")
        roles[name] = role
    return roles
