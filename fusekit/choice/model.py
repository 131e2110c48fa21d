"""A model of the time of a GEMM variant, from its spec alone: which of several is chosen where nothing was measured.

The least time wins. One tile of a GEMM, as a CTA works on it, costs, for each element of the reduction (K; of
a weight gradient a group's rows),

    rows * tile_n * (1 + epilogue / reduction) + 5 * (tile_m + tile_n + tile_m / cluster_n + tile_n / cluster_m)

- `rows` are those of the tile's blocks, as high as a matrix instruction, that hold any; one that holds none is free.
- `epilogue` is 0 with a ping-pong main loop, which hides it behind the next tile. A cooperative one hides nothing: its
  epilogue takes as long as 90 elements of the reduction, as 90 more if it also stores the pre-activation, and as 300
  more if it runs backward through an activation; as 500 with FP8 operands, whose products take half the time, unlike
  those of FP8 or MXFP4 weights with bf16 tokens.
- What is fetched costs time and, at the power limit, clock: 5 products for each element that goes through shared
  memory, and 5 for each that comes from L2, from where a cluster has the operand that its CTAs share but once.

    cost = that * max(1, tiles / CTAs at a time + 1/2)

The last factor counts waves: of the last one half is idle on average, since the sizes of groups are unknown. A
static schedule costs 5 % more where there is more than one wave: its clusters drift apart, and neighbours no longer
share operands in L2.

Few rows are bound by memory. Where no group has more of them than a swapped tile (mainloop = "swap-ab"), and for such a
tile, which costs what its operands take to come, the time is at least

    sqrt(read^2 + taken in^2) + what one tile takes in

where a dense product, of up to twice as many rows, has instead

    sqrt(read^2 + max(one tile after the other on an SM, all operands at SM_GBS)^2)

and a tile takes ELEMENT_NS and its operands at TILE_GBS, for it waits for each step of its main loop.

A tile of MXFP4 weights makes bf16 of them, whatever its height, in the time of MADE_ROWS rows; its kernel takes

    sqrt(read^2 + max(products, all taken in)^2)

and so does one of FP8 weights that has more rows than any swapped tile, where groups do. A tile takes in all of its
rows of x, however few of them exist, and so does each CTA of a cluster: that binds a high tile of few rows.

`read` is the weights of the groups that have rows, from memory; `taken in` what each SM has of the operands of its
other tiles, at SM_GBS and with TILE_ENDS. Rows that choose their groups at random leave E (1 - 1/E)^M of E groups
empty.

The host never learns the sizes of groups. The model takes them as spread evenly from half to one and a half times the
mean of those with rows, which is what padding depends on: a large tile leaves much of a short group's last one empty.
Columns are padded to tile_n: 4096 columns take 22 tiles of 192, and 32 of 128. What is padded there are zeros, which
take cycles but little power: in `tiles` they count a quarter. A tile of a weight gradient lies on a group's N x K
weights, where both sides are padded so, and no group has half-empty ones. Where a dense one is split, its parts are the
groups, and waves are counted whole: the parts are alike, and begin together.

A device's row (fusekit.choice.gpus) gives its multiprocessors and their tensor throughput. What tensor cores do not do,
fetching and epilogues, costs fewer products where they are slower, as those of H20 are. Without a device: an H200.

The model mostly errs in the shape of the cluster (docs/measured.md has by how much); tuning tables correct it. Without
a problem, tiles are full and their number is without end; where the length of the reduction is not given, it is 4096.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from fusekit.choice.gpus import REFERENCE, Gpu
from fusekit.plan.activations import is_backward
from fusekit.plan.arch import ARCHITECTURES, DEFAULT, Architecture
from fusekit.plan.operations import OPERATIONS, Operation
from fusekit.plan.quant import FP8_W, MX_SIDE, MX_W
from fusekit.plan.tiles import SWAPPED

SIZES = 16  # group sizes that represent all
FETCH = 5.0  # products, for each element that a tile fetches into shared memory, and again for each that it has from L2
EPILOGUE = 90.0  # elements of the reduction that take as long as a cooperative main loop's epilogue
FP8_EPILOGUE = 500.0  # the same with FP8 operands
SAVED = 90.0  # as many more where it stores the pre-activation, with 16-bit operands
BACKWARD = 300.0  # as many more where it takes a gradient through an activation
DEPTH = 4096  # the reduction of a problem that does not give it
PADDING = 0.25  # what a padded column costs, of one that is not
STATIC = 1.05
MX_BYTES = 1 / 2 + 1 / MX_SIDE  # of a value of MXFP4, with its share of a scale
MADE_ROWS = 90.0  # of a tile of bf16 that take as long as to make its factors of MXFP4 or FP8
SM_GBS = 60.0  # GB/s that one multiprocessor takes in while all do
ELEMENT_NS, TILE_GBS = 2.4, 250.0  # of a tile that has its SM for itself, for each element of the reduction; GB/s
TILE_ENDS = 8.0  # rows of operands that come in the time between two tiles


def with_rows(rows: int, groups: int) -> float:
    """How many of `groups` groups have any of `rows` rows, each of which chooses one at random; 1 at least."""
    return max(1.0, groups * (1 - (1 - 1 / groups) ** rows)) if groups > 1 else 1.0


def few_rows(rows: int, groups: int, ragged: bool, most: int) -> bool:
    """Whether no group has more rows than the highest swapped tile, `most`, and a dense product no more than two of
    them. ragged: groups are of any sizes.
    """
    if groups == 1 and not ragged:
        return rows <= 2 * most
    return rows * (1.5 if ragged else 1.0) <= with_rows(rows, groups) * most


def group_sizes(rows: int, groups: int) -> list[float]:
    """Sizes that represent those of `groups` groups of `rows` rows in all, where all have some: 16, spread evenly from
    half to one and a half times the mean of those that do.
    """
    mean = rows / with_rows(rows, groups)
    return [mean * (0.5 + (i + 0.5) / SIZES) for i in range(SIZES)]


def tile_rows(sizes: Sequence[float], tile_m: int, block: int) -> tuple[float, float]:
    """(tiles along M of an average group, rows that are worked on in an average tile, in blocks of `block`)."""
    tiles, worked = 0, 0.0
    for size in sizes:
        full, rest = divmod(size, tile_m)
        tiles += int(full) + (rest > 0)
        worked += full * tile_m + block * -(-rest // block)
    return tiles / max(len(sizes), 1), worked / max(tiles, 1)


@lru_cache(maxsize=256)  # variants of one problem have few heights
def _average(rows: int, groups: int | None, tile_m: int, block: int) -> tuple[float, float]:
    """`tile_rows` of rows that lie in so many groups; None: of all rows together."""
    return tile_rows([rows] if groups is None else group_sizes(rows, groups), tile_m, block)


def waves(tiles: float, sms: int) -> float:
    """How long `tiles` tiles take on so many multiprocessors, in tiles."""
    return max(1.0, tiles / sms + 0.5)


def cost(spec: Mapping[str, Any], problem: Mapping[str, int] | None, gpu: Gpu | None = None) -> float:
    """The model's time of the GEMM variant `spec` (canonical form), in products for each element of the reduction.

    problem: E, M, N, K in elements, with E = 1 for a dense GEMM. Where it lacks one that is needed: the time of a full
    tile for each of its products. gpu: None where it is not known.
    """
    problem = problem or {}
    tile_m, tile_n = map(int, spec["tile"])
    cluster_m, cluster_n = map(int, spec["cluster"])
    operation, arch = OPERATIONS[spec["op"]], architecture(spec)
    assert operation.tiles is not None
    down, across = operation.tiles
    sms, gpu = (arch.sms, REFERENCE) if gpu is None else (gpu.sms, gpu)
    slower = gpu.sm_rate / REFERENCE.sm_rate
    fetched = slower * FETCH * (tile_m + tile_n + tile_m / cluster_n + tile_n / cluster_m)
    dearer = 1 + slower * _epilogue(spec) / max(_reduction(spec, problem, operation), arch.mma_rows)
    static = STATIC if spec.get("schedule", "static") == "static" else 1.0
    if not {"E", *operation.tiles} <= problem.keys():
        return (dearer + fetched / (tile_m * tile_n)) * static
    groups = _groups(spec, problem, operation)
    busy = float(groups)  # those with rows
    if operation.reduces_rows:
        (full, padded), rows = _tiles(problem[down], tile_m), float(tile_m)
    else:
        full, rows = _average(problem[down], groups if operation.ragged else None, tile_m, arch.mma_rows)
        padded = full
        busy = with_rows(problem[down], groups)
    full_across, padded_across = _tiles(problem[across], tile_n)
    full *= full_across * busy
    padded *= padded_across * busy
    work = -(-padded // sms) if spec.get("split") else waves(PADDING * padded + (1 - PADDING) * full, sms)
    quant = str(spec.get("quant"))
    packed, alone = f"in={MX_W}" in quant, _weights_alone(quant)
    low = max(arch.tile_rows[SWAPPED])
    few = not operation.reduces_rows and few_rows(problem[down], groups, bool(operation.ragged), low)
    converts = packed or (alone and tile_m > low and not few)
    if converts:
        rows = max(rows, MADE_ROWS)
    tile = rows * tile_n * dearer + fetched
    if operation.reduces_rows:
        return tile * work * (static if padded > sms else 1.0)
    products = tile * work * (static if padded > sms else 1.0)
    of_w = MX_BYTES if packed else 1 if "in=" in quant else 2  # bytes of an element
    of_x = 2 if alone else of_w
    byte = gpu.sm_rate * 500  # products in the time of one at 1 GB/s
    read = busy * problem[across] * of_w * byte / gpu.gbs
    taken_in = (of_x * tile_m + of_w * (tile_n + TILE_ENDS)) * byte / SM_GBS  # a tile's
    if converts:
        return math.hypot(read, max(products, taken_in * padded / sms))
    swapped = spec.get("mainloop") == SWAPPED
    if not swapped and not few:
        return products
    if few and not operation.ragged:
        fetched = of_x * tile_m + of_w * tile_n
        in_turn = (ELEMENT_NS + fetched / TILE_GBS) * max(1.0, padded / sms)
        at_once = fetched * padded / (SM_GBS * sms)
        bound = byte * math.hypot(of_w * problem[across] / gpu.gbs, max(in_turn, at_once))
        return bound if swapped else max(products, bound)
    bound = math.hypot(read, taken_in * max(0.0, padded / sms - 1)) + taken_in
    return bound if swapped else max(products, bound)


def architecture(spec: Mapping[str, Any]) -> Architecture:
    """The row of the architecture that a spec is for."""
    return ARCHITECTURES.get(spec.get("arch", ""), DEFAULT)


def rank(spec: Mapping[str, Any], problem: Mapping[str, int] | None, gpu: Gpu | None = None) -> tuple[float, int, int]:
    """What orders variants, the least first: `cost`, then the larger tile, then the larger cluster."""
    tile, cluster = spec["tile"], spec["cluster"]
    return cost(spec, problem, gpu), -tile[0] * tile[1], -cluster[0] * cluster[1]


def _epilogue(spec: Mapping[str, Any]) -> float:
    """What the epilogue adds to a tile's time, in elements of the reduction."""
    if spec.get("mainloop") != "cooperative":
        return 0.0
    cost = FP8_EPILOGUE
    quant = str(spec.get("quant", "none"))
    if quant == "none" or _weights_alone(quant):
        cost = EPILOGUE + (SAVED if spec.get("save_preactivation") else 0.0)
    return cost + (BACKWARD if is_backward(spec.get("activation", {}).get("kind")) else 0.0)


def _weights_alone(quant: str) -> bool:
    """Whether weights are FP8 or MXFP4, and tokens bf16."""
    return any(f"in={weights}" in quant for weights in (FP8_W, MX_W))


def _groups(spec: Mapping[str, Any], problem: Mapping[str, int], operation: Operation) -> int:
    """Groups that have tiles of their own; parts of rows, where a weight gradient is split, are such groups."""
    if spec.get("split") and "M" in problem:
        from fusekit.plan.operands.split import parts

        return parts(problem, architecture(spec))
    return problem["E"] if operation.ragged else 1


def _reduction(spec: Mapping[str, Any], problem: Mapping[str, int], operation: Operation) -> float:
    if not {"E" if operation.reduces_rows else operation.reduction, operation.reduction} <= problem.keys():
        return DEPTH
    return problem[operation.reduction] / (max(_groups(spec, problem, operation), 1) if operation.reduces_rows else 1)


def _tiles(size: int, tile: int) -> tuple[float, float]:
    """(tiles that `size` fills, tiles that it takes)."""
    return size / tile, -(-size // tile)
