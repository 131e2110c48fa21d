"""Which variant of a kernel to load when a name leaves it open.

The heuristic is a cost model of one number a variant, from the spec alone; the least wins.

    cost = padded rows * padded columns * (1 + 16 / tile_m + 16 / tile_n)

*Padded* is what the tiles compute, inside the problem or not: columns are rounded up to tile_n; so are the rows of a
dense GEMM to tile_m, while each of E groups wastes half a tile on average, since its size is anyone's guess. The last
factor is the price of operand traffic: a tile fetches (tile_m + tile_n) elements for tile_m * tile_n products, so
that a small tile is chosen only where it saves much padding. A tile of grouped-wgrad lies on a group's N x K weights:
rows are those of the weights, and no group wastes any. Equal costs: the larger tile, then the larger cluster,
then the name, so that the choice is the same everywhere. Without a problem only the last factor counts.

Variants of the router's kernels and of those that move rows differ in warps a block alone: the one nearest to 8 is
taken, to 4 for a router of 1024 experts or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusekit.store import NameRecord

_TRAFFIC = 16.0


def cost(spec: Mapping[str, Any], problem: Mapping[str, int] | None) -> float:
    """The model's cost of the variant `spec` (canonical form).

    problem: E, M, N, K in elements, with E = 1 for a dense GEMM; traffic alone counts where it lacks one.
    """
    tile_m: int = spec["tile"][0]
    tile_n: int = spec["tile"][1]
    traffic = 1 + _TRAFFIC / tile_m + _TRAFFIC / tile_n
    wgrad = spec["op"] == "grouped-wgrad"
    if not problem or not ({"N", "K"} if wgrad else {"E", "M", "N"}) <= problem.keys():
        return traffic
    down, across = ("N", "K") if wgrad else ("M", "N")
    columns = -(-problem[across] // tile_n) * tile_n
    if spec["op"] == "grouped-gemm":
        rows = problem["M"] + problem["E"] * tile_m // 2
    else:
        rows = -(-problem[down] // tile_m) * tile_m
    return rows * columns * traffic


def choose(variants: Sequence[NameRecord], problem: Mapping[str, int] | None = None) -> NameRecord:
    """The variant to load; what `problem` has overrides the specs' own. `variants` must not be empty."""
    if "warps" in variants[0].spec:
        best = 4 if variants[0].spec["op"].startswith("router-") and variants[0].spec["experts"] >= 1024 else 8
        return min(variants, key=lambda record: (abs(record.spec["warps"] - best), record.name))

    def rank(record: NameRecord) -> tuple[float, int, int, str]:
        spec = record.spec
        tile, cluster = spec["tile"], spec["cluster"]
        priced = cost(spec, {**(spec.get("problem") or {}), **(problem or {})})
        return priced, -tile[0] * tile[1], -cluster[0] * cluster[1], record.name

    return min(variants, key=rank)
