"""`fusekit help`: the help of a command."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from fusekit.errors import UsageError
from fusekit_cli.options import Session, common


def _commands(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from fusekit_cli.main import COMMANDS

    return [CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)]


@click.command("help")
@click.argument("name", metavar="[COMMAND]", required=False, shell_complete=_commands)
@common
def command(session: Session, name: str | None) -> None:
    """Show the help of COMMAND, or without one the list of commands."""
    context = click.get_current_context().parent
    assert context is not None
    group = context.command
    assert isinstance(group, click.Group)
    if name is None:
        click.echo(group.get_help(context))
        return
    found = group.get_command(context, name)
    if found is None:
        raise UsageError(f"there is no command {name}; there are {', '.join(group.list_commands(context))}")
    with click.Context(found, info_name=name, parent=context) as inner:
        click.echo(found.get_help(inner))
