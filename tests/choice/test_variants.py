"""Which variant a name without one means, and whether it is what was measured as fast."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.choice import tuning
from fusekit.choice.gpus import gpu_of
from fusekit.choice.model import cost
from fusekit.choice.variants import choose
from fusekit.errors import ArgumentError, UsageError
from fusekit.plan.tiles import CLUSTERS, default_mainloop
from fusekit.spec import find
from fusekit.store import NameRecord
from tests.choice.samples import LARGE, TILES, problems, taken, variant, variants

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
    "fc2-dgrad": (lambda h, i: (i, h), {"b_major": "n", "activation": {"kind": "dswiglu"}}),
    "fc1-dgrad": (lambda h, i: (h, 2 * i), {"b_major": "n"}),
    "fc1-wgrad": (lambda h, i: (2 * i, h), {"op": "grouped-wgrad", "b_major": "n"}),
    "fc2-wgrad": (lambda h, i: (h, i), {"op": "grouped-wgrad", "b_major": "n"}),
}
# Tiles that were, in the better of clusters 1x2 and 2x1, within 2.5 % of the fastest of all on an H200: each timed
# alone, at the clock that its power leaves, uneven groups.
FASTEST: dict[str, dict[str, set[tuple[int, int]]]] = {
    "gpt-oss-20b": {
        "fc1": {(128, 128), (128, 160), (128, 192), (256, 128), (256, 192)},
        "fc2": {(128, 160), (128, 192), (256, 192)},
        "fc2-dgrad": {(128, 192)},
        "fc1-dgrad": {(256, 192)},
        "fc1-wgrad": {(128, 192), (256, 192)},
        "fc2-wgrad": {(128, 192)},
    },
    "gpt-oss-120b": {
        "fc1": {(128, 128), (128, 160), (128, 192)},
        "fc2": {(128, 192)},
        "fc2-dgrad": {(128, 192)},
        "fc1-dgrad": {(128, 128), (128, 192), (256, 192)},
        "fc1-wgrad": {(128, 192)},
        "fc2-wgrad": {(128, 192)},
    },
    "deepseek-v3": {
        "fc1": {(128, 128), (128, 160), (256, 192)},
        "fc2": {(128, 128), (128, 160), (128, 192), (128, 256), (256, 128), (256, 192)},
        "fc2-dgrad": {(128, 128), (128, 192), (128, 256)},
        "fc1-dgrad": {(128, 192), (128, 256), (256, 192)},
        "fc1-wgrad": {(256, 192)},
        "fc2-wgrad": {(256, 192)},
    },
    "qwen3-30b-a3b": {
        "fc1": {(128, 128), (128, 192)},
        "fc2": {(128, 128), (128, 160), (128, 192)},
        "fc2-dgrad": {(128, 192)},
        "fc1-dgrad": {(128, 128), (128, 192), (256, 128)},
        "fc1-wgrad": {(128, 192), (128, 256), (256, 128)},
        "fc2-wgrad": {(128, 128), (128, 192)},
    },
    "mixtral-8x7b": {
        "fc1": {(128, 128), (128, 192), (256, 128), (256, 192)},
        "fc2": {(128, 256), (256, 128), (256, 192)},
        "fc2-dgrad": {(128, 192)},
        "fc1-dgrad": {(128, 256), (256, 192)},  # (128, 256): 3.4 %
        "fc1-wgrad": {(128, 128), (128, 192), (128, 256), (256, 192)},
        "fc2-wgrad": {(128, 128), (128, 192), (256, 192)},
    },
}


built = st.sampled_from(["grouped-gemm", "dense-gemm", "grouped-wgrad"]).flatmap(
    lambda op: st.lists(
        st.builds(
            variant,
            st.sampled_from(TILES),
            st.sampled_from(CLUSTERS),
            st.sampled_from(["static", "dynamic"]),
            op=st.just(op),
        ),
        min_size=1,
        max_size=12,
    )
)


@given(built, st.none() | problems, st.randoms(use_true_random=False))
def test_one_of_the_built_variants_whatever_their_order(
    records: list[NameRecord], problem: dict[str, int] | None, shuffler: random.Random
) -> None:
    result = choose(records, problem)
    assert result in records
    shuffled = list(records)
    shuffler.shuffle(shuffled)
    assert choose(shuffled, problem).name == result.name
    price = cost(result.spec, problem)
    assert math.isfinite(price)
    assert price == min(cost(record.spec, problem) for record in records)


def test_several_kernels_are_not_variants_of_one() -> None:
    one, *rest = variants()
    others = [dataclasses.replace(item, name=item.name.replace("f/k", "f/other")) for item in rest]
    for result in ([one, *others], [*others, one]):
        with pytest.raises(UsageError, match="f/k, f/other are kernels of their own"):
            choose(result)


# Microseconds of tiles for few tokens and of usual ones, as check of the model: H200, 2026-11-28, static schedule,
# cluster (1,1), a CUDA graph of 8 routings; (gather, E, N, K, rows of a token) -> tokens -> by tile.
FEW_TILES = ((16, 64), (16, 128), (32, 128), (64, 128), (128, 192))
FEW_ROWS = {
    ("none", 128, 2048, 768, 8): {
        1: (10.0, 10.0, 10.1, 10.9, 14.0), 4: (25.4, 25.0, 25.0, 28.2, 33.5), 16: (62.5, 61.6, 61.6, 65.1, 75.7),
        64: (95.0, 94.3, 94.2, 94.9, 101.3), 256: (109.8, 107.8, 100.1, 100.3, 102.3),
    },
    ("none", 32, 2880, 2880, 4): {
        1: (20.5, 20.1, 21.6, 25.5, 32.8), 4: (53.6, 53.8, 55.9, 64.0, 76.9), 16: (106.3, 107.7, 108.4, 118.3, 144.2),
        64: (122.9, 124.1, 124.1, 126.7, 138.8), 256: (195.7, 192.6, 146.5, 129.9, 132.0),
    },
    ("x", 128, 1536, 2048, 8): {
        1: (16.6, 16.3, 16.1, 16.0, 17.5), 4: (45.4, 45.1, 45.2, 45.2, 45.6), 16: (118.3, 117.7, 118.5, 118.6, 121.0),
        64: (182.6, 178.0, 179.0, 179.1, 179.5), 256: (223.2, 207.9, 186.5, 186.7, 186.9),
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", FEW_ROWS, ids=str)
def test_few_rows_take_what_was_measured_as_fast(shape: tuple[Any, ...]) -> None:
    gather, groups, n, k, topk = shape
    candidates = [variant(tile, (1, 1), "static", gather=gather) for tile in FEW_TILES]
    for tokens, times in FEW_ROWS[shape].items():
        chosen, _ = taken(choose(candidates, {"E": groups, "M": tokens * topk, "N": n, "K": k}))
        assert times[FEW_TILES.index(chosen)] <= 1.04 * min(times), (tokens, chosen)
    chosen, _ = taken(choose(candidates, {"E": groups, "M": 8192 * topk, "N": n, "K": k}))
    assert chosen == (128, 192)


# The same of dense products, each launch alone, with cluster (1, 2) above 32 rows of a tile: (N, K) -> rows -> by tile.
DENSE_TILES = ((16, 64), (16, 128), (32, 128), (64, 128), (128, 128))
DENSE_ROWS = {
    (4096, 4096): {
        1: (18.9, 20.3, 22.2, 23.7, 26.8), 16: (18.8, 20.2, 22.2, 23.7, 26.8), 32: (21.3, 22.7, 22.3, 24.0, 27.1),
        64: (26.1, 27.4, 24.2, 24.1, 27.2),
    },
    (4096, 14336): {
        1: (43.1, 46.4, 52.0, 55.7, 67.3), 16: (43.4, 46.5, 52.2, 56.2, 67.8), 32: (48.6, 50.5, 52.5, 56.3, 67.9),
        64: (69.7, 68.3, 54.2, 56.5, 67.9),
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", DENSE_ROWS, ids=str)
def test_dense_products_of_few_rows_take_what_was_measured_as_fast(shape: tuple[int, int]) -> None:
    candidates = [variant(tile, (1, 2) if tile[0] > 32 else (1, 1), "dynamic", op="dense-gemm") for tile in DENSE_TILES]
    for rows, times in DENSE_ROWS[shape].items():
        chosen, _ = taken(choose(candidates, {"E": 1, "M": rows, "N": shape[0], "K": shape[1]}))
        assert times[DENSE_TILES.index(chosen)] <= 1.02 * min(times), (rows, chosen)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_fastest(model: str, kernel: str) -> None:
    """The fastest of all tiles and clusters, packaged or not."""
    groups, hidden, inter, rows = MODELS[model]
    sizes, more = KERNELS[kernel]
    n, k = sizes(hidden, inter)
    tile, cluster = taken(choose(variants(**more), {"E": groups, "M": rows, "N": n, "K": k}))
    assert tile in FASTEST[model][kernel]
    assert cluster != (1, 1)


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
            result = choose(list(records.values()))
            behind.append(times[result.name.partition("@")[2]] / min(times.values()) - 1)
    assert len(behind) > 20
    assert max(behind) < 0.04
    assert sum(item < 0.02 for item in behind) >= 0.85 * len(behind)


@given(problems, st.sampled_from(TILES), st.sampled_from(CLUSTERS))
def test_dynamic_is_never_slower_than_static(problem: dict[str, int], tile: Any, cluster: Any) -> None:
    static, dynamic = (variant(tile, cluster, schedule) for schedule in ("static", "dynamic"))
    assert choose([static, dynamic], problem) is dynamic


@pytest.mark.parametrize(
    ("n", "tile_n"),
    [
        (2880, 192),  # 15 tiles and nothing left, as 18 of 160; 128 pads by 64, 256 by 192
        (4096, 192),  # pads by 128, 160 by 64, and 128 by nothing, which fetches x more often
        (14336, 192),
        (768, 192),
        (800, 160),
    ],
)
def test_fewer_padded_columns(n: int, tile_n: int) -> None:
    pingpong = [tile for tile in LARGE if default_mainloop(tile) == "pingpong"]
    result = choose(variants([(1, 2)], pingpong), {"E": 32, "M": 98304, "N": n, "K": 4096})
    assert taken(result) == ((128, tile_n), (1, 2))


def test_a_long_reduction_makes_up_for_an_epilogue() -> None:
    """The large cooperative tile fetches least of all."""
    problem = {"E": 8, "M": 65536, "N": 4608, "K": 16384}
    pingpong, cooperative = variant((128, 192), (1, 2)), variant((256, 192), (1, 2))
    assert choose([pingpong, cooperative], problem) is cooperative
    assert choose([pingpong, cooperative], problem | {"K": 1024}) is pingpong
    backward: dict[str, Any] = {"activation": {"kind": "dswiglu"}}
    pingpong, cooperative = (variant(tile, (1, 2), **backward) for tile in ((128, 192), (256, 192)))
    assert choose([pingpong, cooperative], problem | {"K": 4096}) is pingpong


@pytest.mark.parametrize(("tile", "cluster"), [((128, 192), (2, 1)), ((128, 256), (2, 1)), ((256, 128), (1, 2))])
def test_a_cluster_shares_the_longer_side(tile: Any, cluster: Any) -> None:
    problem = {"E": 8, "M": 65536, "N": 6144, "K": 4096}
    assert taken(choose(variants(tiles=[tile]), problem)) == (tile, cluster)
    assert taken(choose(variants(tiles=[tile]))) == (tile, cluster)


def test_short_groups() -> None:
    """Few rows a group: blocks without rows cost nothing but what is fetched for them; 256 are cooperative."""
    problem = {"E": 128, "M": 128 * 40, "N": 5760, "K": 2880}
    low, high, tall = (variant((tile_m, 128), (1, 2)).spec for tile_m in (64, 128, 256))
    assert 0.9 * cost(high, problem) < cost(low, problem) < cost(high, problem) < cost(tall, problem)
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


def test_equal_costs() -> None:
    """The larger tile, the larger cluster, the name."""
    first, second = variant((128, 128), (1, 1), mainloop="a"), variant((128, 128), (1, 1), mainloop="b")
    assert choose([second, first]) is first
    across, along = variant((128, 128), (1, 2)), variant((128, 128), (2, 1))
    assert choose([along, across]) is across
    wide, tall = variant((128, 256), (2, 1)), variant((256, 128), (1, 2))
    assert cost(wide.spec, None) == cost(tall.spec, None)
    assert choose([tall, wide]) is wide
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


@pytest.mark.parametrize(
    ("spec", "problem", "text"),
    [
        ({"op": "extern"}, {"S": -5}, "problem has S = -5; it must be a whole number"),  # its dims are its own
        ({"op": "of-another-package"}, {"S": "5"}, "problem has S = '5'; it must be a whole number"),
        ({"op": "router-topk"}, {"K": 5}, "problem has 'K'; the extents of f/k are T, H, M; leave it out"),
        ({"op": "router-topk"}, {"T": 5, "M": 6}, "T = 5 and M = 6; both are the tokens of f/k; give one of them"),
        ({"op": "quantise"}, {"N": 5}, "the extents of f/k are E, M, K, T"),
    ],
)
def test_a_problem_of_another_operation(spec: dict[str, Any], problem: dict[str, int], text: str) -> None:
    record = NameRecord("f/k@v", "sm_90a", "0" * 64, spec, {})
    with pytest.raises(ArgumentError, match=text):
        choose([record], problem)
    assert choose([record], {}) is choose([record]) is record


def test_another_device_may_get_another_variant() -> None:
    records = variants(tiles=TILES)
    problems = [{"E": 8, "M": rows, "N": 4096, "K": k} for rows in (256, 1024, 4096, 16384) for k in (512, 4096)]
    for name, same in (("NVIDIA H200", {True}), ("NVIDIA GH200 480GB", {True}), ("NVIDIA H20", {False})):
        chosen = [choose(records, problem, gpu=gpu_of(name)) for problem in problems]
        assert {choose(records, problem) is record for problem, record in zip(problems, chosen, strict=True)} == same
