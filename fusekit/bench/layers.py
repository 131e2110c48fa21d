"""Whole layers beside the sum of their GEMMs, each as one dense product through cuBLAS; the variants of their GEMMs.

Forward, backward, and both in one CUDA graph are timed in interleaved rounds, and so are the dense products. A sweep
times the variants of each GEMM, on rows that are gathered where the layer gathers them (`fusekit bench`).
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from fusekit.bench.gemms import Bench, GemmBench, Line, Options, first_line
from fusekit.bench.layer_trial import BOTH, LayerTrial, flops, gemms
from fusekit.bench.roofline import Work, peak_of
from fusekit.bench.shape import Shape
from fusekit.bench.timing import median
from fusekit.choice.tuning import Row
from fusekit.library import Library
from fusekit.plan.layer.program import QUANTISE
from fusekit.plan.operations import OPERATIONS
from fusekit.runtime import Device


class LayerBench(Bench):
    """The benchmark of layers on one device. options: as for GEMMs; of the peers "torch" gives the dense products."""

    def __init__(self, library: Library, device: Device, arch: str, options: Options) -> None:
        super().__init__(library, device, arch, options)
        peer = "torch" in options.peers
        self._torch: Any = self.imported("torch_gemm", "no dense products to compare with") if peer else None

    def measure(self, name: str, tokens: int | None, stream: int) -> dict[str, Any]:
        """Times the layer `name` for `tokens` (None: the spec's)."""
        layer = self.library.layer(name, self.arch, self.device.ordinal)
        count = layer.options.tokens if tokens is None else tokens
        trial = LayerTrial(self.library, layer, count, self.options.seed, self.device.ordinal)
        with closing(trial), trial.runs(stream) as runs:
            lines = [
                Line("fusekit", run, which, Work(flops(layer, which, count), 0))
                for which, run in runs.items()
                if which != QUANTISE  # which multiplies nothing
            ]
            self.time(lines, stream)
        shapes = {which: gemms(layer, which, count) for which in trial.passes}
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

    def _dense(self, shapes: set[tuple[int, int, int]], dtype: str, stream: int) -> dict[tuple[int, int, int], float]:
        """Milliseconds of one dense product of each shape; empty where PyTorch cannot run one."""
        found: dict[tuple[int, int, int], float] = {}
        for shape in sorted(shapes) if self._torch is not None else ():
            try:
                work = self._torch.Dense(*shape, dtype, f"cuda:{self.device.ordinal}")
            except RuntimeError as error:
                self.notes.append(f"no dense products to compare with: {first_line(error)}")
                return {}
            self.settle()
            line = Line("dense", self._torch.on_stream(work, self.device.ordinal))
            self.time([line], stream)
            found[shape] = median(line.times)
            del work, line
            self._torch.release()
        return found


def sweep(
    library: Library, device: Device, arch: str, options: Options, name: str, tokens: int | None, stream: int
) -> tuple[dict[str, Any], list[Row]]:
    """Times every variant of each GEMM of the layer `name` for `tokens` (None: the spec's), one kernel after the other.

    What `models` in docs/benchmarks.md has of it, and the rows of a tuning table.
    """
    kernels: list[dict[str, Any]] = []
    rows: list[Row] = []
    for part, keys in library.layer(name, arch, device.ordinal).program.parts.items():
        full = f"{name}.{part}"
        if OPERATIONS[keys["op"]].gemm and len(library.variants(full, arch)) > 1:
            bench = GemmBench(library, device, [full], arch, options)
            kernels += bench.measure(Shape(T=tokens), stream)["kernels"]
            rows += bench.rows
    agree = all(line["agrees"] is None or line["agrees"]["ok"] for each in kernels for line in each["lines"])
    return {"model": name, "kernels": kernels, "steps": [], "ok": agree}, rows
