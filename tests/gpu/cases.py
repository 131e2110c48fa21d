"""The shapes and circumstances that break grouped GEMMs, as plain values. Pure: nothing here needs a GPU.

A case says how many rows each group has, how far N and K lie from the tile, and what is odd about the launch. The same
cases run for every kernel of an operation in ``matrix.toml`` and ``matrix_backward.toml``; ``harness`` turns a case
into buffers and judges what came back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from fusekit.spec import KernelSpec

TILE_K = 64
MOST_MARGIN = 131  # all multiprocessors but one: one cluster is left


@dataclass(frozen=True)
class Case:
    """One launch.

    sizes: rows of each group (dense operations have one). n, k: N (gate and up together) and K. spare: rows of x, y and
    dy beyond the last group. pad: elements between the rows of matrices. nan_group: a group whose rows of x, dy and
    z are NaN. nan_empty_weights: w of empty groups is NaN. loud: what the activation sees is eight times as large,
    which reaches clamps and tails. scalars: activation scalars given at launch. margin: ``cluster_margin`` given at
    launch. sample: compare about this many rows (and look at all of them for poison).
    """

    name: str
    sizes: tuple[int, ...]
    n: int
    k: int
    spare: int = 0
    pad: int = 0
    nan_group: int | None = None
    nan_empty_weights: bool = False
    loud: bool = False
    scalars: dict[str, float] = field(default_factory=dict)
    margin: int | None = None
    sample: int | None = None

    @property
    def rows(self) -> int:
        """Rows that groups own."""
        return sum(self.sizes)

    def __str__(self) -> str:
        return self.name


def multiple_of_n(spec: KernelSpec) -> int:
    """What N must be a multiple of: 16 bytes a row of w and of y, and whole blocks of the layout."""
    if spec.plan.quant.by_block and spec.plan.halved and spec.glu_layout == "concat":
        return 128
    if spec.plan.quant.weights_alone and spec.glu_layout == "concat" and not spec.plan.quant.mx_weights:
        return 256
    if spec.activation.backward and spec.plan.quant.coded and spec.glu_layout != "none":
        return {"concat": 128, "interleaved": 16}.get(spec.glu_layout, 32)
    if spec.plan.quant.coded:
        return {"none": 16, "interleaved-32": 64}.get(spec.glu_layout, 32)
    if spec.activation.backward:
        return 32 if spec.glu_layout == "interleaved-32" else 8
    if spec.glu_layout == "none":
        return 8
    return 64 if spec.glu_layout == "interleaved-32" else 16


def cases_of(spec: KernelSpec) -> list[Case]:
    """Every case that the kernel must pass, with distinct names."""
    cases = {
        "dense-gemm": _dense_cases,
        "grouped-gemm": _grouped_cases,
        "dense-wgrad": _dense_wgrad_cases,
        "grouped-wgrad": _wgrad_cases,
    }
    unit = spec.plan.quant.group_alignment
    aligned = [
        replace(case, sizes=tuple(-(-size // unit) * unit for size in case.sizes)) for case in cases[spec.op](spec)
    ]
    return aligned if spec.grouped else cases[spec.op](spec)


def each_case(specs: Iterable[KernelSpec]) -> pytest.MarkDecorator:
    """Gives a test every `case` of each `spec`."""
    trials = [pytest.param(spec, case, id=f"{spec.full_name}-{case.name}") for spec in specs for case in cases_of(spec)]
    return pytest.mark.parametrize(("spec", "case"), trials)


def _grouped_cases(spec: KernelSpec) -> list[Case]:
    unit = multiple_of_n(spec)
    tile_m, tile_n = spec.tile
    step = spec.plan.tile_k
    n, k = _near(2 * tile_n, unit) + unit, step + spec.plan.vector  # two tiles and a bit; one step and a bit
    uneven = tuple(int(size) for size in np.random.default_rng(5).integers(0, 6, 256))
    sparse = tuple(3 if group % 31 == 7 else 0 for group in range(200))
    cases = [
        Case("sizes-around-the-tile", (1, 63, 64, 65, 127, 128, 129, 255, 256, 257), n, k),
        Case("first-group-empty", (0, 70, 33), n, k),
        Case("last-group-empty", (70, 33, 0), n, k),
        Case("middle-groups-empty", (70, 0, 0, 33), n, k),
        Case("all-rows-in-the-first-group", (200, 0, 0, 0), n, k),
        Case("all-rows-in-the-last-group", (0, 0, 0, 200), n, k),
        Case("one-row-a-group", (1,) * 9, n, k),
        Case("one-group", (150,), n, k),
        Case("32-groups", (5,) * 31 + (140,), n, k),
        Case("33-groups", (140,) + (0,) * 31 + (5,), n, k),
        Case("256-groups", uneven, unit, k),
        Case("200-groups-mostly-empty", sparse, n, k),
        Case("no-rows", (0, 0, 0), n, k),
        Case("no-rows-but-spare-ones", (0, 0, 0), n, k, spare=130),
        Case("spare-rows", (70, 33), n, k, spare=2 * tile_m + 3),
        Case("nan-in-a-neighbour", (70, 33, 65), n, k, nan_group=1),
        Case("nan-in-the-first-rows", (70, 33), n, k, nan_group=0),
        Case("nan-weights-of-empty-groups", (70, 0, 33, 0), n, k, nan_empty_weights=True),
        Case("loud", (70, 33), n, k, loud=True),
        Case("padded-rows", (70, 33), n, k, spare=5, pad=24),
        Case("spare-rows-after-a-whole-tile", (70, tile_m), n, k, spare=1),
    ]
    # Columns and rows that a cluster cannot pair, and a last column that is narrower than half a tile.
    odd = (700, 64, 129, 0, 257)
    cases.append(Case("five-columns-of-tiles", odd, _near(5 * tile_n, unit), k, sample=400))
    cases.append(Case("narrow-column", odd, _near(3 * tile_n, unit) + max(64, unit), k, sample=400))
    cases.append(Case("narrow-column-after-a-pair", odd, _near(2 * tile_n, unit) + max(64, unit), k, sample=400))
    cases += _extents(spec, (70, 0, 33), unit)
    cases += [Case(f"margin-{margin}", (300, 0, 90), n, k, margin=margin) for margin in (0, 1, 50, MOST_MARGIN)]
    # More tiles than SMs, so that the persistent loop and its rings go round; one group passes 2048 rows.
    cases.append(Case("many-tiles", (700, 0, 4 * 1024 + 65, 129, 1000), _near(6 * tile_n, unit), 2 * step, sample=400))
    cases.append(
        Case("many-tiles-few-clusters", (513, 0, 700), _near(4 * tile_n, unit), k, margin=MOST_MARGIN, sample=400)
    )
    return cases + _scalar_cases(spec, (70, 33), n, k)


def _dense_cases(spec: KernelSpec) -> list[Case]:
    unit = multiple_of_n(spec)
    tile_n = spec.tile[1]
    step = spec.plan.tile_k
    n, k = _near(2 * tile_n, unit) + unit, step + spec.plan.vector
    cases = [Case(f"{rows}-rows", (rows,), n, k) for rows in (0, 1, 63, 64, 65, 127, 128, 129, 257)]
    cases += _extents(spec, (150,), unit)
    cases += [
        Case("loud", (150,), n, k, loud=True),
        Case("padded-rows", (150,), n, k, pad=24),
        Case("margin-50", (300,), n, k, margin=50),
        Case("margin-131", (300,), n, k, margin=MOST_MARGIN),
        Case("many-tiles", (8 * 1024 + 65,), _near(6 * tile_n, unit), 2 * step, sample=400),
    ]
    return cases + _scalar_cases(spec, (150,), n, k)


def _wgrad_cases(spec: KernelSpec) -> list[Case]:
    """The tile lies on N and K; rows are the reduction, in stages of 64, or of 128 FP8 values."""
    tile_n, tile_k = spec.tile
    least, step = spec.plan.vector, spec.plan.tile_k
    n, k = tile_n + least, tile_k + least
    ring = spec.plan.stages * step
    uneven = tuple(int(size) for size in np.random.default_rng(5).integers(0, 6, 256))
    sparse = tuple(3 if group % 31 == 7 else 0 for group in range(200))
    sizes = (70, 0, 33)
    cases = [
        Case("sizes-around-the-stage", (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193), n, k),
        Case("first-group-empty", (0, 70, 33), n, k),
        Case("first-groups-empty", (0, 0, 0, 70), n, k),
        Case("last-group-empty", (70, 33, 0), n, k),
        Case("last-groups-empty", (70, 0, 0, 0), n, k),
        Case("middle-groups-empty", (70, 0, 0, 33), n, k),
        Case("every-other-group-empty", (0, 64, 0, 1, 0, 65, 0), n, k),
        Case("all-rows-in-a-middle-group", (0, 0, 700, 0), n, k),
        Case("almost-all-rows-in-one-group", (20, 1800, 64, 0, 1, 90), n, k),
        Case("one-row-a-group", (1,) * 9, n, k),
        Case("one-row", (1,), n, k),
        Case("odd-tiles", (70, 0, 33), 3 * tile_n, 5 * tile_k),
        Case("odd-tiles-and-a-bit", (70, 0, 33), 2 * tile_n + least, 3 * tile_k + 64),
        Case("one-group", (150,), n, k),
        Case("33-groups", (140,) + (0,) * 31 + (5,), n, k),
        Case("256-groups", uneven, 2 * least, 3 * least),
        Case("200-groups-mostly-empty", sparse, 3 * least, 2 * least),
        Case("no-rows", (0, 0, 0), n, k),
        Case("no-rows-but-spare-ones", (0, 0, 0), n, k, spare=130),
        Case("spare-rows", (70, 33), n, k, spare=131),
        Case("spare-rows-after-a-whole-stage", (70, 64), n, k, spare=1),
        Case("nan-in-a-neighbour", (70, 33, 65), n, k, nan_group=1),
        Case("nan-in-the-first-rows", (70, 33, 0), n, k, nan_group=0),
        Case("nan-in-the-last-rows", (70, 1, 33), n, k, nan_group=2),
        Case("nan-in-a-single-row", (64, 1, 64), n, k, nan_group=1),
        Case("padded-rows", sizes, n, k, spare=5, pad=24),
        Case("n-on-the-tile", sizes, 2 * tile_n, k),
        Case("n-least", sizes, least, k),
        Case("n-under-the-tile", sizes, tile_n - least, k),
        Case("n-over-half-the-tile", sizes, tile_n // 2 + least, k),
        Case("n-three-tiles", sizes, 3 * tile_n, least),
        Case("k-on-the-tile", sizes, n, 2 * tile_k),
        Case("k-least", sizes, n, least),
        Case("k-under-the-tile", sizes, n, tile_k - least),
        Case("k-three-tiles", sizes, least, 3 * tile_k),
        Case("rows-fill-the-pipeline", (ring, 0, ring - 1, ring + 1), n, k),
        Case("rows-pass-the-pipeline", (2 * ring + 65, 5, 3 * ring), n, k),
    ]
    cases += [Case(f"margin-{margin}", (300, 0, 90), n, k, margin=margin) for margin in (0, 1, 50, MOST_MARGIN)]
    # More tiles than SMs, so that the persistent loop and its rings go round, over groups of very unlike size.
    cases.append(Case("many-tiles", (300, 0, 1, 1500, 64), 6 * tile_n, 6 * tile_k + least, sample=60))
    cases.append(Case("many-tiles-few-clusters", (129, 0, 65), 4 * tile_n, 4 * tile_k, margin=MOST_MARGIN, sample=60))
    return cases


def _dense_wgrad_cases(spec: KernelSpec) -> list[Case]:
    """One group; where it is split, rows on both sides of a part's end, and parts that are left without rows."""
    tile_n, tile_k = spec.tile
    unit = spec.plan.vector
    n, k = tile_n + unit, tile_k + unit
    ring = spec.plan.stages * TILE_K
    rows = {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, ring - 1, ring, ring + 1, 2 * ring + 65}
    if spec.operands["split"]:
        rows |= {511, 512, 513, 1023, 1024, 1025, 2049, 5000}
    extents = {
        "n-on-the-tile": (2 * tile_n, k),
        "n-least": (unit, k),
        "n-under-the-tile": (tile_n - unit, k),
        "n-over-half-the-tile": (tile_n // 2 + unit, k),
        "k-on-the-tile": (n, 2 * tile_k),
        "k-least": (n, unit),
        "k-under-the-tile": (n, tile_k - unit),
        "odd-tiles": (3 * tile_n, 5 * tile_k),
        "odd-tiles-and-a-bit": (2 * tile_n + unit, 3 * tile_k + 64),
    }
    cases = [Case(f"{count}-rows", (count,), n, k) for count in sorted(rows)]
    cases += [Case(name, (150,), *extent) for name, extent in extents.items()]
    cases += [Case(f"margin-{margin}", (390,), n, k, margin=margin) for margin in (0, 1, 50, MOST_MARGIN)]
    cases += [
        Case("padded-rows", (150,), n, k, pad=24),
        Case("many-tiles", (700,), 12 * tile_n, 12 * tile_k + unit, sample=60),
        Case("many-tiles-few-clusters", (300,), 4 * tile_n, 4 * tile_k, margin=MOST_MARGIN, sample=60),
    ]
    if spec.operands["split"]:
        cases += [
            Case("padded-rows-in-parts", (1500,), n, k, pad=24),
            Case("many-tiles-in-parts", (3000,), 4 * tile_n, 4 * tile_k + 8, sample=60),
            Case("parts-few-clusters", (3000,), n, k, margin=MOST_MARGIN),
            Case("parts-without-rows", (64 * 1056 + 1,), 16, 24),
        ]
    return cases


def _extents(spec: KernelSpec, sizes: tuple[int, ...], unit: int) -> list[Case]:
    """N and K on the tile, off it on both sides, below one tile, and K past the pipeline's depth."""
    tile_n = spec.tile[1]
    n = _near(tile_n, unit)
    step, least = spec.plan.tile_k, spec.plan.vector
    ring = spec.plan.stages * step
    return [
        Case("n-on-the-tile", sizes, _near(2 * tile_n, unit), 2 * step),
        Case("n-least", sizes, unit, 2 * step),
        Case("n-under-the-tile", sizes, max(n - unit, unit), 2 * step),
        Case("n-over-the-tile", sizes, n + unit, 2 * step),
        Case("k-on-the-tile", sizes, n, step),
        Case("k-least", sizes, n, least),
        Case("k-under-the-tile", sizes, n, 2 * step - least),
        Case("k-fills-the-pipeline", sizes, n + unit, ring),
        Case("k-passes-the-pipeline", sizes, n + unit, 2 * ring + step + least),
    ]


def _scalar_cases(spec: KernelSpec, sizes: tuple[int, ...], n: int, k: int) -> list[Case]:
    if not spec.activation.gated:
        return []
    alpha = {"act_alpha": 1.25} if spec.activation.kind in ("swiglu", "dswiglu") else {}
    return [
        Case("scalars-given", sizes, n, k, scalars=alpha | {"act_limit": 0.75, "act_up_offset": -0.5}),
        Case("no-limit-given", sizes, n, k, loud=True, scalars={"act_limit": math.inf}),
    ]


def _near(value: int, unit: int) -> int:
    return -(-value // unit) * unit
