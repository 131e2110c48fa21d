"""`fusekit new`: a commented spec file for a model."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import FusekitError, UsageError
from fusekit_cli import complete, output
from fusekit_cli.options import Session, common, given

if TYPE_CHECKING:
    from fusekit.spec.new_spec import NewSpec


_HUB = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.json)(?<!\.toml)"  # organisation and model, and no file


@click.command("new")
@click.argument("model", metavar="[MODEL]", required=False, shell_complete=complete.files)
@click.option(
    "--from", "source", metavar="MODULE:FUNCTION",
    help="Instead of MODEL: a spec for the foreign kernel of this function, which is run.",
)  # fmt: skip
@click.option("--params", metavar="JSON", help="With --from: the function's keyword arguments, a JSON object.")
@click.option(
    "-o",
    "--output",
    "out",
    metavar="FILE",
    shell_complete=complete.files,
    help="Where to write it: a file or a folder (default: stdout).",
)
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option("--name", metavar="NAME", help="The file's stem, the first part of every kernel's name.")
@click.option(
    "--tokens", metavar="T", type=click.IntRange(min=1), default=8192, show_default=True, help="Tokens a launch."
)
@click.option(
    "--expert-parallel", "ranks", metavar="R", type=click.IntRange(min=1), default=1, show_default=True,
    help="Ranks that share the experts of a layer.",
)  # fmt: skip
@click.option("--inference", is_flag=True, help="Layers without a backward pass and a load-balancing loss.")
@click.option(
    "--for", "door", metavar="DOOR", shell_complete=complete.doors,
    help="Only the experts, with the options that a trainer or server needs: megatron, torchtitan, vllm, ...",
)  # fmt: skip
@click.option("--arch", metavar="ARCH", default="sm_90a", show_default=True, help="Target architecture.")
@click.option(
    "--family",
    metavar="TYPE",
    shell_complete=complete.families,
    help="Read the config as this model type, instead of its own.",
)
@common
def command(
    session: Session, model: str | None, source: str | None, params: str | None, out: str | None, force: bool,
    name: str | None, tokens: int, ranks: int, inference: bool, door: str | None, arch: str,
    family: str | None,
) -> None:  # fmt: skip
    """Write a commented spec file for MODEL: a Hugging Face config.json, a folder that holds one, - for stdin, or
    ORG/NAME of the Hub, which needs huggingface_hub.

    The file has one layer: the MLP of a dense model; router, experts and shared experts of a mixture-of-experts model.
    Parts of the model that are not supported become a comment with the reason; if the layer is not, those of its
    kernels that are supported are listed one by one.

    --from runs a function that returns the arguments of cute.compile, and compiles the kernel: what that reads and
    writes gives the roles of its arguments.
    """
    if (model is None) == (source is None):
        raise UsageError("give a MODEL, or --from MODULE:FUNCTION; one of the two")
    if source is not None:
        if of_models := given("tokens", "ranks", "inference", "door", "family"):
            raise UsageError(f"{', '.join(of_models)}: for a MODEL, not a function; leave out with --from")
        _foreign(session, source, params, arch, name, out, force)
        return
    assert model is not None
    if params is not None:
        raise UsageError("--params are those of a function; give --from MODULE:FUNCTION with it, not a MODEL")
    from fusekit.spec.doors import DOORS
    from fusekit.spec.hf_config import read_model
    from fusekit.spec.model import ARCHES
    from fusekit.spec.model_kernels import Request
    from fusekit.spec.new_spec import new_spec

    if arch not in ARCHES:
        raise UsageError(f"--arch {arch}: there are no kernels for it; it is one of {', '.join(ARCHES)}")
    if door is not None and door not in DOORS:
        raise UsageError(f"--for {door}: there is no such door; it is one of {', '.join(DOORS)}")
    text, source = _read(model)
    read = read_model(text, source, family)
    stem = name if name is not None else _stem(model, out, read.model_type)
    _check(stem, name)
    wanted = Request(stem, arch, tokens, ranks, not inference, Path(source).name, door or "")
    if wanted.outside is not None and (wanted.outside.keys or {}).get("keep") == "none":
        wanted = replace(wanted, training=False)
    spec = new_spec(read, wanted)
    contents = {
        name: getattr(spec, name) for name in ("layers", "missing_layers", "kernels", "missing_kernels", "notes")
    }
    written = _answer(session, spec.text, stem, out, force, model_type=read.model_type, **contents)
    _explain(session, spec, written or f"{stem}.toml")


def _explain(session: Session, spec: NewSpec, file: str) -> None:
    """What is in the file, what is not and why, and the next command, on stderr."""
    for name, summary in spec.layers.items():
        session.note(f"layer {name}: {summary}")
    for name, why in spec.missing_layers.items():
        session.note(f"warning: no layer {name}: {why}; those of its kernels that fit are listed one by one")
    if spec.kernels:
        session.note(f"single kernels: {', '.join(spec.kernels)}")
    if spec.missing_kernels:
        session.note(f"warning: left out, the file says why: {', '.join(spec.missing_kernels)}")
    for note in spec.notes:
        session.note(f"note: {note}")
    session.note(f"next: fusekit build {shlex.quote(file)}")


def _check(stem: str, name: str | None) -> None:
    """Raises UsageError for a stem that no spec file can have. name: the value of --name."""
    from fusekit.spec.fields import NAME_PATTERN, NAME_RULE

    if not re.fullmatch(NAME_PATTERN, stem):
        option = "-o: the stem" if name is None else "--name"
        remedy = f"give {_lower(stem)}.toml" if name is None else f"give --name {_lower(stem)}"
        raise UsageError(f"{option} {stem!r} begins every kernel's name; {NAME_RULE}; {remedy}")


def _lower(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:64] or "model"


def _foreign(
    session: Session, source: str, params: str | None, arch: str, name: str | None, out: str | None, force: bool
) -> None:
    import json

    from fusekit.compiler.new_extern import new_extern, role_of, trace_source
    from fusekit.plan.arch import FOREIGN

    if not re.fullmatch(r"[\w.]+:\w+", source):
        raise UsageError(f"--from {source}: it names a function as package.module:function")
    if arch not in FOREIGN:
        raise UsageError(f"--arch {arch}: it is one of {', '.join(FOREIGN)}")
    try:
        given = json.loads(params or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--params is not valid JSON: {error}; give an object such as '{{\"n\": 4096}}'") from None
    if not isinstance(given, dict):
        raise UsageError(f"--params {params}: it is a JSON object, such as '{{\"n\": 4096}}'")
    if out is not None or name is not None:  # before anything is run
        _check(name if name is not None else _stem(source, out, "kernel"), name)
    traced = trace_source(source, arch, given)
    kernel = _lower(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", "-", traced["function"]))
    stem = name if name is not None else (_stem(kernel, out, kernel) if out is not None else kernel)
    spec = new_extern(kernel, source, arch, given, traced, stem)
    roles = {leaf["name"]: role_of(leaf) for leaf in traced["leaves"] if leaf["kind"] in ("tensor", "pointer")}
    written = _answer(
        session, spec, stem, out, force, source=source, roles={name: role for name, (role, _) in roles.items()}
    )
    if traced["why"]:
        session.note(f"note: the kernel could not be compiled to see the roles: {traced['why']}")
    for name, (role, origin) in roles.items():
        session.note(f"{name}: {role}, {origin}")
    file = shlex.quote(written or f"{stem}.toml")
    session.note(f"next: check the roles in {file}, then fusekit build {file} --allow-extern")


def _answer(session: Session, spec: str, stem: str, out: str | None, force: bool, **members: Any) -> str | None:
    """Write the spec to `out`, or print it if `out` is None; returns the path. members: of the JSON document."""
    written = _write(out, spec, stem, force) if out is not None else None
    document = {"name": stem, **members, "file": written, "spec": spec}
    output.answer(session, document, lambda: click.echo(spec if written is None else written, nl=written is not None))
    return written


def _read(model: str) -> tuple[str, str]:
    """The text of the config, and its name in errors."""
    from fusekit.spec.hf_config import MAX_BYTES
    from fusekit.store.given import given_file

    path = Path(model)
    remedy = "give a config.json, a folder that holds one, or - for stdin"
    try:
        if model == "-":
            source, data = "stdin", sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            if not os.path.lexists(path) and re.fullmatch(_HUB, model):
                path = _download(model)
            path = path / "config.json" if path.is_dir() else path
            source = str(path)
            with given_file(path, "config.json", remedy) as (file, _):
                data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; {remedy}") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{source}: longer than {MAX_BYTES} bytes; give the config.json of a Hugging Face model")
    try:
        return data.decode("utf-8"), source
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: byte {error.start} is not UTF-8; give the config.json of a model") from None


def _download(model: str) -> Path:
    """The config.json of a model of the Hugging Face Hub, in its cache. Raises UsageError."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        folder = model.rpartition("/")[2]
        raise UsageError(
            f"{model}: there is no such folder here, and huggingface_hub, which could fetch it from the Hub, is not "
            f"installed; `pip install huggingface_hub && hf download {model} config.json --local-dir {folder}`, then "
            f"`fusekit new {folder}`"
        ) from None
    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # of its many kinds
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(
            f"{model}: there is no such folder here, and the Hub does not give its config.json: {reason}; check the "
            "name, or give a path"
        ) from error


def _stem(model: str, out: str | None, model_type: str) -> str:
    """The stem of the spec file: from `out`, the model's folder or the model's type."""
    if out is not None and not Path(out).is_dir():
        return Path(out).stem
    path = Path(model).absolute()
    if not os.path.lexists(path) and re.fullmatch(_HUB, model):
        return _lower(path.name)
    folder = path if path.is_dir() else path.parent
    if folder.parent.name == "snapshots":  # Hugging Face cache: models--ORGANISATION--NAME/snapshots/REVISION
        folder = Path(folder.parent.parent.name.rpartition("--")[2])
    if model == "-":
        return _lower(model_type)
    return _lower(folder.name if path.is_dir() or path.stem == "config" else path.stem)


def _write(out: str, text: str, stem: str, force: bool) -> str:
    """Write the file, whole or not at all; returns its path."""
    from fusekit.store.publishing import replace_file

    path = Path(out) / f"{stem}.toml" if Path(out).is_dir() else Path(out)
    if path.suffix != ".toml" or path.stem != stem:
        raise UsageError(f"-o {out}: a file's stem begins the names of its kernels; give {stem}.toml, or a folder")
    try:
        replace_file(path, methodcaller("write", text.encode()), new=not force)
        return str(path)
    except FileExistsError:
        raise UsageError(f"{path} exists; give --force to overwrite it, or another -o") from None
    except OSError as error:
        raise FusekitError(f"{path}: cannot be written: {error.strerror}; choose another -o") from error
