"""Which variant a name without one means: the heuristic's arithmetic, and what was measured."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.runtime import tuning
from fusekit.runtime.select import SMS, choose, cost, group_sizes, tile_rows, waves
from fusekit.spec import find
from fusekit.spec.budget import CLUSTERS, default_mainloop, refusals
from fusekit.store import NameRecord

TILES = [(64, 128), (64, 256), (128, 64), (128, 128), (128, 160), (128, 192), (128, 256), (256, 128), (256, 192)]
LARGE = [tile for tile in TILES if tile[0] >= 128 and tile != (128, 64)]
MODELS = {  # case: E, H, I, M
    "gpt-oss-20b": (32, 2880, 2880, 98304),
    "deepseek-v3": (8, 7168, 2048, 65536),
    "qwen3-30b-a3b": (128, 2048, 768, 196608),
    "mixtral-8x7b": (8, 4096, 14336, 16384),
    "gpt-oss-120b": (128, 2880, 2880, 98304),
}
# N and K of each kernel of a model, from H and I.
KERNELS: dict[str, Any] = {
    "fc1": (lambda h, i: (2 * i, h), {}),
    "fc2": (lambda h, i: (h, i), {}),
    "fc2-dgrad": (lambda h, i: (i, h), {"b_major": "n"}),
    "fc1-dgrad": (lambda h, i: (h, 2 * i), {"b_major": "n"}),
    "fc1-wgrad": (lambda h, i: (2 * i, h), {"op": "grouped-wgrad", "b_major": "n"}),
    "fc2-wgrad": (lambda h, i: (h, i), {"op": "grouped-wgrad", "b_major": "n"}),
}
# tile N of the tiles of 128 rows that were within 1.5 % of the fastest of all on an H200, uneven groups.
FASTEST = {
    "gpt-oss-20b": {kernel: {192} for kernel in KERNELS} | {"fc1": {160, 192}, "fc2": {160, 192}},
    "gpt-oss-120b": {kernel: {192} for kernel in KERNELS} | {"fc1": {160, 192}, "fc2": {160, 192}},
    "deepseek-v3": {
        "fc1": {128}, "fc2": {128, 160, 192}, "fc2-dgrad": {128, 192}, "fc1-dgrad": {128, 192}, "fc1-wgrad": {128},
        "fc2-wgrad": {128},
    },
    "qwen3-30b-a3b": {
        "fc1": {128, 192}, "fc2": {128, 160, 192}, "fc2-dgrad": {192}, "fc1-dgrad": {128}, "fc1-wgrad": {128},
        "fc2-wgrad": {128, 192},
    },
    "mixtral-8x7b": {
        "fc1": {128, 160, 192}, "fc2": {128, 256}, "fc2-dgrad": {192}, "fc1-dgrad": {128, 256}, "fc1-wgrad": {128},
        "fc2-wgrad": {128, 192},
    },
}  # fmt: skip


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
        if not refusals(tile, cluster, default_mainloop(tile), b_major=b_major)
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
built = st.lists(
    st.builds(
        variant,
        st.sampled_from(TILES),
        st.sampled_from(CLUSTERS),
        st.sampled_from(["static", "dynamic"]),
        op=st.sampled_from(["grouped-gemm", "dense-gemm", "grouped-wgrad"]),
    ),
    min_size=1,
    max_size=12,
)


@given(built, st.none() | problems, st.randoms(use_true_random=False))
def test_one_of_the_built_variants_whatever_their_order(
    records: list[NameRecord], problem: dict[str, int] | None, shuffler: random.Random
) -> None:
    found = choose(records, problem)
    assert found in records
    shuffled = list(records)
    shuffler.shuffle(shuffled)
    assert choose(shuffled, problem).name == found.name
    price = cost(found.spec, problem)
    assert math.isfinite(price)
    assert price == min(cost(record.spec, problem) for record in records)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20), st.sampled_from([64, 128, 256]))
def test_rows_of_tiles(sizes: list[int], tile_m: int) -> None:
    """Against tiles that are laid out one by one."""
    worked = []
    for size in sizes:
        for first in range(0, size, tile_m):
            worked.append(64 * math.ceil(min(size - first, tile_m) / 64))
    each, rows = tile_rows(sizes, tile_m)
    assert each * len(sizes) == pytest.approx(len(worked))
    assert rows * max(len(worked), 1) == pytest.approx(sum(worked))
    assert sum(worked) >= sum(sizes)


@given(st.integers(0, 10**6), st.integers(1, 512))
def test_group_sizes_stand_for_all_rows(rows: int, groups: int) -> None:
    sizes = group_sizes(rows, groups)
    assert sum(sizes) / len(sizes) * groups == pytest.approx(rows)
    assert min(sizes) >= 0.5 * rows / groups
    assert max(sizes) <= 1.5 * rows / groups


@given(st.floats(0, 1e6))
def test_waves(tiles: float) -> None:
    assert max(1, tiles / SMS) <= waves(tiles) <= tiles / SMS + 1


def test_a_cost_by_hand() -> None:
    # 4096 rows are 32 tiles of 128, 1024 columns 8: 256 tiles, 132 at a time.
    dense = variant((128, 128), (2, 1), op="dense-gemm").spec
    tile = 128 * 128 * (1 + 4 / 128)
    assert tile == 16896
    problem = {"E": 1, "M": 4096, "N": 1024, "K": 64}
    assert cost(dense, problem) == pytest.approx(16896 * (256 / 132 + 0.5))
    assert cost(dense | {"cluster": [1, 2]}, problem) == cost(dense, problem)
    assert cost(dense | {"cluster": [1, 1]}, problem) == pytest.approx((16896 + 163.84) * (256 / 132 + 0.5))
    assert cost(dense | {"schedule": "static"}, problem) == pytest.approx(1.05 * cost(dense, problem))
    # 70 rows: two blocks of a tile; one wave, in which the schedule makes no difference.
    few = {"E": 1, "M": 70, "N": 1024, "K": 64}
    assert cost(dense, few) == cost(dense | {"schedule": "static"}, few) == pytest.approx(16896)
    # 60 rows: one block of the two.
    assert cost(dense, few | {"M": 60}) == pytest.approx(16896 / 2)
    # Without a problem, or with half of one: full tiles without end, each product of which costs the same.
    for none in (None, {}, {"E": 1, "N": 1024}):
        assert cost(dense, none) == 1.03125
        assert cost(dense | {"schedule": "static"}, none) == pytest.approx(1.05 * 1.03125)
    cooperative = variant((256, 192), (1, 1)).spec
    assert cooperative["mainloop"] == "cooperative"
    assert cost(cooperative, None) == pytest.approx(1 + 4 / 192 + 0.04 + 0.01)


def test_a_cost_of_groups_by_hand() -> None:
    # Groups of 16 to 46 rows (a mean of 31): one tile each, and one block of it; 7 columns of 160.
    spec = variant((128, 160), (1, 2)).spec
    assert 64 * 160 * (1 + 4 / 160) == 10496
    assert cost(spec, {"E": 8, "M": 8 * 31, "N": 1000, "K": 64}) == pytest.approx(10496)  # 56 tiles
    assert cost(spec, {"E": 64, "M": 64 * 31, "N": 1000, "K": 64}) == pytest.approx(10496 * (448 / 132 + 0.5))
    # A weight gradient of 300 x 1000: 3 x 6 tiles of each group, all rows of which count, however long the group is.
    wgrad = variant((128, 192), (1, 2), op="grouped-wgrad").spec
    assert 128 * 192 * (1 + 4 / 192) == 25088
    for rows in (0, 40, 100_000):
        assert cost(wgrad, {"E": 3, "M": rows, "N": 300, "K": 1000}) == pytest.approx(25088)  # 54 tiles
        assert cost(wgrad, {"E": 40, "M": rows, "N": 300, "K": 1000}) == pytest.approx(25088 * (720 / 132 + 0.5))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_fastest(model: str, kernel: str) -> None:
    """Of all tiles and clusters, whether packaged or not."""
    groups, hidden, inter, rows = MODELS[model]
    sizes, more = KERNELS[kernel]
    n, k = sizes(hidden, inter)
    (tile_m, tile_n), cluster = taken(choose(variants(**more), {"E": groups, "M": rows, "N": n, "K": k}))
    assert tile_m == 128
    assert tile_n in FASTEST[model][kernel]
    assert cluster == (1, 2)


def test_the_model_is_near_what_was_measured() -> None:
    """Against the packaged table: of the variants that were timed, the model takes one that is hardly slower."""
    behind = []
    packaged = find()
    for row in tuning.packaged("sm_90a").rows:
        times = {variant: us for variant, us in row.variants if us is not None}
        records = {}
        for spec in packaged:
            data = json.loads(json.dumps(spec.canonical()))
            if spec.variant in times and (tuning.features(data), data["problem"]) == (row.features, row.problem):
                records[spec.variant] = NameRecord(spec.full_name, spec.arch, "0" * 64, data, {})
        if times:
            assert records.keys() == times.keys()
            found = choose(list(records.values()))
            behind.append(times[found.name.partition("@")[2]] / min(times.values()) - 1)
    assert len(behind) > 20
    assert max(behind) < 0.03
    assert sum(each < 0.01 for each in behind) >= 0.9 * len(behind)


@given(problems, st.sampled_from(TILES), st.sampled_from(CLUSTERS))
def test_dynamic_is_never_behind_static(problem: dict[str, int], tile: Any, cluster: Any) -> None:
    static, dynamic = (variant(tile, cluster, schedule) for schedule in ("static", "dynamic"))
    assert choose([static, dynamic], problem) is dynamic


@given(problems, st.sampled_from(TILES), st.sampled_from(CLUSTERS), st.sampled_from(["grouped-gemm", "dense-gemm"]))
def test_columns_are_padded_to_the_tile(problem: dict[str, int], tile: Any, cluster: Any, op: str) -> None:
    """To that of a CTA: a cluster along N pads no more than one along M."""
    spec = variant(tile, cluster, op=op).spec
    padded = problem | {"N": -(-problem["N"] // tile[1]) * tile[1]}
    assert cost(spec, problem) == cost(spec, padded) <= cost(spec, padded | {"N": padded["N"] + 8})
    if cluster != (1, 1):
        assert cost(spec, problem) == cost(spec | {"cluster": [*cluster[::-1]]}, problem)


@pytest.mark.parametrize(
    ("n", "tile_n"),
    [
        (2880, 192),  # 15 tiles and nothing left, as 18 of 160; 128 pads by 64, 256 by 192
        (4096, 128),  # 160 pads by 64 and 192 by 128; 256 does not, but is too large for ping-pong
        (14336, 192),  # pads by 64, which costs less than to fetch x more often
        (768, 192),
        (800, 160),
    ],
)
def test_fewer_padded_columns(n: int, tile_n: int) -> None:
    found = choose(variants([(1, 2)]), {"E": 32, "M": 98304, "N": n, "K": 4096})
    assert taken(found) == ((128, tile_n), (1, 2))


def test_short_groups() -> None:
    """Few rows a group: blocks without rows cost nothing, so that 128 rows are as good as 64; 256 are cooperative."""
    problem = {"E": 128, "M": 128 * 40, "N": 5760, "K": 2880}
    low, high, tall = (variant((tile_m, 128), (1, 2)).spec for tile_m in (64, 128, 256))
    assert cost(low, problem) == cost(high, problem) < cost(tall, problem)
    # 100 rows a group, 50 to 150.
    longer = problem | {"M": 128 * 100}
    assert cost(high, longer) < cost(tall, longer)
    assert taken(choose(variants(tiles=TILES), longer))[0][0] <= 128


def test_few_tiles() -> None:
    """Where all fit at once, the one that is done first; where they are without end, the one that fetches least."""
    small, large = variant((64, 128), (1, 2), op="dense-gemm"), variant((128, 192), (1, 2), op="dense-gemm")
    assert choose([small, large], {"E": 1, "M": 256, "N": 1024, "K": 4096}) is small
    assert choose([small, large], {"E": 1, "M": 65536, "N": 6144, "K": 4096}) is large
    assert choose([small, large]) is large


@pytest.mark.parametrize("problem", [None, {"E": 8, "M": 65536, "N": 7168, "K": 4096}])
def test_what_a_main_loop_and_a_cluster_are_worth(problem: dict[str, int] | None) -> None:
    """Per product: ping-pong hides the epilogue, and a pair shares an operand."""
    pingpong, cooperative = (
        variant((128, 128), (1, 2), mainloop=mainloop).spec for mainloop in ("pingpong", "cooperative")
    )
    alone = variant((128, 128), (1, 1)).spec
    assert cost(cooperative, problem) / cost(pingpong, problem) == pytest.approx((1.03125 + 0.04) / 1.03125)
    assert cost(alone, problem) / cost(pingpong, problem) == pytest.approx((1.03125 + 0.01) / 1.03125)


def test_equal_costs() -> None:
    """The larger tile, the larger cluster, the name."""
    first, second = variant((128, 128), (1, 1), mainloop="a"), variant((128, 128), (1, 1), mainloop="b")
    assert choose([second, first]) is first
    across, along = variant((128, 192), (1, 2)), variant((128, 192), (2, 1))
    assert choose([along, across]) is across
    low, high = variant((64, 256), (1, 2)), variant((128, 256), (1, 2), mainloop="pingpong")
    assert cost(low.spec, None) == cost(high.spec, None)
    assert choose([low, high]) is high
    # The sizes of a problem that a variant's spec names, and those that a caller names instead.
    problem = {"E": 1, "M": 256, "N": 1024, "K": 4096}
    small, large = (variant(tile, (1, 2), op="dense-gemm", problem=problem) for tile in ((64, 128), (128, 192)))
    assert choose([small, large]) is small
    assert choose([small, large], {"M": 65536, "N": 6144}) is large


@pytest.mark.parametrize(
    ("op", "experts", "warps"), [("router-topk", 128, 8), ("router-topk", 2304, 4), ("moe-permute", 0, 8)]
)
def test_warps(op: str, experts: int, warps: int) -> None:
    records = [
        NameRecord(f"f/k@w{n}", "sm_90a", "0" * 64, {"op": op, "experts": experts, "warps": n}, {}) for n in (1, 4, 8)
    ]
    assert choose(records).spec["warps"] == warps
