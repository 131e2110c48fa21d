"""`fusekit rm`: remove names from the writable store, with kernels that have no other name."""

from __future__ import annotations

from typing import Any

import click

from fusekit.errors import NotBuiltError, some
from fusekit.store import DiscardReport, Store
from fusekit_cli import complete, output
from fusekit_cli.options import Session, common, one_arch, stored_names


@click.command("rm")
@click.argument(
    "patterns", metavar="NAME...", nargs=-1, required=True, shell_complete=complete.stored, callback=stored_names
)
@one_arch
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@common
def command(session: Session, patterns: tuple[str, ...], arch: str | None, dry_run: bool) -> int:
    """Remove NAME (a FILE, FILE/KERNEL, a full name or a glob) from the writable store, with the kernels that no other
    name points to.

    A kernel that has another name stays. Read-only roots are not changed: a NAME that they have is used afterwards, and
    reported. Exit code 1 if a name or an entry cannot be read: what it may need stays.
    """
    store = session.open_store()
    unwanted = {where for pattern in patterns for where in _matching(store, pattern, arch)}
    report = store.discard(unwanted, dry_run=dry_run)
    document = removal(store, report)

    def text() -> None:
        would = "would be " if dry_run else ""
        for name, its_arch in report.names:
            click.echo(f"{name}  {its_arch}")
        click.echo(
            f"{output.plural(len(report.names), 'name')} and {output.plural(report.entries, 'kernel')} {would}removed, "
            f"{output.size(report.freed_bytes)} {would}freed"
        )

    output.answer(session, document, text)
    notes(session, document)
    return unread(session, report)


def removal(store: Store, report: DiscardReport) -> dict[str, Any]:
    """The JSON document of a removal."""
    below = [root for root in store.roots[1:] if report.names and root.path != store.root]
    hidden = [
        {"name": name, "arch": arch, "root": str(root.path)}
        for name, arch in report.names
        for root in below
        if root.stamp_of_name(name, arch) is not None
    ]
    return {
        "dry_run": report.dry_run,
        "removed": [{"name": name, "arch": arch} for name, arch in report.names],
        "kernels": report.entries,
        "freed_bytes": report.freed_bytes,
        "kept": [
            {"key": key, "needed_by": [{"name": name, "arch": arch} for name, arch in names]}
            for key, names in report.shared.items()
        ],
        "in_use": report.in_use,
        "unread": report.unread,
        "may_be_needed": {"kernels": report.may_be_needed, "cubins": report.cubins},
        "without_kernel": [{"name": name, "arch": arch} for name, arch in report.without_entry],
        "not_removed": [{"name": name, "arch": arch} for name, arch in report.missing],
        "in_roots": hidden,
    }


def notes(session: Session, document: dict[str, Any]) -> None:
    """Print on stderr what stays, and why."""
    for kept in document["kept"]:
        first, *others = (name["name"] for name in kept["needed_by"])
        more = f" and {len(others)} more" if others else ""
        session.note(f"kernel {kept['key'][:12]} stays: {first}{more} need{'' if others else 's'} it")
    for key in document["in_use"]:
        session.note(
            f"kernel {key[:12]} stays: a build or a launch uses it now; `fusekit gc` removes it when it is old"
        )
    for name in document["without_kernel"]:
        session.note(f"{name['name']} ({name['arch']}) pointed to no kernel, or could not be read: the name alone went")
    for name in document["not_removed"]:
        session.note(f"{name['name']} ({name['arch']}) stays: it changed meanwhile, or is no plain file; try again")
    for name in document["in_roots"]:
        session.note(f"{name['name']} ({name['arch']}) is taken from the read-only root {name['root']} from now on")


def unread(session: Session, report: DiscardReport) -> int:
    """Print what stays because a document could not be read; returns the exit code."""
    if not report.unread:
        return 0
    stay = [f"kernel {key[:12]}" for key in report.may_be_needed]
    if report.cubins:
        stay.append(output.plural(report.cubins, "cubin"))
    session.note(
        f"{some(report.unread)} cannot be read, so what it needs is not known: "
        f"{some(stay) + ' may be needed, and stays' if stay else 'no kernel was removed with it'}; `fusekit verify` "
        "shows more, and `fusekit gc --max-age` removes what is left once it can be read"
    )
    return 1


def _matching(store: Store, pattern: str, arch: str | None) -> list[tuple[str, str]]:
    names = store.writable().recorded(pattern, arch)
    if names:
        return list(names)
    if lower := store.recorded(pattern, arch):
        root = next(iter(lower.values()))
        raise NotBuiltError(
            f"'{pattern}' is in the read-only root {root} only; fusekit rm changes the writable store {store.root}; "
            "remove it there, with --store",
            name=pattern,
        )
    wanted = f"'{pattern}' for {arch}" if arch else f"'{pattern}'"
    raise NotBuiltError(f"{wanted} is not in the store {store.root}; `fusekit ls` shows what is", name=pattern)
