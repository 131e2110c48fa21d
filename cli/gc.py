"""`fusekit gc`: shrink the writable store."""

from __future__ import annotations

import re
from decimal import Decimal

import click

from fusekit_cli import output
from fusekit_cli.options import Session, common

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)((?:i?b)?)", re.IGNORECASE)
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])", re.IGNORECASE)


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Bytes; K, M, G and T are powers of 1024, as KiB and so on; KB and so on are powers of 1000."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is not a size; write a number of bytes, or one with K, M, G or T: 10G")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    return int(Decimal(match[1]) * (1000 if match[3].lower() == "b" else 1024) ** power)


def _age(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    match = _AGE.fullmatch(value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is not an age; write a number with s, m, h, d or w: 30d")
    return float(match[1]) * _SECONDS[match[2].lower()]


@click.command("gc")
@click.option("--max-size", callback=_size, metavar="S", help="Evict the least recently used down to S: 10G.")
@click.option(
    "--max-age", callback=_age, metavar="D", help="Evict kernels not used for that long: 30d, 12h; the unit is needed."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@common
def command(session: Session, max_size: int | None, max_age: float | None, dry_run: bool) -> int:
    """Evict the least recently used kernels from the writable store, and remove files that are not needed: unused
    cubins, files of killed builders, locks.

    Builds and launches may run meanwhile; what a running build needs stays. Without --max-size and --max-age no kernel
    is evicted. Read-only roots, and files that are not fusekit's, are not touched. --json lists every file. Exit code 1
    if a name or an entry cannot be read: what it may need stays.
    """
    from fusekit.store.files import exists

    store = session.open_store()
    report = store.collect(max_bytes=max_size, max_age=max_age, dry_run=dry_run)

    def text() -> None:
        would = "would be " if dry_run else ""
        if report.evicted:
            rows = [
                (
                    (kernel.names[0].removesuffix(".json") if kernel.names else "(no name)"),
                    kernel.key[:12],
                    output.size(kernel.bytes),
                    _idle(kernel.idle),
                    kernel.reason,
                )
                for kernel in report.evicted
            ]
            output.table(
                session,
                ("NAME", "KEY", "FREED", "IDLE", "REASON"),
                rows,
                right=("FREED", "IDLE"),
                spare=("KEY",),
                prose=("REASON",),
            )
        cleared = ", ".join(
            output.plural(count, noun)
            for count, noun in (
                (report.orphans, "unused cubin"),
                (report.temporaries, "temporary"),
                (report.locks, "lock"),
                (report.signatures, "signature"),
                (report.marks, "mark"),
                (report.leases, "lease"),
            )
            if count
        )
        click.echo(
            f"{output.plural(report.removed, 'kernel')}{' and ' + cleared if cleared else ''} {would}removed, "
            f"{output.size(report.freed_bytes)} {would}freed; {output.plural(report.kept, 'kernel')}, "
            f"{output.size(report.kept_bytes)} kept"
        )

    output.answer(session, report, text)
    if report.in_use:
        session.note(
            f"{output.plural(report.in_use, 'kernel')} would be evicted, too, but are in use by a build or launch"
        )
    for note in report.notes:
        session.note(note)
    if not exists(store.root):
        session.note(f"there is no store at {store.root}")
    return 1 if report.unread else 0


def _idle(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= unit:
            return f"{seconds / unit:.1f}{name}"
    return f"{max(seconds, 0):.0f}s"
