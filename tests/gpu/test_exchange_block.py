"""A mixture-of-experts block whose experts are on two ranks, against the references of one GPU with all of them.

fusekit --store STORE build tests/gpu/exchange-matrix.toml tests/gpu/block.toml          on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_exchange_block.py
"""

from __future__ import annotations

import numpy as np
import pytest

from fusekit.exchange import Layout, in_process
from fusekit.reference.formats import decode
from fusekit.runtime import DeviceArray
from tests.exchange.ranks import download

from .block import EXPERTS, SPECS, TOPK, random_inputs, wanted

RANKS, HIDDEN, INTER = 2, 512, 128
LOCAL = EXPERTS // RANKS
NAMES = {
    "topk": "block/topk", "fc1": "block/fc1", "fc2": "block/fc2", "dispatch": "exchange-matrix/block-dispatch",
    "index": "exchange-matrix/block-index", "permute": "exchange-matrix/block-permute",
    "combine": "exchange-matrix/block-combine",
}  # fmt: skip


class RankedBlock:
    """The block of one rank: its tokens, and its part of the experts' weights."""

    def __init__(self, library, device, rank, inputs, layouts, windows):
        self.library, self.device, self.rank, self.windows = library, device, rank, windows
        self.kernels = {name: library.load(full, device=device) for name, full in NAMES.items()}
        self.capacity = layouts[0].capacity
        self.received = layouts[0].parts(windows[0].address, device)
        tokens, slots = len(inputs["x"]), layouts[0].slots
        rows, experts = slots * TOPK, slice(rank * LOCAL, (rank + 1) * LOCAL)
        shapes = {
            "indices": ((tokens, TOPK), "i32"), "weights": ((tokens, TOPK), "f32"), "offsets": ((LOCAL,), "i32"),
            "order": ((rows,), "i32"), "inverse": ((slots, TOPK), "i32"), "rows": ((rows, HIDDEN), "bf16"),
            "row_scale": ((rows,), "f32"), "a": ((rows, INTER), "bf16"), "b": ((rows, HIDDEN), "bf16"),
            "y": ((tokens, HIDDEN), "bf16"),
        }  # fmt: skip
        self.arrays = {
            name: DeviceArray(library.devices, shape, dtype, device) for name, (shape, dtype) in shapes.items()
        }
        given = {**inputs, "w1": inputs["w1"][experts], "w2": inputs["w2"][experts]}
        for name, value in given.items():
            dtype = "f32" if value.dtype == np.float32 else "bf16"
            self.arrays[name] = DeviceArray(library.devices, value.shape, dtype, device)
            self.arrays[name].upload(np.ascontiguousarray(value))

    def __call__(self, stream):
        k, t, got = self.kernels, self.arrays, self.received
        ours = {"rank": self.rank, "capacity": self.capacity, "timeout": 20_000, "stream": stream}
        there, back = (window.peers for window in self.windows)
        k["topk"](logits=t["logits"], indices=t["indices"], weights=t["weights"], stream=stream)
        k["dispatch"](x=t["x"], indices=t["indices"], weights=t["weights"], window=there, **ours)
        k["index"](indices=got["indices"], offsets=t["offsets"], order=t["order"], inverse=t["inverse"], stream=stream)
        k["permute"](
            x=got["rows"], inverse=t["inverse"], weights=got["weights"], y=t["rows"], row_scale=t["row_scale"],
            stream=stream,
        )  # fmt: skip
        k["fc1"](x=t["rows"], w=t["w1"], offsets=t["offsets"], y=t["a"], stream=stream)
        k["fc2"](x=t["a"], w=t["w2"], offsets=t["offsets"], row_scale=t["row_scale"], y=t["b"], stream=stream)
        k["combine"](x=t["b"], inverse=t["inverse"], indices=t["indices"], y=t["y"], window=back, **ours)


@pytest.mark.parametrize("tokens", [(77, 77), (300, 0), (1, 640)])
def test_a_block_over_two_ranks(opened, tokens):
    for stem in ("exchange-matrix", "block"):
        if not opened.store.names(f"{stem}/*"):
            pytest.skip(f"no kernels of tests/gpu/{stem}.toml in {opened}; build them there and name the store")
    assert set(SPECS) >= {"topk", "fc1", "fc2"}
    devices, driver = [rank % opened.devices.count for rank in range(RANKS)], opened.devices.driver
    loaded = [opened.load(NAMES[name]) for name in ("dispatch", "combine")]
    layouts = [Layout(kernel.spec, max(tokens), HIDDEN) for kernel in loaded]
    windows = list(zip(*(in_process(opened.devices, devices, layout.bytes) for layout in layouts), strict=True))
    whole = random_inputs(sum(tokens), HIDDEN, INTER, 3)
    inputs = [
        {**whole, "x": whole["x"][first : first + count], "logits": whole["logits"][first : first + count]}
        for first, count in zip((0, tokens[0]), tokens, strict=True)
    ]
    blocks, streams = [], []
    for rank, device in enumerate(devices):
        blocks.append(RankedBlock(opened, device, rank, inputs[rank], layouts, windows[rank]))
        with opened.devices.active(opened.devices.get(device)):
            streams.append(int(driver.check(driver.api.cuStreamCreate(1), "cuStreamCreate")))
    for _ in range(3):
        for block, stream in zip(blocks, streams, strict=True):
            block(stream)
    for device in devices:
        opened.devices.synchronize(opened.devices.get(device))
    for pair in windows:
        for window in pair:
            window.check()
    wants = wanted(whole)["y"]
    got = decode(np.concatenate([download(block.arrays["y"]) for block in blocks]), "bf16").astype(np.float64)
    assert np.linalg.norm(got - wants) / np.linalg.norm(wants) <= 6e-3
    for pair in windows:
        for window in pair:
            window.close()
