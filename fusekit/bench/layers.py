"""Whole layers compared with the sum of their GEMMs, each a dense cuBLAS GEMM; variants of their GEMMs.

Forward, backward, and both in one CUDA graph are timed in interleaved rounds, and so are the dense products. A sweep
times the passes with each variant of each GEMM: at the power limit, the variant that is fastest alone may slow down
what runs next to it (`fusekit bench`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from fusekit.bench.gemms import Bench, Line, Options, alike, first_line, sequence
from fusekit.bench.layer_trial import BOTH, LayerTrial, flops, gemms, parts_of, weight_bytes
from fusekit.bench.roofline import Work
from fusekit.bench.shape import Shape
from fusekit.bench.timing import median
from fusekit.choice.gpus import gpu_of
from fusekit.choice.tuning import Row, features
from fusekit.layers import Layer
from fusekit.library import Library
from fusekit.plan.layer.program import FORWARD, INFERENCE, QUANTISE
from fusekit.plan.operations import OPERATIONS
from fusekit.runtime import Device

NOISE = 0.005  # of a pass: what a variant must save to be chosen in a sweep


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
        dense = self._dense(
            {shape for pass_shapes in shapes.values() for shape in pass_shapes}, layer.options.dtype, stream
        )
        sums = (
            {which: sum(dense[shape] for shape in pass_shapes) for which, pass_shapes in shapes.items()}
            if dense
            else {}
        )
        sums |= {BOTH: sum(sums.values())} if sums else {}
        peak = gpu_of(self.device.name)
        documents = []
        for line in lines:
            document = line.document(peak, None, None) | {"gbs": None, "dense_ms": None}
            if line.variant in sums and document["ms"]:
                document["dense_ms"] = sums[line.variant]
                document["dense_share"] = sums[line.variant] / document["ms"]
            documents.append(document)
        return self._result(name, trial, documents)

    def decode(self, name: str, tokens: int | None, stream: int) -> dict[str, Any]:
        """Times the inference pass of the layer `name` for `tokens` (None: the spec's), which reads weights alone."""
        layer = self.library.layer(name, self.arch, self.device.ordinal)
        count = layer.options.tokens if tokens is None else tokens
        trial = LayerTrial(self.library, layer, count, self.options.seed, self.device.ordinal)
        with closing(trial), trial.inference(stream) as run:
            line = Line("fusekit", run, INFERENCE, Work(flops(layer, INFERENCE, count), weight_bytes(layer, count)))
            self.time([line], stream)
        document = line.document(gpu_of(self.device.name), None, None) | {"dense_ms": None}
        return self._result(name, trial, [document])

    def _result(self, name: str, trial: LayerTrial, lines: list[dict[str, Any]]) -> dict[str, Any]:
        o = trial.layer.options
        return {
            "name": name,
            "problem": {"T": trial.tokens, "H": o.hidden, "I": o.intermediate, "X": o.experts, "K": o.topk},
            "memory": {"kept": trial.sizes.kept, "scratch": trial.sizes.scratch},
            "lines": lines,
            "ok": True,
        }

    def _dense(self, shapes: set[tuple[int, int, int]], dtype: str, stream: int) -> dict[tuple[int, int, int], float]:
        """Milliseconds of one dense product of each shape; empty where PyTorch cannot run one."""
        times: dict[tuple[int, int, int], float] = {}
        for shape in sorted(shapes) if self._torch is not None else ():
            try:
                work = self._torch.Dense(*shape, dtype, f"cuda:{self.device.ordinal}")
            except RuntimeError as error:
                self.notes.append(f"no dense products to compare with: {first_line(error)}")
                return {}
            self.settle()
            line = Line("dense", self._torch.on_stream(work, self.device.ordinal))
            self.time([line], stream)
            times[shape] = median(line.times)
            del work, line
            self._torch.release()
        return times

    def sweep(self, name: str, tokens: int | None, stream: int) -> dict[str, Any]:
        """Times the passes of the layer `name` for `tokens` (None: the spec's) with each variant of each GEMM in its
        place, the others at their choice so far: once through the GEMMs. A variant is chosen where it makes the passes
        faster than the present one by more than `NOISE`.

        Returns a member of `models` in docs/benchmarks.md; adds rows of a tuning table to `rows`.
        """
        layer = self.library.layer(name, self.arch, self.device.ordinal)
        count = layer.options.tokens if tokens is None else tokens
        kernels: list[dict[str, Any]] = []
        trial = LayerTrial(self.library, layer, count, self.options.seed, self.device.ordinal)
        with closing(trial):
            trial.quantise()
            trial.bind(FORWARD)(stream)  # the backward pass reads what it keeps
            for row, variants, parts in self._swept(layer, count):
                kernels += self._choose(trial, row, variants, parts, stream)
        return {"model": name, "kernels": kernels, "steps": [], "ok": True}

    def _swept(self, layer: Layer, tokens: int) -> list[tuple[Row, list[str], list[str]]]:
        """(row of a tuning table, variants, parts) of each GEMM that has several variants. Parts that compute the same
        share a row.
        """
        by_row: dict[str, tuple[Row, list[str], list[str]]] = {}
        for part, keys in parts_of(layer).items():
            swept = OPERATIONS[keys["op"]].gemm and layer.kernel_name(part, tokens)
            records = alike(self.library, f"{layer.name}.{part}", self.arch) if swept else []
            if len(records) > 1:
                problem = Shape(T=tokens).problem(records[0].spec, gated=True)
                row = Row(self.device.name, features(records[0].spec), problem, ())
                stored = [record.name.partition("@")[2] for record in records]
                known = by_row.setdefault(json.dumps(row.to_json(), sort_keys=True), (row, stored, []))
                known[1][:] = [variant for variant in known[1] if variant in stored]
                known[2].append(part)
        return [entry for entry in by_row.values() if len(entry[1]) > 1]

    def _choose(
        self, trial: LayerTrial, row: Row, variants: Sequence[str], parts: Sequence[str], stream: int
    ) -> list[dict[str, Any]]:
        """Times and sets the variants of parts that share a row; a document for each part."""
        layer, count = trial.layer, trial.tokens
        present = layer.kernel_name(parts[0], count).partition("@")[2]
        passes = trial.passes_of(parts)
        work = Work(sum(flops(layer, which, count) for which in passes), 0)
        lines = []
        for variant in variants:
            for part in parts:
                layer.set_variant(part, variant)
            lines.append(Line("fusekit", sequence([trial.bind(which) for which in passes]), variant, work))
        self.time(lines, stream)
        ms = {str(line.variant): median(line.times) for line in lines}
        order = sorted(ms, key=lambda variant: (ms[variant], variant))
        if present in ms and ms[order[0]] >= (1 - NOISE) * ms[present]:
            order.sort(key=lambda variant: variant != present)
        for part in parts:
            layer.set_variant(part, order[0])
        self.rows.append(replace(row, variants=tuple((variant, None) for variant in order)))
        peak = gpu_of(self.device.name)
        timed = [line.document(peak, None, None) | {"gbs": None} for line in lines]
        shared = {"problem": row.problem, "passes": passes, "chosen": order[0], "lines": timed}
        return [{"name": f"{layer.name}.{part}", **shared} for part in parts]
