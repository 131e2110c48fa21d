"""Ranks in one process, each on a device of its own or several on one: launches of all, and what the reference says.

Used by the tests and by the script for two GPUs; needs a GPU and a store that holds the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusekit.exchange import Layout, Window, in_process
from fusekit.library import Library
from fusekit.reference import encode, held
from fusekit.reference import exchange as reference
from fusekit.reference.formats import values
from fusekit.reference.permutation import index
from fusekit.runtime import DeviceArray, Kernel

POISON = 77  # of what is written
ALL_TO_ONE, NONE, RANDOM, LOCAL = "all-to-one", "none", "random", "local"


def routing(kind: str, rank: int, tokens: int, spec: Any, source: np.random.Generator) -> np.ndarray:
    """int32 [T, K]: distinct experts of each token, some of none."""
    experts, topk, ranks = spec["experts"], spec["topk"], spec["ranks"]
    local = experts // ranks
    if kind == NONE:
        return np.full((tokens, topk), -1, np.int32)
    first, count = {ALL_TO_ONE: ((ranks - 1) * local, local), LOCAL: (rank * local, local)}.get(kind, (0, experts))
    indices = np.argsort(source.random((tokens, count)), axis=1)[:, :topk].astype(np.int32) + first
    if indices.shape[1] < topk:  # fewer experts than choices
        indices = np.pad(indices, ((0, 0), (0, topk - indices.shape[1])), constant_values=-1)
    indices[source.random(indices.shape) < 0.05] = -1
    return indices


class Ranks:
    """Windows, streams and kernels of all ranks of one process. devices: of each rank."""

    def __init__(
        self, library: Library, dispatch: str, combine: str, devices: list[int], tokens: int, hidden: int
    ) -> None:
        self.library, self.devices = library, devices
        self.send = [library.load(dispatch, device=device) for device in devices]
        self.back = [library.load(combine, device=device) for device in devices]
        self.hidden = hidden
        self.layouts = [Layout(kernel.spec, tokens, hidden) for kernel in (self.send[0], self.back[0])]
        self.capacity = self.layouts[0].capacity
        self.sent, self.returned = (in_process(library.devices, devices, layout.bytes) for layout in self.layouts)
        self.streams = [self._stream(device) for device in devices]

    def _stream(self, device: int) -> int:
        api = self.library.devices.driver.api
        with self.library.devices.active(self.library.devices.get(device)):
            return int(self.library.devices.driver.check(api.cuStreamCreate(1), "cuStreamCreate"))

    def array(self, rank: int, value: np.ndarray, dtype: str) -> DeviceArray:
        array = DeviceArray(self.library.devices, value.shape, dtype, self.devices[rank])
        array.upload(np.ascontiguousarray(value))
        return array

    def wait(self) -> None:
        """Until all streams are empty."""
        api, check = self.library.devices.driver.api, self.library.devices.driver.check
        for device, stream in zip(self.devices, self.streams, strict=True):
            with self.library.devices.active(self.library.devices.get(device)):
                check(api.cuStreamSynchronize(stream), "cuStreamSynchronize")

    def check(self) -> None:
        for window in (*self.sent, *self.returned):
            window.check()

    def received(self, rank: int) -> dict[str, np.ndarray]:
        """What lies in the dispatch window of a rank."""
        parts = self.layouts[0].parts(self.sent[rank].address, self.devices[rank])
        return {name: fetch(self.library, part) for name, part in parts.items() if name != "flags"}

    def close(self) -> None:
        for window in (*self.sent, *self.returned):
            window.close()


def fetch(library: Library, part: Any) -> np.ndarray:
    """A part of a window, on the host."""
    values = np.empty(part.shape, held(part.dtype))
    driver = library.devices.driver
    with library.devices.active(library.devices.get(part.device)):
        if values.size:
            driver.check(driver.api.cuMemcpyDtoH(values.ctypes.data, part.data_ptr(), part.nbytes), "cuMemcpyDtoH")
    return values


def download(array: DeviceArray) -> np.ndarray:
    return np.frombuffer(array.download(), held(array.dtype)).reshape(array.shape)


def round_trip(
    ranks: Ranks, kind: str, tokens: list[int], seed: int, timeout: int = 5000, keep: list | None = None
) -> list[str]:
    """One dispatch, stand-in experts, one combine; what differs from the reference, in words.

    keep: gets each rank's arguments of both launches.
    """
    source = np.random.default_rng(seed)
    spec, count = ranks.send[0].spec, len(ranks.devices)
    back = ranks.back[0].spec
    x = [encode(source.standard_normal((each, ranks.hidden)).astype(np.float32), spec["dtype"]) for each in tokens]
    chosen = [routing(kind, rank, each, spec, source) for rank, each in enumerate(tokens)]
    weights = [source.random((each, spec["topk"])).astype(np.float32) for each in tokens]
    common = {"capacity": ranks.capacity, "timeout": timeout}
    given = []
    for rank in range(count):
        tensors = {"x": ranks.array(rank, x[rank], spec["dtype"]), "indices": ranks.array(rank, chosen[rank], "i32")}
        if spec["weighted"]:
            tensors["weights"] = ranks.array(rank, weights[rank], "f32")
        given.append(tensors)
    for rank in range(count):
        ranks.send[rank](**given[rank], window=ranks.sent[rank].peers, rank=rank, stream=ranks.streams[rank], **common)
    ranks.wait()
    ranks.check()
    problems = []
    expected = reference.dispatch(spec, x, chosen, weights if spec["weighted"] else None, ranks.capacity)
    inverse, rows = [], []
    for rank in range(count):
        result, right = ranks.received(rank), expected[rank]
        for name in ("indices", "weights"):
            if name in right and not np.array_equal(result[name], right[name]):
                problems.append(f"dispatch: {name} of rank {rank} differ")
        if not np.array_equal(result["rows"][right["sent"]], right["rows"][right["sent"]]):
            problems.append(f"dispatch: rows of rank {rank} differ")
        order = index(right["indices"], spec["experts"] // count)
        inverse.append(order["inverse"])
        values = source.standard_normal((len(order["order"]), ranks.hidden)).astype(np.float32)
        rows.append(encode(values, spec["dtype"]))
    factors = [each["weights"] for each in expected] if back["weighted"] else None
    gradients = [source.standard_normal(each.shape).astype(np.float32) for each in inverse]
    addends = [
        [encode(source.standard_normal(each.shape).astype(np.float32), spec["dtype"]) for _ in range(back["addends"])]
        for each in x
    ]
    results = []
    for rank in range(count):
        tensors = {"indices": given[rank]["indices"]}
        if back["rows"]:
            tensors["x"] = ranks.array(rank, rows[rank], spec["dtype"])
            tensors["inverse"] = ranks.array(rank, inverse[rank], "i32")
            tensors["y"] = ranks.array(rank, np.full_like(x[rank], POISON), spec["dtype"])
        for number, addend in enumerate(addends[rank]):
            tensors[f"addend{number}"] = ranks.array(rank, addend, spec["dtype"])
        if factors is not None:
            tensors["weights"] = ranks.array(rank, factors[rank], "f32")
        if back["gradients"]:
            tensors["grad_weights"] = ranks.array(rank, gradients[rank], "f32")
            tensors["returned"] = ranks.array(rank, np.full(chosen[rank].shape, np.nan, np.float32), "f32")
        results.append(tensors)
    if keep is not None:
        keep += zip(given, results, strict=True)
    for rank in range(count):
        ranks.back[rank](
            **results[rank], window=ranks.returned[rank].peers, rank=rank, stream=ranks.streams[rank], **common
        )
    ranks.wait()
    ranks.check()
    sums = reference.combine(back, rows, inverse, factors, chosen, ranks.capacity, addends)
    problems += [
        f"combine: y of rank {rank}: {line}"
        for rank in range(count if back["rows"] else 0)
        for line in compare(download(results[rank]["y"]), *sums[rank], exact=factors is None)
    ]
    if back["gradients"]:
        right = reference.returned(back, gradients, chosen, ranks.capacity)
        for rank in range(count):
            if not np.array_equal(download(results[rank]["returned"]), right[rank]):
                problems.append(f"combine: returned of rank {rank} differs")
    return problems


def again(ranks: Ranks, kept: list, timeout: int = 5000) -> list[bytes]:
    """Launches both with arguments that were kept; y of each rank."""
    common = {"capacity": ranks.capacity, "timeout": timeout}
    for rank, (given, tensors) in enumerate(kept):
        tensors["y"].upload(np.full(tensors["y"].shape, POISON, np.uint16))
        each = {"rank": rank, "stream": ranks.streams[rank], **common}
        ranks.send[rank](**given, window=ranks.sent[rank].peers, **each)
        ranks.back[rank](**tensors, window=ranks.returned[rank].peers, **each)
    ranks.wait()
    ranks.check()
    return [tensors["y"].download() for _, tensors in kept]


def compare(found: np.ndarray, right: np.ndarray, magnitude: np.ndarray, *, exact: bool) -> list[str]:
    """Bits where nothing but sums of float32 in a stated order are made; else within two roundings."""
    if np.array_equal(found, right):
        return []
    if exact:
        return [f"{int((found != right).sum())} of {right.size} elements differ"]
    wanted, got = (values(each, "bf16").astype(np.float64) for each in (right, found))
    unit = 2.0**-7 if right.dtype == np.uint16 else 2.0**-20
    wrong = ~(np.abs(got - wanted) <= unit * (np.abs(wanted) + 2.0**-2 * magnitude))
    return [f"{int(wrong.sum())} elements beyond the bound"] if wrong.any() else []


__all__ = ["ALL_TO_ONE", "LOCAL", "NONE", "RANDOM", "Kernel", "Ranks", "Window", "round_trip", "routing"]
