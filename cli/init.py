"""`fusekit init`: a commented project file in the current folder."""

from __future__ import annotations

import json
from operator import methodcaller
from pathlib import Path

import click

from fusekit.errors import UsageError
from fusekit_cli import complete, output
from fusekit_cli.options import Session, common

_TEXT = """\
# What this project builds, where its kernels are, and whom it trusts. An option wins over its environment variable,
# that over this file, and this file over the default.

requires = ">={version}"            # versions of fusekit that may read it

[targets]                           # what `fusekit build` and `fusekit lock` mean when they are given no target
specs = {specs}
models = {models}
tokens = [8192]                     # tokens of a launch: variants of the models for each count
# arch = ["sm_90a"]                 # of specs that name none, of the models, and of packaged specs
# toolchains = ["cutlass-dsl-4.8.1-cu12"]   # others may not build; `fusekit doctor` names the one installed here

[stores]
# store = ".fusekit"                # the writable store (FUSEKIT_STORE)
# read_only = ["/nfs/kernels"]      # searched after it (FUSEKIT_STORES)

[remotes]                           # `fusekit push NAME`, `fusekit pull NAME`
# cluster = "s3://bucket/kernels"

# [trust]                           # of the keys that the environment trusts, only these; nothing else is loaded
# keys = ["keys/team.pub"]

# [defaults]                        # of kernels in spec files, for what neither they nor their [defaults] say
# dtype = "bf16"
"""
_SPECS = """\
[{listed}]   # spec files, folders, globs, packaged names"""
_MODELS = """\
[{listed}]   # config.json of Hugging Face models, each a layer"""


@click.command("init")
@click.argument("model", metavar="[MODEL]", required=False, shell_complete=complete.files)
@click.option("--force", is_flag=True, help="Overwrite a fusekit.toml that exists.")
@common
def command(session: Session, model: str | None, force: bool) -> None:
    """Write fusekit.toml, commented, into the current folder.

    With MODEL, a Hugging Face config.json or a folder that holds one, the project builds the layers of that model; else
    the spec files that lie in this folder.
    """
    import fusekit
    from fusekit.project import FILE, read_project
    from fusekit.spec.catalog import of_model
    from fusekit.store.publishing import replace_file

    path = Path(FILE).absolute()
    models = [] if model is None else [model]
    for config in models:
        of_model(Path(config))  # an error is told before anything is written
    specs = [] if models else _spec_files()
    text = _TEXT.format(
        version=".".join(fusekit.__version__.split(".")[:2]),
        specs=_SPECS.format(listed=", ".join(map(json.dumps, specs))),
        models=_MODELS.format(listed=", ".join(map(json.dumps, models))),
    )
    try:
        replace_file(path, methodcaller("write", text.encode()), new=not force)
    except FileExistsError:
        raise UsageError(f"{path} exists; give --force to overwrite it") from None
    read_project(path)
    output.answer(session, {"file": str(path), "specs": specs, "models": models}, lambda: click.echo(str(path)))
    if not specs and not models:
        session.note("no spec file is here; name some under [targets], or give a MODEL: fusekit init MODEL --force")
    else:
        session.note("next: fusekit build --dry-run")


def _spec_files() -> list[str]:
    """The spec files in the current folder."""
    import tomllib

    from fusekit.errors import SpecError
    from fusekit.spec import document

    files = []
    for path in sorted(Path().glob("*.toml")):
        try:
            parsed = document.parse(document.read(path), str(path))
        except (SpecError, tomllib.TOMLDecodeError):
            continue
        if "kernel" in parsed and "schema" in parsed:
            files.append(str(path))
    return files
