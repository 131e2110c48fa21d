"""`fusekit run`: launch kernels from the store on random inputs; never compiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from fusekit.errors import UsageError, install, is_glob
from fusekit_cli import complete, output
from fusekit_cli.options import Session, common, stored_names

if TYPE_CHECKING:
    from fusekit.bench.trial import Trial
    from fusekit.library import Library
    from fusekit.runtime import Kernel

T = TypeVar("T")


@click.command("run")
@click.argument("name", shell_complete=complete.stored, callback=stored_names)
@click.option("--rows", type=click.IntRange(min=0), help="Rows of x, or tokens (default: the spec's).")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 9), default=0, show_default=True, help="Seed of the random inputs."
)
@click.option("--check", is_flag=True, help="Compare with the reference; look for writes out of bounds.")
@click.option(
    "--reference", metavar="MODULE:FUNCTION",
    help="With --check: the function that computes what a foreign kernel should.",
)  # fmt: skip
@click.option("--time", "timed", is_flag=True, help="Device and host time of a launch, share of the device's peak.")
@click.option("--cluster-margin", type=click.IntRange(min=0), help="Clusters that a launch leaves free (reserved SMs).")
@click.option("--device", type=click.IntRange(min=0), help="Ordinal of the GPU (default: the current one, else 0).")
@click.option("--set", "settings", metavar="NAME=VALUE", multiple=True, help="A dim or scalar of a foreign kernel.")
@click.option("--arch", help="The cubin's architecture, such as sm_90a (default: the device's).")
@common
def command(
    session: Session, name: str, rows: int | None, seed: int, check: bool, timed: bool, cluster_margin: int | None,
    device: int | None, settings: tuple[str, ...], arch: str | None, reference: str | None,
) -> int:  # fmt: skip
    """Launch NAME from the store on random inputs with uneven groups.

    FILE/KERNEL runs the variant that `load` takes; a FILE or a glob runs every kernel that it matches. FILE/LAYER runs
    a layer, forward and backward; --rows are its tokens, few by default for --check. Exit code 1 if --check finds a
    wrong result, 3 if NAME is not built, 4 without a usable GPU.

    A foreign kernel runs on random numbers, and zeros for integers, in the shapes of its launch record; --set gives
    their sizes. Without --reference, --check finds only writes out of bounds. The function gets the tensors that the
    kernel reads, as NumPy arrays, and its scalars, by name; it returns the output, or a mapping of several by name.
    """
    if reference is not None and not check:
        raise UsageError("--reference says what --check compares with; add --check")
    sizes = dict(map(_setting, settings))
    from fusekit.runtime.wake import Waking

    waking = Waking(device)  # starts the driver while Python imports modules
    try:
        from fusekit.library import open_library
        from fusekit_cli.lookup import note_runs

        library = open_library(session.config)
        if _is_layer(library, name, arch):
            from fusekit_cli.run_layer import run

            if reference is not None:
                raise UsageError(f"{name} is a layer, which has a reference; leave --reference out")
            if cluster_margin is not None or settings:
                raise UsageError(f"{name} is a layer, which takes no --cluster-margin and no --set; its kernels do")
            return run(session, library, name, rows, seed, check=check, timed=timed, device=device, arch=arch)
        documents = []
        for kernel in _names(library, name, arch):
            # Loading waits for the driver: NumPy is imported meanwhile.
            loading = _Background(partial(_load, library, kernel, arch, device, rows))
            try:
                from fusekit.bench.trials import open_trial
            except ImportError as error:
                loading.result()
                raise UsageError(f"random inputs need NumPy: {error}; {install('check')}") from error
            trial = open_trial(library, loading.result(), rows, seed, guarded=check, sizes=sizes, reference=reference)
            documents.append(_run(trial, check, timed, cluster_margin))
    finally:
        waking.wait()  # a process must not end while the driver starts
    ok = all(document["ok"] for document in documents)
    if ok:
        note_runs(library)
    output.answer(session, output.one_or_many(documents), lambda: _print(documents))
    return 0 if ok else 1


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise UsageError(f"--set {text}: it must be NAME=VALUE with a number, such as M=4096") from None


def _names(library: Library, name: str, arch: str | None) -> list[str]:
    if "/" in name and not is_glob(name):
        return [name]
    from fusekit_cli.lookup import kernels, stored

    return list(dict.fromkeys(listed.record.name for listed in kernels(stored(library.store, name, arch))))


def _is_layer(library: Library, name: str, arch: str | None) -> bool:
    from fusekit_cli.lookup import is_layer

    if "/" not in name or "@" in name:
        return False
    return is_layer(name, [listed.record for listed in library.store.names(name, arch)])


def _load(library: Library, name: str, arch: str | None, device: int | None, rows: int | None) -> Kernel:
    return library.load(name, arch, device, None if rows is None else {"M": rows})


def _run(trial: Trial, check: bool, timed: bool, margin: int | None) -> dict[str, Any]:
    from fusekit.choice.gpus import gpu_of

    kernel = trial.kernel
    document: dict[str, Any] = {
        "name": kernel.name, "arch": kernel.arch, "device": trial.device.name, "ok": True, "problem": trial.problem,
        "error": None, "problems": [], "ms": None, "tflops": None, "gbs": None, "peak_share": None, "host_us": None,
        "notes": list(trial.notes),
    }  # fmt: skip
    with closing(trial):
        trial.launch(margin)
        if check:
            verdict = trial.check()
            document.update(ok=verdict.ok, error=verdict.error, problems=verdict.problems)
        if timed:
            timing = trial.time(margin)
            document.update(ms=timing.ms, host_us=timing.host_us)
            if trial.work.bytes:
                tflops, document["gbs"] = trial.work.rates(timing.ms)
                document["tflops"] = tflops if trial.work.flops else None
                peak = None if trial.notes else gpu_of(trial.device.name)
                document["peak_share"] = None if peak is None else trial.work.share(timing.ms, peak)
    return document


def _print(documents: list[dict[str, Any]]) -> None:
    for document in documents:
        shape = " ".join(f"{name}={value}" for name, value in document["problem"].items())
        click.echo(f"{document['name']} ({document['arch']}) on {document['device']}, {shape}: "
                   f"{'ok' if document['ok'] else 'WRONG'}")  # fmt: skip
        if document["error"] is not None:
            error = document["error"]
            click.echo(f"  error: Frobenius {error['fro']:.3g}, worst element {error['max_scaled']:.3g} of its bound")
        for line in (*document["problems"], *document["notes"]):
            click.echo(f"  {line}")
        if document["ms"] is not None:
            click.echo(f"  {rates(document)}, host {document['host_us']:.2f} us a launch")


def rates(timing: Mapping[str, Any]) -> str:
    """Time, throughput and share of the peak, those that `timing` has."""
    forms = (("ms", ".4g", " ms"), ("tflops", ".4g", " TFLOP/s"), ("gbs", ".4g", " GB/s"),
             ("peak_share", ".1%", " of peak"))  # fmt: skip
    return ", ".join(f"{timing[key]:{form}}{unit}" for key, form, unit in forms if timing.get(key) is not None)


class _Background(Generic[T]):
    """A call in a thread; `result` waits for it, and raises its error."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value] # a call without error has its value
