"""Which variant of a kernel to load when a name leaves it open.

A tuning table says it where one knows the problem (fusekit.runtime.tuning). Else a model of the time of each variant,
from the spec alone, is asked; the least wins. One tile of a GEMM, as a CTA works on it, costs, for each element of K,

    products = rows * tile_n * (1 + 4 / tile_n + 0.04 if cooperative + 0.01 if its cluster is (1,1))

`rows` are those of the tile's 64-row blocks that hold any row; a block that holds none costs nothing. 4 / tile_n: the
tensor cores fetch x again for every tile along N. A cooperative main loop does not hide its epilogue behind the next
tile, and a CTA alone fetches both operands whole.

    cost = products * max(1, tiles / CTAs at a time + 1/2)

The last factor counts waves: of the last one half is idle on average, since the sizes of groups are anyone's guess. A
static schedule costs 5 % more where there is more than one wave: its clusters drift apart, and neighbours no longer
find each other's operands in L2.

The host never learns the sizes of groups. The model takes them as spread evenly from half to one and a half times the
mean, which is what padding depends on: a large tile leaves much of a short group's last one empty. Columns are padded
to tile_n: 4096 columns take 22 tiles of 192, and 32 of 128. A tile of grouped-wgrad lies on a group's N x K weights,
and no group has half-empty ones.

Of 35 kernels of five models on an H200, each with 9 to 16 variants (clusters 1x1, 1x2 and 2x1, tiles from 128x128 to
256x192), the model takes one within 1 % of the fastest for 31, and is at most 3 % off. For what remains there are
tuning tables. Equal costs: the larger tile, then the larger cluster, then the name, so that the choice is the same
everywhere. Without a problem, tiles are full and their number is without end.

Variants of the router's kernels and of those that move rows differ in warps a block alone: the one nearest to 8 is
taken, to 4 for a router of 1024 experts or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusekit.runtime.tuning import Tuning
    from fusekit.store import NameRecord

SMS = 132  # of an H100 or H200 with SXM socket; the model only asks whether tiles are few
BLOCK = 64  # rows of one WGMMA
SIZES = 16  # group sizes that stand for all
REFETCH = 4.0
COOPERATIVE = 0.04
ALONE = 0.01
STATIC = 1.05


def group_sizes(rows: int, groups: int) -> list[float]:
    """Sizes that stand for those of `groups` groups of `rows` rows in all: 16, spread evenly from half to one and a
    half times the mean.
    """
    mean = rows / max(groups, 1)
    return [mean * (0.5 + (i + 0.5) / SIZES) for i in range(SIZES)]


def tile_rows(sizes: Sequence[float], tile_m: int) -> tuple[float, float]:
    """(tiles along M of an average group, rows that are worked on in an average tile)."""
    tiles, worked = 0, 0.0
    for size in sizes:
        full, rest = divmod(size, tile_m)
        tiles += int(full) + (rest > 0)
        worked += full * tile_m + BLOCK * -(-rest // BLOCK)
    return tiles / max(len(sizes), 1), worked / max(tiles, 1)


def waves(tiles: float) -> float:
    """How long `tiles` tiles take, in tiles."""
    return max(1.0, tiles / SMS + 0.5)


def cost(spec: Mapping[str, Any], problem: Mapping[str, int] | None) -> float:
    """The model's time of the GEMM variant `spec` (canonical form), in products for each element of the reduction.

    problem: E, M, N, K in elements, with E = 1 for a dense GEMM. Where it lacks one that is needed: the time of a full
    tile for each of its products.
    """
    tile_m, tile_n = map(int, spec["tile"])
    wgrad = spec["op"] == "grouped-wgrad"
    dearer = 1 + REFETCH / tile_n
    dearer += COOPERATIVE if spec.get("mainloop") == "cooperative" else 0
    dearer += ALONE if tuple(spec["cluster"]) == (1, 1) else 0
    static = STATIC if spec.get("schedule", "static") == "static" else 1.0
    if not problem or not ({"E", "N", "K"} if wgrad else {"E", "M", "N"}) <= problem.keys():
        return dearer * static
    if wgrad:
        tiles: float = problem["E"] * -(-problem["N"] // tile_m)
        rows = float(tile_m)
        across = problem["K"]
    else:
        dense = spec["op"] == "dense-gemm"
        sizes: Sequence[float] = [problem["M"]] if dense else group_sizes(problem["M"], problem["E"])
        each, rows = tile_rows(sizes, tile_m)
        tiles, across = each * (1 if dense else problem["E"]), problem["N"]
    tiles *= -(-across // tile_n)
    return rows * tile_n * dearer * waves(tiles) * (static if tiles > SMS else 1.0)


def choose(
    variants: Sequence[NameRecord], problem: Mapping[str, int] | None = None, tuning: Tuning | None = None,
    device: str | None = None,
) -> NameRecord:  # fmt: skip
    """The variant to load; `variants` are those of one kernel, at least one.

    problem: overrides what the spec's own says of E, M, N, K (tokens T and width H). tuning: measured times; asked
    first. device: the name that the driver gives the device, whose own measurements count before others'.
    """
    if len(variants) == 1:
        return variants[0]
    if tuning is not None:
        spec = variants[0].spec
        by_variant = {record.name.partition("@")[2]: record for record in variants}
        for variant in tuning.best(spec, _whole(spec, problem), device):
            if variant in by_variant:
                return by_variant[variant]
    if "warps" in variants[0].spec:
        best = 4 if variants[0].spec["op"].startswith("router-") and variants[0].spec["experts"] >= 1024 else 8
        return min(variants, key=lambda record: (abs(record.spec["warps"] - best), record.name))

    def rank(record: NameRecord) -> tuple[float, int, int, str]:
        spec = record.spec
        tile, cluster = spec["tile"], spec["cluster"]
        return cost(spec, _whole(spec, problem)), -tile[0] * tile[1], -cluster[0] * cluster[1], record.name

    return min(variants, key=rank)


def _whole(spec: Mapping[str, Any], problem: Mapping[str, int] | None) -> dict[str, int]:
    """The spec's problem with what `problem` says otherwise; rows M of a kernel that works token by token are T."""
    whole = {**(spec.get("problem") or {}), **(problem or {})}
    if "warps" in spec and "M" in whole:
        whole["T"] = whole.pop("M")
    return whole
