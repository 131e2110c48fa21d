"""The GEMMs of a model, fused and unfused: times, shares of peaks, agreement, and the time of a training step.

All that stands for one kernel is timed in one run (see fusekit.bench.timing), in two sets of interleaved rounds or each
alone: its variants and one dense product through cuBLAS, of gate and up's size, as the yardstick; then what PyTorch
would run instead. Eager code that waits for memory needs little power: between the others, it would let the clock rise
for them.
Outputs are poisoned before they are compared with PyTorch's. Without PyTorch the kernels are timed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from fusekit.bench.arrays import Tensors, sizes_of
from fusekit.bench.replay import Replay, launches_for, sets_for
from fusekit.bench.roofline import Work, gemm_work
from fusekit.bench.shape import ROLES, STEPS, Shape, is_gated
from fusekit.bench.timing import Run, Stopwatch, median
from fusekit.choice.gpus import gpu_of
from fusekit.choice.tuning import Row, features
from fusekit.choice.variants import check_alike
from fusekit.library import Library
from fusekit.runtime import Device, Kernel
from fusekit.store import NameRecord

# Two ways to compute the same in 16 bits differ by what each rounds on the way: an eager epilogue several times.
AGREES = 2e-2
PEERS = ("torch", "loop", "compile")
_HOWS = {"torch": "grouped", "loop": "loop", "compile": "compile"}


@dataclass(frozen=True, slots=True)
class Options:
    """groups: see `sizes_of`. every: all stored variants, not only the one that loading takes. peers: of `PEERS`.
    target_ms: device time for each kernel's rounds; with `steady`, for each thing that is timed, alone. decode: one
    graph, of GEMMs or of a layer's inference pass, and the bandwidth at which that reads weights.
    """

    groups: str = "uneven"
    every: bool = False
    peers: tuple[str, ...] = ("torch",)
    target_ms: float = 1000.0
    seed: int = 0
    steady: bool = False
    decode: bool = False


@dataclass(slots=True)
class Line:
    """One thing that is timed. what: "fusekit", a peer or "dense". agrees: how far its results are from PyTorch's."""

    what: str
    run: Run | None
    variant: str | None = None
    work: Work | None = None
    times: list[float] = field(default_factory=list)
    agrees: dict[str, Any] | None = None
    error: str | None = None

    def document(self, peak: Any, dense: Line | None, peer: Line | None) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "what": self.what, "variant": self.variant, "ms": None, "best_ms": None, "rounds": len(self.times),
            "tflops": None, "gbs": None, "peak_share": None, "dense_share": None, "speedup": None,
            "agrees": self.agrees, "error": self.error,
        }  # fmt: skip
        if not self.times:
            return entry
        ms = entry["ms"] = median(self.times)
        entry["best_ms"] = min(self.times)
        if self.work is not None:
            entry["tflops"], entry["gbs"] = self.work.rates(ms)
            entry["peak_share"] = None if peak is None else self.work.share(ms, peak)
            if dense is not None and dense.times and dense.work is not None:
                entry["dense_share"] = entry["tflops"] / dense.work.rates(median(dense.times))[0]
        if peer is not None and peer.times:
            entry["speedup"] = median(peer.times) / ms
        return entry


@dataclass(slots=True)
class Subject:
    """One kernel: its problem, tensors, loaded variants and what is timed."""

    name: str
    spec: Mapping[str, Any]
    problem: dict[str, int]
    tensors: Tensors
    kernels: list[Kernel]
    lines: list[Line]

    @property
    def fastest(self) -> Line:
        """The fastest of fusekit's variants."""
        return min((line for line in self.lines if line.what == "fusekit"), key=lambda line: median(line.times))

    def row(self, device: str) -> Row:
        """The measured order of the variants, for a tuning table."""
        timed = sorted((median(line.times), line.variant) for line in self.lines if line.what == "fusekit")
        variants = tuple((str(variant), round(ms * 1e3, 2)) for ms, variant in timed)
        return Row(device, features(self.spec), self.problem, variants)

    def close(self) -> None:
        self.tensors.free()
        for kernel in self.kernels:
            kernel.unload()


class Bench:
    """The benchmarks of one architecture on one device. rows: of a tuning table."""

    def __init__(self, library: Library, device: Device, arch: str, options: Options) -> None:
        self.library, self.device, self.arch, self.options = library, device, arch, options
        self.notes: list[str] = []
        self.rows: list[Row] = []

    def imported(self, module: str, missing: str) -> Any:
        """`fusekit.bench.<module>`; None without PyTorch, with a note of what is `missing`."""
        try:
            return import_module(f"fusekit.bench.{module}")
        except ImportError as error:
            self.notes.append(f"{missing}: PyTorch cannot be imported ({error})")
            return None

    def time(self, lines: Sequence[Line], stream: int) -> None:
        """Times what can run, in interleaved rounds or each alone."""
        running = [line for line in lines if line.run is not None]
        with Stopwatch(self.library.devices, self.device, stream) as watch:
            runs: list[Run] = [line.run for line in running if line.run is not None]
            measure = watch.steady if self.options.steady else watch.compare
            for line, times in zip(running, measure(runs, self.options.target_ms), strict=True):
                line.times = times

    def settle(self) -> None:
        """Waits for PyTorch's stream: another one uses its results without waiting."""
        self.library.devices.synchronize(self.device)


class GemmBench(Bench):
    """The benchmark of the kernels `names` ("file/kernel", or with "@variant") of one architecture on one device."""

    def __init__(self, library: Library, device: Device, names: Sequence[str], arch: str, options: Options) -> None:
        super().__init__(library, device, arch, options)
        self.peak = gpu_of(device.name)
        self._names = names
        self._torch: Any = self.imported("torch_gemm", "no unfused times, no yardstick") if options.peers else None
        self._subjects: list[Subject] = []

    def measure(self, shape: Shape, stream: int, timed: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
        """Times everything at `shape`. The document of one problem: a member of `models` in docs/benchmarks.md.

        timed: called with each kernel when its times are there.
        """
        records = {name: alike(self.library, name, self.arch) for name in self._names}
        gated = is_gated([subjects_[0].spec for subjects_ in records.values()])
        problems = {name: shape.problem(subjects_[0].spec, gated) for name, subjects_ in records.items()}
        dense = self._dense(records, problems)
        try:
            for name in self._names:
                self._subjects.append(self._subject(name, problems[name], dense, stream))
                timed(f"{name} at {problems[name]['M']} rows")
            kernels = [self._document(subject) for subject in self._subjects]
            steps = self._steps(stream)
        finally:
            self.rows = [subject.row(self.device.name) for subject in self._subjects if subject.lines[0].times]
            while self._subjects:
                self._subjects.pop().close()
            del dense
            self._release()
        return {
            "kernels": kernels, "steps": steps,
            "ok": all(line["agrees"] is None or line["agrees"]["ok"] for kernel in kernels for line in kernel["lines"]),
        }  # fmt: skip

    def decode(self, shape: Shape, stream: int, timed: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
        """As `measure`, without peers: launches of a CUDA graph, which find the weights in memory and not in L2."""
        kernels = []
        for name in self._names:
            records = alike(self.library, name, self.arch)
            problem = shape.problem(records[0].spec, is_gated([records[0].spec]))
            if not self.options.every and len(records) > 1:
                records = [self.library.find(name, self.arch, self.device.ordinal, problem)]
            lines = [self._replayed(record, problem, stream) for record in records]
            kernels.append(
                {
                    "name": name.partition("@")[0], "problem": problem,
                    "lines": [line.document(self.peak, None, None) for line in lines],
                }
            )  # fmt: skip
            timed(f"{name} at {problem['M']} rows")
        return {"kernels": kernels, "steps": [], "ok": True}

    def _replayed(self, record: NameRecord, problem: dict[str, int], stream: int) -> Line:
        sizes = sizes_of(self.options.groups, problem["M"], problem["E"])
        busy = int(np.count_nonzero(sizes))
        extents = {"rows": problem["M"], "groups": problem["E"], "n": problem["N"], "k": problem["K"]}
        work, whole = (gemm_work(record.spec, busy=groups, **extents) for groups in (busy, problem["E"]))
        line = Line("fusekit", None, record.name.partition("@")[2], work)
        with ExitStack() as opened:
            kernel = self.library.load(record.name, self.arch, self.device.ordinal)
            opened.callback(kernel.unload)
            runs = []
            for seed in range(sets_for(whole.bytes)):
                tensors = Tensors(self.library.devices, kernel, problem, sizes, self.options.seed + seed)
                opened.callback(tensors.free)
                runs.append(kernel.bind(**tensors.arguments))
            graph = Replay(self.library.devices, runs, launches_for(len(runs)), stream)
            opened.callback(graph.close)
            line.run = graph
            self.time([line], stream)
            line.times = [ms / graph.count for ms in line.times]
        return line

    def _dense(self, records: Mapping[str, Any], problems: Mapping[str, Mapping[str, int]]) -> Line | None:
        if self._torch is None:
            return None
        widest = max(self._names, key=lambda name: problems[name]["N"] * problems[name]["K"])
        spec, problem = records[widest][0].spec, problems[widest]
        n, k = problem["N"], problem["K"]
        try:
            work = self._torch.Dense(problem["M"], n, k, spec["dtype"], f"cuda:{self.device.ordinal}")
        except RuntimeError as error:
            self.notes.append(f"no yardstick: {first_line(error)}")
            return None
        self.settle()
        size = 2 * (problem["M"] * (n + k) + n * k)
        return Line("dense", self._torch.on_stream(work, self.device.ordinal), None, Work(work.flops, size))

    def _subject(self, name: str, problem: dict[str, int], dense: Line | None, stream: int) -> Subject:
        records = alike(self.library, name, self.arch)
        if not self.options.every and len(records) > 1:
            records = [self.library.find(name, self.arch, self.device.ordinal, problem)]
        sizes = sizes_of(self.options.groups, problem["M"], problem["E"])
        kernels = [self.library.load(record.name, self.arch, self.device.ordinal) for record in records]
        spec = records[0].spec
        tensors = Tensors(self.library.devices, kernels[0], problem, sizes, self.options.seed)
        subject = Subject(name.partition("@")[0], spec, problem, tensors, kernels, [])
        try:
            busy = int(np.count_nonzero(sizes))
            rows, n, k = problem["M"], problem["N"], problem["K"]
            work = gemm_work(spec, rows=rows, groups=problem["E"], busy=busy, n=n, k=k)
            subject.lines = [
                Line("fusekit", kernel.bind(**tensors.arguments), kernel.name.partition("@")[2], work)
                for kernel in kernels
            ]
            peers = self._peers(subject, sizes.tolist(), stream)
            subject.lines += peers
            if dense is not None:
                subject.lines.append(Line("dense", dense.run, None, dense.work))
            self.time([line for line in subject.lines if line not in peers], stream)
            if any(line.run is not None for line in peers):
                self.time(peers, stream)
        except BaseException:
            subject.close()
            raise
        self._release()
        return subject

    def _peers(self, subject: Subject, sizes: list[int], stream: int) -> list[Line]:
        """The unfused twins, each run once; fusekit's variants are compared with the first one that works."""
        module, lines = self._torch, []
        want: Mapping[str, Any] | None = None
        if module is None:
            self._check(subject, None, stream)
            return []
        views = {name: module.view(array) for name, array in subject.tensors.arrays.items()}
        scalars = subject.kernels[0].defaults | subject.tensors.scalars
        for peer in self.options.peers:
            line = Line(peer, None, None, subject.lines[0].work)
            lines.append(line)
            kept: dict[str, Any] = {}
            try:
                twin = module.Unfused(subject.spec, views, scalars, sizes, _HOWS[peer])
                self.settle()
                first = module.on_stream(_keeping(twin, kept if want is None else {}), self.device.ordinal)
                first(stream)
                self._wait(stream)
                line.run = module.on_stream(twin, self.device.ordinal)
            except Exception as error:  # a peer that cannot run this kernel is a result too
                line.error = first_line(error)
                continue
            if want is None:
                # What an accumulating twin adds to is its own: later rounds would change it.
                want = {name: sums.clone() if subject.spec["accumulate"] else sums for name, sums in kept.items()}
        self._check(subject, want, stream)
        return lines

    def _check(self, subject: Subject, want: Mapping[str, Any] | None, stream: int) -> None:
        """Runs every variant once on poisoned outputs, and compares."""
        for line in subject.lines:
            assert line.run is not None
            subject.tensors.reset()
            line.run(stream)
            self._wait(stream)
            if want is not None:
                apart = {
                    name: self._torch.distance(self._torch.view(subject.tensors.arrays[name]), want[name])
                    for name in subject.tensors.outputs
                    if name in want  # FP8 outputs are not
                }
                worst = max(apart.values(), key=lambda value: (value != value, value), default=0.0)
                line.agrees = {"fro": None if worst != worst else worst, "ok": worst <= AGREES}

    def _steps(self, stream: int) -> list[dict[str, Any]]:
        """Forward and backward: their kernels one after the other, of each kernel the fastest variant."""
        by_role = {subject.name.rpartition("/")[2]: subject for subject in self._subjects}
        documents = []
        for step, roles in STEPS.items():
            if not by_role.keys() >= set(roles) or len({by_role[role].name.partition("/")[0] for role in roles}) > 1:
                continue
            subjects = [by_role[role] for role in roles]
            lines = [Line("fusekit", sequence([subject.fastest.run for subject in subjects]))]
            for peer in self.options.peers if self._torch is not None else ():
                peers = [line for subject in subjects for line in subject.lines if line.what == peer]
                lines.append(Line(peer, None, error=next((line.error for line in peers if line.error), None)))
                if len(peers) == len(subjects) and all(line.run is not None for line in peers):
                    lines[-1].run = sequence([line.run for line in peers])
            flops = sum(work.flops for subject in subjects if (work := subject.lines[0].work) is not None)
            moved = sum(work.bytes for subject in subjects if (work := subject.lines[0].work) is not None)
            for line in lines:
                line.work = Work(flops, moved)
            self.time(lines, stream)
            peer_line = next((line for line in lines[1:] if line.times), None)
            documents.append(
                {
                    "step": step,
                    "kernels": [f"{subject.name}@{subject.fastest.variant}" for subject in subjects],
                    "lines": [line.document(self.peak, None, peer_line) for line in lines],
                }
            )
        return documents

    def _document(self, subject: Subject) -> dict[str, Any]:
        dense = next((line for line in subject.lines if line.what == "dense"), None)
        peer = next((line for line in subject.lines if line.what in PEERS and line.times), None)
        return {
            "name": subject.name,
            "problem": subject.problem,
            "lines": [line.document(self.peak, dense, peer) for line in subject.lines],
        }

    def _release(self) -> None:
        if self._torch is not None:
            self._torch.release()

    def _wait(self, stream: int) -> None:
        driver = self.library.devices.driver
        driver.check(driver.api.cuStreamSynchronize(stream), "cuStreamSynchronize")


def alike(library: Library, name: str, arch: str) -> list[NameRecord]:
    """The stored variants of `name` ("file/kernel", or with "@variant"), which compute the same; else UsageError."""
    records = library.variants(name, arch)
    check_alike(records)
    return records


def roles(names: Sequence[str]) -> list[str]:
    """`names` in the order of a training step; the others after them, as they came."""
    order = {role: index for index, role in enumerate(ROLES)}
    return sorted(names, key=lambda name: order.get(name.rpartition("/")[2].partition("@")[0], len(order)))


def _keeping(twin: Callable[[], Mapping[str, Any]], kept: dict[str, Any]) -> Callable[[], None]:
    return lambda: kept.update(twin())


def sequence(runs: Sequence[Run | None]) -> Run:
    """One after the other."""

    def run(stream: int) -> None:
        for run_ in runs:
            assert run_ is not None
            run_(stream)

    return run


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
