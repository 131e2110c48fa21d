"""Dispatch and combine against the reference: ranks on devices of their own where there are several, else on one.

fusekit --store STORE build tests/gpu/exchange-matrix.toml          on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_exchange.py

Ranks on one device run in streams of their own. All but one of them leave room for a block more.
"""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from fusekit import PeerTimeoutError
from fusekit.reference import exchange as reference
from tests.exchange.ranks import ALL_TO_ONE, LOCAL, NONE, RANDOM, Ranks, again, download, round_trip, routing

PAIRS = {  # dispatch and combine, elements of a row
    "weighted": ("dispatch-2", "combine-2", 512),
    "gradients": ("dispatch-2-few", "combine-2-gradients", 2880),
    "sums": ("dispatch-2-few", "combine-2-sums", 512),
    "many": ("dispatch-2-many", "combine-2-many", 1544),
    "gradients alone": ("dispatch-2-few", "combine-2-alone", 264),
    "f32": ("dispatch-3-f32", "combine-3-f32", 260),
    "eight": ("dispatch-8", "combine-8", 264),
    "one rank": ("dispatch-1", "combine-1", 8),
}
LONG = 20_000  # ms


@pytest.fixture(scope="module")
def ranks_of(opened):
    """ranks_of(pair, tokens) -> a context of its `Ranks`."""
    if not opened.store.names("exchange-matrix/*"):
        pytest.skip(f"no exchange kernels in {opened}; build tests/gpu/exchange-matrix.toml there and name the store")

    @contextmanager
    def opened_ranks(pair, tokens=300, pairs=PAIRS):
        *names, hidden = pairs[pair]
        loaded = [opened.load(f"exchange-matrix/{name}") for name in names]
        count = loaded[0].spec["ranks"]
        devices = [rank % opened.devices.count for rank in range(count)]
        ranks = Ranks(opened, *(item.name for item in loaded), devices, tokens, hidden)
        try:
            yield ranks
        finally:
            ranks.wait()
            ranks.close()

    return opened_ranks


@pytest.mark.parametrize("pair", PAIRS)
def test_routings(ranks_of, pair):
    with ranks_of(pair) as ranks:
        count = len(ranks.devices)
        for seed, kind in enumerate((RANDOM, ALL_TO_ONE, NONE, LOCAL)):
            for first in (0, 1, 15, 16, 17, 300):
                tokens = [(first + 97 * rank) % 301 for rank in range(count)]
                assert round_trip(ranks, kind, tokens, seed, LONG) == [], (kind, tokens)


def test_random_sizes(ranks_of, soak):
    source = np.random.default_rng(3)
    with ranks_of("weighted") as ranks:
        for turn in range(2_000 if soak else 200):
            tokens = [int(source.integers(0, 301)) if source.random() > 0.1 else 0 for _ in ranks.devices]
            kind = [RANDOM, ALL_TO_ONE, NONE, LOCAL][int(source.choice(4, p=[0.7, 0.1, 0.1, 0.1]))]
            assert round_trip(ranks, kind, tokens, turn, LONG) == [], (turn, kind, tokens)


@pytest.mark.parametrize(("name", "hidden"), [("dispatch-2-fp8", 2880), ("dispatch-3-fp8", 512)])
def test_fp8_values_come_with_their_scales(ranks_of, name, hidden):
    """Every code and scale, bit for bit; H off a block of 128; a rank without tokens."""
    with ranks_of(name, pairs={name: (name, name, hidden)}) as ranks:
        spec, source = ranks.send[0].spec, np.random.default_rng(5)
        for seed, kind in enumerate((RANDOM, ALL_TO_ONE, NONE, LOCAL)):
            for first in (0, 1, 16, 17, 300):
                tokens = [(first + 97 * rank) % 301 for rank in range(len(ranks.devices))]
                x = [source.integers(0, 256, (count, hidden), np.uint8) for count in tokens]
                scales = [source.random((-(-hidden // 128), count), np.float32) for count in tokens]
                chosen = [routing(kind, rank, count, spec, source) for rank, count in enumerate(tokens)]
                weights = [source.random((count, spec["topk"]), np.float32) for count in tokens]
                arrays = {"x": (x, "e4m3"), "x_s": (scales, "f32"), "indices": (chosen, "i32")}
                arrays |= {"weights": (weights, "f32")} if spec["weighted"] else {}
                placed = [
                    {item: ranks.array(rank, values[rank], dtype) for item, (values, dtype) in arrays.items()}
                    for rank in range(len(tokens))
                ]
                for rank, stream in enumerate(ranks.streams):
                    common = {"rank": rank, "capacity": ranks.capacity, "timeout": LONG, "stream": stream}
                    ranks.send[rank](**placed[rank], window=ranks.sent[rank].peers, **common)
                ranks.wait()
                ranks.check()
                given = weights if spec["weighted"] else None
                wanted = reference.dispatch(spec, x, chosen, given, ranks.capacity, scales)
                for rank, right in enumerate(wanted):
                    actual, sent = ranks.received(rank), right["sent"]
                    assert np.array_equal(actual["rows"][sent], right["rows"][sent]), (seed, kind, tokens, rank)
                    assert np.array_equal(actual["scales"][:, sent], right["scales"][:, sent])
                    for entry in ("indices", "weights"):
                        assert entry not in right or np.array_equal(actual[entry], right[entry])


@pytest.mark.parametrize("pair", ["weighted", "gradients"])
def test_the_same_bits_again(ranks_of, pair):
    """Two launches of each kernel on the same data."""
    with ranks_of(pair) as ranks:
        result = [once(ranks, 7) for _ in range(2)]
    assert result[0] == result[1]


def once(ranks, seed):
    kept = []
    problems = round_trip(ranks, RANDOM, [300] * len(ranks.devices), seed, LONG, keep=kept)
    assert problems == []
    return [download(tensors["y"]).tobytes() for _, tensors in kept]


def test_the_same_bits_in_any_order(ranks_of, soak):
    """Right cases of random sizes, launched over and over: no launch hangs, none leaves anything to the next."""
    source, cases = np.random.default_rng(9), []
    with ranks_of("weighted") as ranks:
        for seed in range(40):
            tokens = [int(source.integers(0, 301)) if source.random() > 0.1 else 0 for _ in ranks.devices]
            kind = [RANDOM, ALL_TO_ONE, NONE, LOCAL][int(source.choice(4, p=[0.7, 0.1, 0.1, 0.1]))]
            kept: list = []
            assert round_trip(ranks, kind, tokens, seed, LONG, keep=kept) == []
            cases.append((kept, [tensors["y"].download() for _, tensors in kept]))
        for turn in range(10_000 if soak else 300):
            kept, right = cases[int(source.integers(len(cases)))]
            assert again(ranks, kept, LONG) == right, turn


@pytest.mark.parametrize("which", ["dispatch", "combine"])
def test_a_rank_that_never_comes(ranks_of, which):
    """The others end by themselves, within the time they were given, and say who is missing; at once afterwards."""
    with ranks_of("weighted") as ranks:
        spec = ranks.send[0].spec
        x = ranks.array(0, np.zeros((100, ranks.hidden), np.uint16), "bf16")
        chosen = ranks.array(0, routing(RANDOM, 0, 100, spec, np.random.default_rng(1)), "i32")
        given = {"capacity": ranks.capacity, "timeout": 300, "rank": 0, "stream": ranks.streams[0], "indices": chosen}
        slots = ranks.layouts[1].slots
        if which == "dispatch":
            weights = ranks.array(0, np.ones((100, 4), np.float32), "f32")
            launch = ranks.send[0].bind(
                x=x, weights=weights, window=ranks.sent[0].peers, **{k: v for k, v in given.items() if k != "stream"}
            )
        else:
            y = ranks.array(0, np.zeros((100, ranks.hidden), np.uint16), "bf16")
            launch = ranks.back[0].bind(
                x=x, inverse=ranks.array(0, np.full((slots, 4), -1, np.int32), "i32"), y=y,
                weights=ranks.array(0, np.zeros((slots, 4), np.float32), "f32"), window=ranks.returned[0].peers,
                **{k: v for k, v in given.items() if k != "stream"},
            )  # fmt: skip
        begin = time.monotonic()
        launch(ranks.streams[0])
        ranks.wait()
        assert 0.25 < time.monotonic() - begin < 3
        window = (ranks.sent if which == "dispatch" else ranks.returned)[0]
        with pytest.raises(PeerTimeoutError, match="rank 0 waited in launch 1 on this window for rank 1"):
            window.check()
        begin = time.monotonic()
        launch(ranks.streams[0])
        ranks.wait()
        assert time.monotonic() - begin < 0.25
        if which == "dispatch":
            assert (ranks.received(0)["indices"] == -1).all()
        else:
            assert np.isnan((download(y).astype(np.uint32) << 16).view(np.float32)).all()


def test_a_rank_that_is_late(ranks_of):
    """It comes within the time: nothing is wrong."""
    with ranks_of("weighted") as ranks:
        spec = ranks.send[0].spec
        launches = []
        for rank in range(2):
            x = ranks.array(rank, np.full((64, ranks.hidden), rank, np.uint16), "bf16")
            chosen = ranks.array(rank, routing(RANDOM, rank, 64, spec, np.random.default_rng(1)), "i32")
            weights = ranks.array(rank, np.ones((64, 4), np.float32), "f32")
            launches.append(ranks.send[rank].bind(
                x=x, indices=chosen, weights=weights, window=ranks.sent[rank].peers, rank=rank,
                capacity=ranks.capacity, timeout=LONG,
            ))  # fmt: skip
        launches[0](ranks.streams[0])
        late = threading.Timer(0.5, launches[1], [ranks.streams[1]])
        late.start()
        late.join()
        ranks.wait()
        ranks.check()
        assert (ranks.received(1)["rows"][:64] <= 1).all()


def test_a_graph_is_replayed_with_other_tokens(ranks_of):
    with ranks_of("weighted") as ranks:
        api, check, devices = (ranks.library.devices.driver.api, ranks.library.devices.driver.check,
                               ranks.library.devices)  # fmt: skip
        spec, source = ranks.send[0].spec, np.random.default_rng(5)
        from fusekit.reference import exchange as reference

        chosen = [routing(RANDOM, rank, 200, spec, source) for rank in range(2)]
        factors = [source.random((200, 4)).astype(np.float32) for _ in range(2)]
        arrays, graphs = [], []
        for rank in range(2):
            arrays.append(ranks.array(rank, np.zeros((200, ranks.hidden), np.uint16), "bf16"))
            launch = ranks.send[rank].bind(
                x=arrays[rank], indices=ranks.array(rank, chosen[rank], "i32"),
                weights=ranks.array(rank, factors[rank], "f32"), window=ranks.sent[rank].peers, rank=rank,
                capacity=ranks.capacity, timeout=LONG,
            )  # fmt: skip
            with devices.active(devices.get(ranks.devices[rank])):
                mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                check(api.cuStreamBeginCapture(ranks.streams[rank], mode), "cuStreamBeginCapture")
                launch(ranks.streams[rank])
                graph = check(api.cuStreamEndCapture(ranks.streams[rank]), "cuStreamEndCapture")
                graphs.append(check(api.cuGraphInstantiate(graph, 0), "cuGraphInstantiate"))
        for _ in range(20):
            fresh = [source.integers(0, 0x3F80, (200, ranks.hidden)).astype(np.uint16) for _ in range(2)]
            for rank in range(2):
                arrays[rank].upload(fresh[rank])
            for rank in range(2):
                with devices.active(devices.get(ranks.devices[rank])):
                    check(api.cuGraphLaunch(graphs[rank], ranks.streams[rank]), "cuGraphLaunch")
            ranks.wait()
            ranks.check()
            expected = reference.dispatch(spec, fresh, chosen, factors, ranks.capacity)
            for rank in range(2):
                sent = expected[rank]["sent"]
                assert np.array_equal(ranks.received(rank)["rows"][sent], expected[rank]["rows"][sent])
