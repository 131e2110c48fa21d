"""Variants that might have been built, and problems for them."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st

from fusekit.plan.arch import DEFAULT
from fusekit.plan.tiles import CLUSTERS, default_mainloop, refusals
from fusekit.store import NameRecord
from tests.plans import gemm_plan

TILES = [(64, 128), (64, 256), (128, 64), (128, 128), (128, 160), (128, 192), (128, 256), (256, 128), (256, 192)]
LARGE = [tile for tile in TILES if tile[0] >= 128 and tile != (128, 64)]
SMS = DEFAULT.sms


def variant(tile: tuple[int, int], cluster: tuple[int, int], schedule: str = "dynamic", **more: Any) -> NameRecord:
    mainloop = more.pop("mainloop", default_mainloop(tile))
    spec = {
        "op": "grouped-gemm", "tile": list(tile), "cluster": list(cluster), "schedule": schedule, "mainloop": mainloop,
    } | more  # fmt: skip
    name = f"f/k@{tile[0]}x{tile[1]}-c{cluster[0]}x{cluster[1]}-{schedule}-{mainloop}"
    return NameRecord(name, "sm_90a", "0" * 64, spec, {})


def variants(clusters: Any = CLUSTERS, tiles: Any = LARGE, **more: Any) -> list[NameRecord]:
    b_major = more.get("b_major", "k")
    return [
        variant(tile, cluster, **more)
        for tile, cluster in itertools.product(tiles, clusters)
        if not refusals(gemm_plan(tile=tile, cluster=cluster, b_major=b_major), default_mainloop(tile))
    ]


def taken(found: NameRecord) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(found.spec["tile"]), tuple(found.spec["cluster"])


problems = st.fixed_dictionaries(
    {
        "E": st.integers(1, 300),
        "M": st.integers(0, 300_000),
        "N": st.integers(1, 4000).map(lambda n: 8 * n),
        "K": st.integers(1, 4000).map(lambda k: 8 * k),
    }
)
