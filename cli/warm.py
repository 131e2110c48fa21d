"""`fusekit warm`: fill the store with what programs, or models, compile; needs no GPU."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import click

from fusekit.errors import UsageError
from fusekit_cli.exec import execute
from fusekit_cli.options import Session, common

_PLANS = ("quack", "flash_attn", "flashinfer")


@click.command("warm", context_settings={"allow_interspersed_args": False})
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
@click.option("--model", "models", multiple=True, metavar="CONFIG", help="A Hugging Face config.json; may be repeated.")
@click.option("--plan", "plans", multiple=True, type=click.Choice(_PLANS), help="Packages. Default: all installed.")
@click.option("--tokens", default="1,16,128,1024,8192", show_default=True, help="Numbers of tokens of a step.")
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(1), help="Of expert parallelism.")
@click.option("--tactics", default="all", show_default=True, type=click.Choice(["all", "default"]), help="Of tuners.")
@click.option("--arch", default="sm_90a", show_default=True, help="The architecture to compile for.")
@click.option("--sms", default=132, show_default=True, type=click.IntRange(1), help="Multiprocessors of the device.")
@click.option("--records", is_flag=True, help="Afterwards adopt what was compiled: see `fusekit adopt`.")
@click.option("--with", "packages", default="", hidden=True)  # of `exec`: refused with the reason
@click.option("--jobs", default=0, type=click.IntRange(0), help="Processes. Default: one for each processor.")
@common
def command(
    session: Session, program: tuple[str, ...], models: tuple[str, ...], plans: tuple[str, ...], tokens: str,
    ranks: int, tactics: str, arch: str, sms: int, records: bool, packages: str, jobs: int,
) -> int:  # fmt: skip
    """Run CMD under `fusekit exec`, or compile what packages need for each CONFIG, for a device that is not there.

    The packages' own code makes the compile calls, on stand-ins for tensors: QuACK's norms, FlashAttention's forward
    pass, both GEMMs of FlashInfer's SM90 mixture of experts with every tactic that its tuner tries. Their calls on a
    GPU then find the kernels in the store. CMD sees the architecture in CUTE_DSL_ARCH, and no GPU.
    """
    from importlib.util import find_spec

    from fusekit.cute.plans import Model, Work, environment

    if packages:
        raise UsageError(
            f"--with {packages}: warm runs CMD without a GPU, and caches of other packages are kept for the models of"
            " the GPUs that a program has; run it once on such a machine: "
            f"{shlex.join(('fusekit', 'exec', '--with', packages, '--', *(program or ('CMD',))))}"
        )
    if bool(program) == bool(models):
        raise UsageError("warm takes a program or models; give one: fusekit warm --model config.json, or -- CMD")
    if models:
        described, ladder = tuple(Model.of(_config(path), path) for path in models), _ladder(tokens)
        chosen = plans or tuple(plan for plan in _PLANS if find_spec(plan) is not None)
        if missing := [plan for plan in chosen if find_spec(plan) is None]:
            raise UsageError(f"--plan {missing[0]}: that package is not installed here; install it, or leave it out")
        if not chosen:
            raise UsageError(f"none of the packages {', '.join(_PLANS)} is installed here; install one of them")
        jobs = jobs or len(os.sched_getaffinity(0))
        work = Work(described, chosen, ladder, ranks, sms, tactics, jobs)
        program = (sys.executable, "-m", "fusekit.cute.plans", work.to_text())
    variables = {**environment(arch, sms), "CUDA_VISIBLE_DEVICES": ""}
    return execute(session, program, variables, records=records)


def _config(path: str) -> dict[str, object]:
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}; give the config.json of a Hugging Face model") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file}: it is not a JSON object; give the config.json of a Hugging Face model")
    return config


def _ladder(text: str) -> tuple[int, ...]:
    try:
        tokens = sorted({int(part) for part in text.split(",")})
    except ValueError:
        tokens = [0]
    if tokens[0] < 1:
        raise UsageError(f"--tokens {text}; it is a list of positive numbers: --tokens 1,16,1024")
    return tuple(tokens)
