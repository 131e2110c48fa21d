"""The heuristic's arithmetic: what a variant costs for a problem, on a device."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.choice.gpus import GPUS, REFERENCE, gpu_of, part_of
from fusekit.choice.model import cost, group_sizes, tile_rows, waves, with_rows
from fusekit.plan.tiles import CLUSTERS
from tests.choice.samples import SMS, TILES, problems, variant


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20), st.sampled_from([64, 128, 256]))
def test_rows_of_tiles(sizes: list[int], tile_m: int) -> None:
    """Against tiles that are laid out one by one."""
    worked = []
    for size in sizes:
        for first in range(0, size, tile_m):
            worked.append(64 * math.ceil(min(size - first, tile_m) / 64))
    each, rows = tile_rows(sizes, tile_m, 64)
    assert each * len(sizes) == pytest.approx(len(worked))
    assert rows * max(len(worked), 1) == pytest.approx(sum(worked))
    assert sum(worked) >= sum(sizes)


@given(st.integers(0, 10**6), st.integers(1, 512))
def test_group_sizes_represent_all_rows(rows: int, groups: int) -> None:
    sizes = group_sizes(rows, groups)
    some = with_rows(rows, groups)
    assert sum(sizes) / len(sizes) * some == pytest.approx(rows)
    assert min(sizes) >= 0.5 * rows / some
    assert max(sizes) <= 1.5 * rows / some


def test_rows_leave_groups_empty() -> None:
    assert with_rows(1, 128) == with_rows(0, 128) == with_rows(300, 1) == 1
    assert with_rows(2, 4) == 1.75  # one time in four, both choose the same
    assert with_rows(8, 128) == pytest.approx(7.78, abs=0.01)
    assert with_rows(128 * 100, 128) == pytest.approx(128)


@given(st.floats(0, 1e6))
def test_waves(tiles: float) -> None:
    assert max(1, tiles / SMS) <= waves(tiles, SMS) <= tiles / SMS + 1


def test_a_cost_by_hand() -> None:
    # 4096 rows are 32 tiles of 128, 1024 columns 8: 256 tiles, 132 at a time.
    dense = variant((128, 128), (2, 1), op="dense-gemm").spec
    # x and w go through shared memory; all of x comes from L2, and half of the w that two CTAs share.
    tile = 128 * 128 + 5 * (128 + 128 + 128 + 64)
    assert tile == 18624
    problem = {"E": 1, "M": 4096, "N": 1024, "K": 64}
    assert cost(dense, problem) == pytest.approx(18624 * (256 / 132 + 0.5))
    assert cost(dense | {"cluster": [1, 2]}, problem) == cost(dense, problem)
    assert cost(dense | {"cluster": [1, 1]}, problem) == pytest.approx((18624 + 5 * 64) * (256 / 132 + 0.5))
    assert cost(dense | {"schedule": "static"}, problem) == pytest.approx(1.05 * cost(dense, problem))
    # 70 rows: two blocks of a tile; one wave, in which the schedule makes no difference.
    few = {"E": 1, "M": 70, "N": 1024, "K": 64}
    assert cost(dense, few) == cost(dense | {"schedule": "static"}, few) == pytest.approx(18624)
    # 130 rows: in the second tile along M, one block of the two; what is fetched stays.
    assert cost(dense, few | {"M": 130}) == pytest.approx(18624 - 64 * 128 / 2)
    # 60 rows: one block, and its bytes take longer, 2.4 ns and 512 bytes at 250 GB/s, next to reading w.
    products, read = 500 * 989 / 132, 2 * 1024 / 4800
    assert cost(dense, few | {"M": 60}) == pytest.approx(products * ((2.4 + 512 / 250) ** 2 + read**2) ** 0.5)
    # FP8 weights with bf16 tokens: 128 x 2 + 128 bytes for an element, of which w's are read.
    coded = dense | {"quant": "in=fp8-weights"}
    assert cost(coded, few | {"M": 60}) == pytest.approx(products * ((2.4 + 384 / 250) ** 2 + (read / 2) ** 2) ** 0.5)
    # Of many rows, factors are made of them in the time of 90 rows; 65 take two blocks of 64.
    for rows, tile_m in ((90, 64), (128, 128)):
        tile = rows * 128 + 5 * (tile_m + 128 + tile_m + (128 if tile_m == 64 else 64))
        high = coded | {"tile": [tile_m, 128], "cluster": [1, 1] if tile_m == 64 else [2, 1]}
        assert cost(high, few | {"M": 65}) == pytest.approx((tile**2 + (products * read / 2) ** 2) ** 0.5)
    # Of 512 such tiles, operands take longest to come: 128 x 2 bytes of x for an element, 128 + 8 of w, at 60 GB/s.
    tile, read = (128 * 128 + 5 * (128 + 128 + 128 + 64)) * (512 / 132 + 0.5), 65536 / 4800
    taken_in = (256 + 136) / 60 * 512 / 132
    assert products * taken_in > tile
    assert cost(coded, few | {"M": 65, "N": 65536}) == pytest.approx(products * (taken_in**2 + read**2) ** 0.5)
    # 1000 columns: of the 8 tiles 7.8125 are full, and the rest is zeros.
    assert cost(dense, problem | {"N": 1000}) == pytest.approx(18624 * (32 * (7.8125 + 0.1875 / 4) / 132 + 0.5))
    # Without a problem, or with half of one: full tiles without end.
    for none in (None, {}, {"E": 1, "N": 1024}):
        assert cost(dense, none) == pytest.approx(18624 / 2**14)
        assert cost(dense | {"schedule": "static"}, none) == pytest.approx(1.05 * 18624 / 2**14)


def test_the_cost_of_an_epilogue_by_hand() -> None:
    # 1,1 fetches both operands whole, twice over: 10 * (256 + 192) products of 256 * 192.
    cooperative = variant((256, 192), (1, 1)).spec
    assert cooperative["mainloop"] == "cooperative"
    fetched = 4480 / (256 * 192)
    backward = {"activation": {"kind": "dswiglu"}}
    for k, reduction in ((5760, 5760), (None, 4096), (8, 64)):
        problem = None if k is None else {"K": k}
        assert cost(cooperative, problem) == pytest.approx(1 + 90 / reduction + fetched)
        assert cost(cooperative | backward, problem) == pytest.approx(1 + 390 / reduction + fetched)
        assert cost(cooperative | {"save_preactivation": True}, problem) == pytest.approx(1 + 180 / reduction + fetched)
        for quant, epilogue in (("in=fp8-tensor", 500), ("in=fp8-weights", 90), ("in=mxfp4-weights", 90)):
            coded = cooperative | {"quant": quant}
            assert cost(coded, problem) == pytest.approx(1 + epilogue / reduction + fetched)
        for kind in ("identity", "swiglu"):
            assert cost(cooperative | {"activation": {"kind": kind}}, problem) == cost(cooperative, problem)
        assert cost(cooperative | backward | {"mainloop": "pingpong"}, problem) == pytest.approx(1 + fetched)
    # The reduction of a weight gradient is as long as a group.
    wgrad = variant((256, 192), (1, 1), op="grouped-wgrad").spec
    assert cost(wgrad, {"E": 8, "M": 16384}) == pytest.approx(1 + 90 / 2048 + fetched)
    assert cost(wgrad, {"E": 0, "M": 0}) == pytest.approx(1 + 90 / 64 + fetched)
    assert cost(wgrad, {"K": 64}) == cost(wgrad, None) == pytest.approx(1 + 90 / 4096 + fetched)


def test_a_cost_of_groups_by_hand() -> None:
    # Groups of 16 to 46 rows (a mean of 31): one tile each, and one block of it; 1000 columns are 6.25 tiles of 160.
    spec = variant((128, 160), (1, 2)).spec
    tile = 64 * 160 + 5 * (128 + 160 + 64 + 160)
    assert tile == 12800
    assert cost(spec, {"E": 8, "M": 8 * 31, "N": 1000, "K": 64}) == pytest.approx(12800)  # 56 tiles
    many = 64 * (6.25 + 0.75 / 4)
    assert cost(spec, {"E": 64, "M": 64 * 31, "N": 1000, "K": 64}) == pytest.approx(12800 * (many / 132 + 0.5))
    # A weight gradient of 384 x 1000: 3 x 6 tiles of each group, all rows of which count, however long the group is.
    wgrad = variant((128, 192), (1, 2), op="grouped-wgrad").spec
    tile = 128 * 192 + 5 * (128 + 192 + 64 + 192)
    assert tile == 27456
    many = 40 * (3 * 1000 / 192 * 0.75 + 18 * 0.25)
    for rows in (0, 40, 100_000):
        assert cost(wgrad, {"E": 3, "M": rows, "N": 384, "K": 1000}) == pytest.approx(27456)  # 54 tiles
        assert cost(wgrad, {"E": 40, "M": rows, "N": 384, "K": 1000}) == pytest.approx(27456 * (many / 132 + 0.5))
    # Rows that are split are as many groups, in whole waves: 3 x 6 tiles of each of 7 parts, or 3 x 8.
    split = variant((128, 192), (1, 2), op="dense-wgrad").spec | {"split": True}
    problem = {"E": 1, "M": 100_000, "N": 384, "K": 1000}
    assert cost(split, problem) == pytest.approx(27456)
    assert cost(split | {"tile": [128, 128]}, problem) == pytest.approx(2 * (128 * 128 + 5 * (128 + 128 + 64 + 128)))
    assert cost(split | {"split": False}, problem) == pytest.approx(27456)
    # Both of its sides are padded.
    many = 40 * (300 * 1000 / (128 * 192) * 0.75 + 18 * 0.25)
    assert cost(wgrad, {"E": 40, "M": 40, "N": 300, "K": 1000}) == pytest.approx(27456 * (many / 132 + 0.5))


@given(problems, st.sampled_from(TILES), st.sampled_from(CLUSTERS), st.sampled_from(["grouped-gemm", "dense-gemm"]))
def test_columns_are_padded_to_the_tile(problem: dict[str, int], tile: Any, cluster: Any, op: str) -> None:
    """To that of a CTA, with what costs less than a column and more than nothing."""
    spec = variant(tile, cluster, op=op).spec
    full = problem | {"N": problem["N"] // tile[1] * tile[1]}
    padded = full | {"N": full["N"] + tile[1]}
    assert cost(spec, full) <= cost(spec, problem) <= cost(spec, padded)
    if full != problem and full["N"]:
        many = {"M": problem["E"] * SMS * 256}  # more than one wave
        low, some, high = (cost(spec, item | many) for item in (full, problem, padded))
        assert low + 0.249 * (high - low) < some < high


@pytest.mark.parametrize("problem", [None, {"E": 8, "M": 65536, "N": 7168, "K": 4096}])
def test_what_a_main_loop_and_a_cluster_are_worth(problem: dict[str, int] | None) -> None:
    """Per product: ping-pong hides the epilogue, and a pair shares an operand."""
    pingpong, cooperative = (
        variant((128, 128), (1, 2), mainloop=mainloop).spec for mainloop in ("pingpong", "cooperative")
    )
    alone = variant((128, 128), (1, 1)).spec
    assert cost(cooperative, problem) / cost(pingpong, problem) == pytest.approx((18624 + 2**14 * 90 / 4096) / 18624)
    assert cost(alone, problem) / cost(pingpong, problem) == pytest.approx((18624 + 5 * 64) / 18624)


def test_a_device_is_known_by_its_name_and_a_part_of_it_has_a_share() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": (132, 989, 3350), "NVIDIA H100 PCIe": (114, 756, 2000),
        "NVIDIA H200": (132, 989, 4800), "NVIDIA H20": (78, 148, 4000),
        "NVIDIA GH200 480GB": (132, 989, 4000), "NVIDIA GH200 144G HBM3e": (132, 989, 4900),
    }  # fmt: skip
    for name, (sms, tflops, gbs) in names.items():
        row = gpu_of(name)
        assert row is not None and (row.sms, row.tflops, row.gbs) == (sms, tflops, gbs)
        assert part_of(name, sms) is row
    assert gpu_of("NVIDIA B200") is None
    slice_, other = part_of("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60), part_of("NVIDIA X", 100)
    assert (slice_.sms, other.sms) == (60, 100)
    assert slice_.sm_rate == pytest.approx(GPUS["H100"].sm_rate) and other.sm_rate == pytest.approx(REFERENCE.sm_rate)


def test_the_model_takes_the_device_as_it_is() -> None:
    tile = variant((128, 192), (2, 1)).spec
    problem = {"E": 1, "M": 128 * 12, "N": 192 * 11, "K": 4096}  # 132 tiles
    dense = tile | {"op": "dense-gemm"}
    whole, half = cost(dense, problem, GPUS["H200"]), cost(dense, problem, GPUS["H200"].part(66))
    assert cost(dense, problem) == whole
    assert half == pytest.approx(whole * waves(132, 66) / waves(132, 132))
    # On an H20 a product takes four times as long, and a fetch as long as before.
    slower = GPUS["H20"].sm_rate / REFERENCE.sm_rate
    full = {"op": "dense-gemm", "tile": [128, 192], "cluster": [1, 1], "mainloop": "pingpong", "schedule": "dynamic"}
    fetched = cost(full, None) - 1
    assert cost(full, None, GPUS["H20"]) == pytest.approx(1 + fetched * slower)
    assert 0.24 < slower < 0.27
    cooperative = full | {"mainloop": "cooperative"}
    epilogue = cost(cooperative, None) - 1 - fetched
    assert epilogue > 0
    assert cost(cooperative, None, GPUS["H20"]) == pytest.approx(1 + (fetched + epilogue) * slower)


@pytest.mark.parametrize(
    ("tokens", "weights", "lower"),
    [
        (512, "fp8", True),
        (768, "fp8", True),
        (1024, "fp8", False),
        (2048, "fp8", False),
        (256, "mxfp4", True),
        (384, "mxfp4", True),
        (512, "mxfp4", False),
        (2048, "mxfp4", False),
    ],
)
@pytest.mark.parametrize("gemm", ["fc1", "fc2"])
def test_high_tiles_of_weights_are_chosen_where_they_were_faster(gemm, tokens, weights, lower) -> None:
    """As measured on an H200 at 2048 x 768 with 8 of 128 experts, and at 2880 x 2880 with 4 of 32."""
    hidden, width, experts, topk = (2048, 768, 128, 8) if weights == "fp8" else (2880, 2880, 32, 4)
    cluster = (2, 1) if weights == "fp8" else (1, 1)
    n, k = (2 * width, hidden) if gemm == "fc1" else (hidden, width)
    problem = {"E": experts, "M": tokens * topk, "N": n, "K": k}
    quant = {"quant": f"in={weights}-weights"}
    low = variant((64, 128), (1, 1)).spec | quant | {"mainloop": "swap-ab"}
    high = variant((128, 128), cluster).spec | quant | {"mainloop": "cooperative"}
    assert (cost(low, problem) < cost(high, problem)) is lower
