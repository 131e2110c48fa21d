"""`fusekit run` of a layer: forward and backward on random inputs."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from fusekit.errors import DriverError, UsageError, install
from fusekit_cli import output
from fusekit_cli.lookup import note_runs
from fusekit_cli.options import Session
from fusekit_cli.run import rates

if TYPE_CHECKING:
    from fusekit.layers import Layer
    from fusekit.library import Library


def run(
    session: Session, library: Library, name: str, tokens: int | None, seed: int, *, check: bool, timed: bool,
    device: int | None, arch: str | None,
) -> int:  # fmt: skip
    """Check and time the layer `name`; prints one document."""
    layer = library.layer(name, arch, device)
    try:
        from fusekit.bench.layer_trial import checked_tokens, options_of
    except ImportError as error:
        raise UsageError(f"random inputs need NumPy: {error}; {install('check')}") from error
    document: dict[str, Any] = {
        "name": name, "arch": layer.record.arch, "device": None, "ok": True,
        "tokens": tokens, "checked_tokens": None, "error": None, "errors": {}, "problems": [], "ms": None,
        "tflops": None, "gbs": None, "peak_share": None, "host_us": None, "passes": {}, "memory": {},
    }  # fmt: skip
    wanted = layer.options.tokens if tokens is None else tokens
    try:
        if check or not timed:
            few = wanted if tokens is not None or not check else checked_tokens(options_of(layer))
            _launch(library, layer, few, seed, device, document, check=check)
        if timed:
            _time(library, layer, wanted, seed, device, document)
    except DriverError as error:
        if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        raise UsageError(f"{error}; a layer's tensors must fit together; take fewer --rows") from error
    if document["ok"]:
        note_runs(library)
    output.answer(session, document, lambda: _print(document))
    return 0 if document["ok"] else 1


def _launch(
    library: Library, layer: Layer, tokens: int, seed: int, device: int | None, document: dict[str, Any], *,
    check: bool,
) -> None:  # fmt: skip
    from fusekit.bench.layer_trial import LayerTrial

    with closing(LayerTrial(library, layer, tokens, seed, device)) as trial:
        document.update(device=trial.device.name, tokens=tokens, memory=_memory(trial))
        trial.launch()
        if check:
            verdict, errors = trial.check()
            document.update(
                ok=verdict.ok, error=verdict.error, errors=errors, problems=verdict.problems, checked_tokens=tokens
            )


def _time(library: Library, layer: Layer, tokens: int, seed: int, device: int | None, document: dict[str, Any]) -> None:
    from fusekit.bench.layer_trial import BOTH, LayerTrial, flops
    from fusekit.bench.roofline import Work
    from fusekit.choice.gpus import gpu_of

    with closing(LayerTrial(library, layer, tokens, seed, device)) as trial:
        document.update(device=trial.device.name, tokens=tokens, memory=_memory(trial))
        peak = gpu_of(trial.device.name)
        for which, timing in trial.time().items():
            work = Work(flops(layer, which, tokens), 0)
            tflops = work.rates(timing.ms)[0] if work.flops else None
            share = None if peak is None or not work.flops else work.share(timing.ms, peak)
            document["passes"][which] = {
                "ms": timing.ms, "tflops": tflops, "peak_share": share, "host_us": timing.host_us,
            }  # fmt: skip
        document.update(document["passes"][BOTH])


def _memory(trial: Any) -> dict[str, int]:
    sizes = ("kept", "scratch", "forward", "inference", "backward", "fp8_weights")
    return {name: getattr(trial.sizes, name) for name in sizes}


def _print(document: dict[str, Any]) -> None:
    click.echo(f"{document['name']} ({document['arch']}) on {document['device']}, {document['tokens']} tokens: "
               f"{'ok' if document['ok'] else 'WRONG'}")  # fmt: skip
    if document["errors"]:
        errors = ", ".join(f"{name} {error:.2g}" for name, error in document["errors"].items())
        click.echo(f"  relative errors, {document['checked_tokens']} tokens: {errors}")
    for line in document["problems"]:
        click.echo(f"  {line}")
    for which, timing in document["passes"].items():
        what = "both, one graph" if which == "both" else which
        click.echo(f"  {what}: {rates(timing)}, host {timing['host_us']:.2f} us")
    memory = document["memory"]
    weights = f", FP8 weights {output.size(memory['fp8_weights'])}" if memory["fp8_weights"] else ""
    click.echo(f"  kept {output.size(memory['kept'])}, scratch {output.size(memory['scratch'])}{weights}")
