"""Whole layers beside the sum of their GEMMs, each as one dense product through cuBLAS (`fusekit bench`).

Forward, backward, and both in one CUDA graph are timed in interleaved rounds, and so are the dense products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusekit.bench.gemms import Line, Options, first_line
from fusekit.bench.layer_trial import BOTH, LayerTrial, flops, gemms
from fusekit.bench.replay import Replay
from fusekit.bench.roofline import Work, peak_of
from fusekit.bench.timing import Run, Stopwatch, median
from fusekit.plan.layer.program import BACKWARD, FORWARD
from fusekit.runtime import Device, Library


class LayerBench:
    """The benchmark of layers on one device. options: as for GEMMs; of the peers "torch" gives the dense products."""

    def __init__(self, library: Library, device: Device, arch: str, options: Options) -> None:
        self.library, self.device, self.arch, self.options = library, device, arch, options
        self.notes: list[str] = []
        self._torch: Any = None
        if "torch" in options.peers:
            try:
                from fusekit.bench import torch_gemm

                self._torch = torch_gemm
            except ImportError as error:
                self.notes.append(f"no dense products to compare with: PyTorch cannot be imported ({error})")

    def measure(self, name: str, tokens: int | None, stream: int) -> dict[str, Any]:
        """Times the layer `name` for `tokens` (None: the spec's)."""
        layer = self.library.layer(name, self.arch, self.device.ordinal)
        count = layer.options.tokens if tokens is None else tokens
        trial = LayerTrial(self.library, layer, count, self.options.seed, self.device.ordinal)
        graph: Replay | None = None
        try:
            forward, backward = trial.bind(FORWARD), trial.bind(BACKWARD)
            trial.quantise()

            def both(handle: int) -> None:
                forward(handle)
                backward(handle)

            graph = Replay(self.library.devices, [both], 1, stream)
            lines = [
                Line("fusekit", run, which, Work(flops(layer, which, count), 0))
                for which, run in ((FORWARD, forward), (BACKWARD, backward), (BOTH, graph))
            ]
            self._time([(line, line.run) for line in lines], stream)
        finally:
            if graph is not None:
                graph.close()
            trial.close()
        shapes = {which: gemms(layer, which, count) for which in (FORWARD, BACKWARD)}
        dense = self._dense({shape for each in shapes.values() for shape in each}, layer.options.dtype, stream)
        sums = {which: sum(dense[shape] for shape in each) for which, each in shapes.items()} if dense else {}
        sums |= {BOTH: sum(sums.values())} if sums else {}
        o, peak = layer.options, peak_of(self.device.name)
        documents = []
        for line in lines:
            found = line.document(peak, None, None) | {"gbs": None, "dense_ms": None}
            if line.variant in sums and found["ms"]:
                found["dense_ms"] = sums[line.variant]
                found["dense_share"] = sums[line.variant] / found["ms"]
            documents.append(found)
        return {
            "name": name,
            "problem": {"T": count, "H": o.hidden, "I": o.intermediate, "X": o.experts, "K": o.topk},
            "memory": {"kept": trial.sizes.kept, "scratch": trial.sizes.scratch},
            "lines": documents,
            "ok": True,
        }

    def _time(self, timed: list[tuple[Line, Run | None]], stream: int) -> None:
        runs = [run for _, run in timed if run is not None]
        with Stopwatch(self.library.devices, self.device, stream) as watch:
            measure: Callable[..., list[list[float]]] = watch.steady if self.options.steady else watch.compare
            for (line, _), times in zip(timed, measure(runs, self.options.target_ms), strict=True):
                line.times = times

    def _dense(self, shapes: set[tuple[int, int, int]], dtype: str, stream: int) -> dict[tuple[int, int, int], float]:
        """Milliseconds of one dense product of each shape; empty where PyTorch cannot run one."""
        found: dict[tuple[int, int, int], float] = {}
        for shape in sorted(shapes) if self._torch is not None else ():
            try:
                work = self._torch.Dense(*shape, dtype, f"cuda:{self.device.ordinal}")
            except RuntimeError as error:
                self.notes.append(f"no dense products to compare with: {first_line(error)}")
                return {}
            self.library.devices.synchronize(self.device)
            line = Line("dense", self._torch.on_stream(work, self.device.ordinal))
            self._time([(line, line.run)], stream)
            found[shape] = median(line.times)
            del work, line
            self._torch.release()
        return found
