"""Products of few rows in the order that epilogues expect: every thread's part, by the layout of wgmma's D fragment."""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from fusekit.kernels.gemm.sm90 import swapped
from tests.kernels.plain import plain
from tests.plans import gemm_plan

THREADS, WARP, BANKS = 128, 32, 32


@pytest.mark.parametrize("tile", [(16, 64), (32, 192)])
@pytest.mark.parametrize("consumer", [0, 1])
def test_a_warpgroup_turns_its_products(tile, consumer):
    plan = gemm_plan(tile=tile)
    tile_m, tile_n = tile
    (region,) = [region for region in plan.shared.regions if region.name == "exchange"]
    memory = np.full(region.bytes // 4, np.nan)
    products = np.arange(tile_m * tile_n, dtype=float).reshape(tile_n, tile_m)
    thread, stores, lines = SimpleNamespace(number=0), {}, []

    def store(address, value):
        assert np.isnan(memory[address // 4]) or memory[address // 4] == value
        memory[address // 4] = value
        lines.append((thread.number // WARP, len(stores.setdefault(thread.number, [])), address // 4 % BANKS))
        stores[thread.number].append(address)

    def load(address):
        assert address % 8 == 0
        return memory[address // 4], memory[address // 4 + 1]

    barriers = []
    module = plain(
        swapped,
        ptx=SimpleNamespace(store_shared_f32=store, load_shared_f32x2=load),
        cute=SimpleNamespace(
            make_tensor=lambda values, layout: values, make_layout=lambda size: size, size=lambda tensor: None,
            arch=SimpleNamespace(
                make_warp_uniform=int, warp_idx=lambda: 4 * (1 + consumer) + thread.number // WARP,
                barrier=lambda barrier_id, number_of_threads: barriers.append((barrier_id, number_of_threads)),
            ),
        ),
    )  # fmt: skip
    own = SimpleNamespace(plan=plan)
    own.put, own.take, own.turn = (
        partial(getattr(module.SwappedLoop, name), own) for name in ("put", "take", "turn")
    )  # fmt: skip
    shared = SimpleNamespace(toint=lambda: 0)

    def turned(number):
        thread.number = number
        warp, lane = number // WARP, number % WARP
        flat = np.zeros(tile_m * tile_n // THREADS)
        for index in range(len(flat)):
            block, (chunk, (r, c)) = index // (tile_m // 2), (index % (tile_m // 2) // 4, divmod(index % 4, 2))
            row = block * 64 + warp * 16 + lane // 4 + 8 * r
            flat[index] = products[row, chunk * 8 + lane % 4 * 2 + c]
        most = np.full(64 * tile_n // THREADS, np.nan)
        accumulators = SimpleNamespace(iterator=flat)
        module.SwappedLoop.exchange(own, accumulators, most, shared, consumer, lane, tile_m)
        return most

    for number in range(THREADS):  # all have written before the first reads
        turned(number)
    for number in range(THREADS):
        warp, lane = number // WARP, number % WARP
        if warp >= tile_m // 16:
            continue  # whose rows are no part of the tile
        expected = [
            products[chunk * 8 + lane % 4 * 2 + c, warp * 16 + lane // 4 + 8 * r]
            for chunk in range(tile_n // 8) for r in range(2) for c in range(2)
        ]  # fmt: skip
        assert turned(number).tolist() == expected
    assert set(barriers) == {(plan.named_barrier("columns") + consumer, THREADS)}
    low, high = consumer * region.bytes // 8, (consumer + 1) * region.bytes // 8
    used = np.flatnonzero(~np.isnan(memory))
    assert low <= used.min() and used.max() < high  # the other warpgroup's part is its own
    by_instruction: dict[tuple[int, int], list[int]] = {}
    for warp, index, bank in lines[: tile_m * tile_n]:
        by_instruction.setdefault((warp, index), []).append(bank)
    assert all(len(set(banks)) == WARP for banks in by_instruction.values())


@pytest.mark.parametrize("height", [128, 96, 64])
def test_two_warpgroups_turn_a_tile_half_of_its_rows_at_a_time(height):
    plan = gemm_plan(tile=(128, 128), mainloop="cooperative", quant="in=fp8-weights")
    (region,) = [region for region in plan.shared.regions if region.name == "exchange"]
    memory = np.full(region.bytes // 4, np.nan)
    products = np.random.default_rng(0).permutation(128 * 128).reshape(128, 128).astype(float)  # w's rows, x's rows
    meeting, me, got = threading.Barrier(2 * THREADS), threading.local(), {}

    def barrier(barrier_id, number_of_threads):
        assert (barrier_id, number_of_threads) == (plan.named_barrier("turns"), 2 * THREADS)
        meeting.wait(timeout=60)

    module = plain(
        swapped,
        ptx=SimpleNamespace(
            store_shared_f32=lambda address, value: memory.__setitem__(address // 4, value),
            load_shared_f32x2=lambda address: (memory[address // 4], memory[address // 4 + 1]),
        ),
        cute=SimpleNamespace(
            make_tensor=lambda values, layout: values, make_layout=lambda size: size, size=lambda tensor: None,
            arch=SimpleNamespace(
                make_warp_uniform=int, warp_idx=lambda: 4 + me.number // WARP, barrier=barrier,
            ),
        ),
    )  # fmt: skip
    own = SimpleNamespace(plan=plan)
    own.put, own.take, own.turn = (
        partial(getattr(module.SwappedLoop, name), own) for name in ("put", "take", "turn")
    )  # fmt: skip

    def run(number):
        me.number = number
        consumer, warp, lane = number // THREADS, number // WARP % 4, number % WARP
        flat = np.full(height // 2, np.nan)
        for index in range(len(flat)):
            chunk, (r, c) = index // 4, divmod(index % 4, 2)
            row = consumer * 64 + warp * 16 + lane // 4 + 8 * r
            flat[index] = products[row, chunk * 8 + lane % 4 * 2 + c]
        most = np.full(64, np.nan)
        shared = SimpleNamespace(toint=lambda: 0)
        module.SwappedLoop.exchange(own, SimpleNamespace(iterator=flat), most, shared, consumer, lane, height)
        got[number] = most

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2 * THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2 * THREADS):
        consumer, warp, lane = number // THREADS, number // WARP % 4, number % WARP
        if consumer * 64 + warp * 16 >= height:
            continue  # rows that were not multiplied
        expected = [
            products[chunk * 8 + lane % 4 * 2 + c, consumer * 64 + warp * 16 + lane // 4 + 8 * r]
            for chunk in range(16) for r in range(2) for c in range(2)
        ]  # fmt: skip
        assert got[number].tolist() == expected
