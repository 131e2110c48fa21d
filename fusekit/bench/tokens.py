"""Router and permutation kernels compared with a plain copy of the same bytes, PyTorch and Transformer Engine.

Each is timed as replays of a CUDA graph of many launches that rotate over sets of buffers (see fusekit.bench.replay),
in interleaved rounds. The copy is the driver's, and moves as many bytes, read and written together, as the kernel must.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusekit.bench.gemms import Bench, Options, alike, first_line
from fusekit.bench.replay import Replay, launches_for, sets_for
from fusekit.bench.timing import Run, Stopwatch, median
from fusekit.bench.token_trial import TokenTrial
from fusekit.choice.gpus import gpu_of
from fusekit.choice.tuning import Row, features
from fusekit.library import Library
from fusekit.plan.operations import OPERATIONS
from fusekit.runtime import Device, DeviceArray, Kernel

PEERS = ("torch", "te")
_LEAST_ROUNDS = 7
_SHARE = 0.25
_NOISE = 1 << 24
_LINE = 128


@dataclass(slots=True)
class Line:
    """One thing that is timed. what: "fusekit", "copy" or a peer. replay: launches `count` of them."""

    what: str
    variant: str | None = None
    replay: Any = None
    times: list[float] = field(default_factory=list)  # microseconds of one
    error: str | None = None


class TokenBench(Bench):
    """The benchmark of token kernels on one device.

    options: as for GEMMs; peers of `PEERS`, a quarter of the time. check: compare what the first set of buffers holds
    with the NumPy reference, too.
    """

    def __init__(self, library: Library, device: Device, arch: str, options: Options, *, check: bool) -> None:
        super().__init__(library, device, arch, options)
        self.check = check
        self._peers = tuple(peer for peer in options.peers if peer in PEERS)
        self._torch: Any = None
        self._asked = False

    def measure(self, name: str, tokens: int | None, hidden: int | None, stream: int) -> dict[str, Any]:
        """Times the kernel `name` ("file/kernel", or with "@variant"). tokens, hidden: None takes the spec's."""
        if self._peers and not self._asked:  # a benchmark of GEMMs alone needs no word about the router's peers
            self._asked, self._torch = True, self.imported("torch_router", f"no times of {', '.join(self._peers)}")
        records = alike(self.library, name, self.arch)
        if not self.options.every and len(records) > 1:
            moved = hidden if OPERATIONS[records[0].spec["op"]].wide else None
            asked = {dim: size for dim, size in (("T", tokens), ("H", moved)) if size is not None}
            records = [self.library.find(name, self.arch, self.device.ordinal, asked)]
        kernels = [self.library.load(record.name, self.arch, self.device.ordinal) for record in records]
        for kernel in kernels:
            if hidden is not None and OPERATIONS[kernel.spec["op"]].wide:
                kernel.spec["problem"] = {**(kernel.spec.get("problem") or {"T": 4096}), "H": hidden}
        opened: list[Any] = [*kernels]
        try:
            trials = self._trials(kernels[0], tokens, opened)
            lines = self._lines(kernels, trials, stream, opened)
            self._time(lines, stream)
            verdicts = [self._verdict(kernel, trials[0]) for kernel in kernels] if self.check else [None] * len(kernels)
        finally:
            while opened:
                _close(opened.pop())
        return self._document(name, trials[0], lines, verdicts)

    def _trials(self, kernel: Kernel, tokens: int | None, opened: list[Any]) -> list[TokenTrial]:
        trials: list[TokenTrial] = []
        while not trials or len(trials) < sets_for(sum(array.nbytes for array in trials[0].arrays.values())):
            trials.append(TokenTrial(self.library, kernel, tokens, self.options.seed + len(trials)))
            opened.append(trials[-1])
        return trials

    def _lines(
        self, kernels: Sequence[Kernel], trials: Sequence[TokenTrial], stream: int, opened: list[Any]
    ) -> list[Line]:
        self.settle()
        count = launches_for(len(trials))
        lines = []
        for kernel in kernels:
            runs: list[Run] = [kernel.bind(**trial.arguments) for trial in trials]
            replay = Replay(self.library.devices, runs, count, stream)
            opened.append(replay)
            lines.append(Line("fusekit", kernel.name.partition("@")[2], replay))
        if trials[0].work.bytes > 1:
            half = trials[0].work.bytes // 2
            half -= half % _LINE if half > _LINE else 0  # a ragged end costs a copy of its own
            copies = [self._copy(half, opened) for _ in range(sets_for(2 * half))]
            replay = Replay(self.library.devices, copies, launches_for(len(copies)), stream)
            opened.append(replay)
            lines.append(Line("copy", None, replay))
        for peer in self._peers if self._torch is not None else ():
            line = self._peer(peer, trials, count, stream, opened)
            lines += [] if line is None else [line]
        return lines

    def _copy(self, nbytes: int, opened: list[Any]) -> Run:
        arrays = [DeviceArray(self.library.devices, (nbytes,), "u8", self.device.ordinal) for _ in range(2)]
        opened += arrays
        noise = np.random.default_rng(len(opened)).bytes(min(nbytes, _NOISE))
        for array in arrays:
            array.upload_repeated(noise)
        driver = self.library.devices.driver

        def run(stream: int) -> None:
            target, source = (array.data_ptr() for array in arrays)
            driver.check(driver.api.cuMemcpyDtoDAsync(target, source, nbytes, stream), "cuMemcpyDtoDAsync")

        return run

    def _peer(self, peer: str, trials: Sequence[TokenTrial], count: int, stream: int, opened: list[Any]) -> Line | None:
        module, spec, line = self._torch, trials[0].kernel.spec, Line(peer)
        make = module.eager if peer == "torch" else module.transformer_engine
        try:
            views = [{name: module.view(array) for name, array in trial.arrays.items()} for trial in trials]
            works = [make(spec, view, trials[0].kernel.defaults) for view in views]
            if any(work is None for work in works):
                return None
            self.settle()
            line.replay = module.Captured(works, count, self.device.ordinal, stream)
            opened.append(line.replay)
        except ImportError as error:
            note = f"no times of {peer}: it cannot be imported ({error})"
            self.notes += [] if note in self.notes else [note]
            return None
        except Exception as error:  # a peer that cannot run this is a result too
            line.error = first_line(error)
        return line

    def _time(self, lines: Sequence[Line], stream: int) -> None:
        running = [line for line in lines if line.replay is not None]
        with Stopwatch(self.library.devices, self.device, stream) as watch:
            times = watch.compare([line.replay for line in running], self.options.target_ms * _SHARE, _LEAST_ROUNDS)
        for line, samples in zip(running, times, strict=True):
            line.times = [ms * 1e3 / line.replay.count for ms in samples]

    def _verdict(self, kernel: Kernel, trial: TokenTrial) -> dict[str, Any]:
        for name in trial.outputs:
            trial.arrays[name].fill(0xFF)
        kernel(**trial.arguments)
        self.settle()
        verdict = trial.check()
        return {"ok": verdict.ok, "error": verdict.error, "problems": verdict.problems}

    def _document(
        self, name: str, trial: TokenTrial, lines: Sequence[Line], verdicts: Sequence[dict[str, Any] | None]
    ) -> dict[str, Any]:
        peak, work = gpu_of(self.device.name), trial.work
        copy = next((line for line in lines if line.what == "copy" and line.times), None)
        peers = {line.what: line for line in lines if line.what in PEERS and line.times}
        peer = peers.get("te") or peers.get("torch")
        checks = iter(verdicts)
        documents = []
        for line in lines:
            us = median(line.times) if line.times else None
            moves = line.what in ("fusekit", "copy")
            documents.append(
                {
                    "what": line.what, "variant": line.variant, "us": us, "best_us": min(line.times, default=None),
                    "rounds": len(line.times), "gbs": work.bytes / us * 1e-3 if us and moves else None,
                    "peak_share": work.share(us * 1e-3, peak) if us and moves and peak is not None else None,
                    "of_copy": us / median(copy.times) if us and copy is not None else None,
                    "speedup": median(peer.times) / us if us and peer is not None else None,
                    "check": next(checks) if line.what == "fusekit" else None, "error": line.error,
                }
            )  # fmt: skip
        problem = {"T": trial.tokens, "H": int(trial.problem.get("H", 0))}
        timed = sorted((median(line.times), line.variant) for line in lines if line.what == "fusekit")
        variants = tuple((str(variant), round(us, 3)) for us, variant in timed)
        self.rows.append(Row(self.device.name, features(trial.kernel.spec), problem, variants))
        return {
            "name": name.partition("@")[0], "problem": trial.problem, "bytes": work.bytes, "lines": documents,
            "ok": all(verdict is None or verdict["ok"] for verdict in verdicts),
        }  # fmt: skip


def _close(opened: Any) -> None:
    """Closes a trial, a replay, an array or a kernel."""
    closing: Callable[[], None] = getattr(opened, "close", None) or getattr(opened, "free", None) or opened.unload
    closing()
