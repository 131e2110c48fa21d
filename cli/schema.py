"""`fusekit schema`: the JSON Schema of spec files, for editors."""

from __future__ import annotations

import click

from fusekit_cli import output
from fusekit_cli.options import Session, common


@click.command("schema")
@common
def command(session: Session) -> None:
    """Print the JSON Schema of spec files, for an editor to check and complete them.

    Write it to a file, and name that in the first line of a spec: "#:schema ./fusekit.schema.json".
    """
    from fusekit.spec import schema

    output.print_json(schema())
