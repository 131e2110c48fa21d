"""Windows on a fake driver: of one process, between processes that are threads here, their parts, what goes wrong."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as bindings

from fusekit.abi import evaluate
from fusekit.errors import ArgumentError, DriverError, PeerTimeoutError
from fusekit.exchange import Layout, Ranks, between_processes, in_process
from fusekit.plan.exchange import HEADER, NEXT, STATUS, window_bytes
from fusekit.runtime import Devices, Driver
from tests.runtime.fake import OK, CUresult, FakeDriver

SPEC = {
    "op": "moe-dispatch",
    "ranks": 2,
    "experts": 8,
    "topk": 3,
    "dtype": "bf16",
    "weighted": True,
    "gradients": False,
}


class PeerDriver(FakeDriver):
    """With peer access, and handles that name an address."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reach: set[tuple[int, int]] = set()
        self.able, self.enabled = 1, OK
        self.opened: dict[int, int] = {}
        self.waits: list[tuple[int, int]] = []  # of streams for events
        self.CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
        self.CUipcMemHandle = bindings.CUipcMemHandle  # the real structure: its members differ between versions

    def cuMemAlloc(self, size: int) -> Any:  # noqa: N802
        status, address = super().cuMemAlloc(size)
        ctypes.memset(address, 0xA5, size)
        return status, address

    def cuMemsetD8Async(self, address: int, value: int, count: int, stream: int) -> Any:  # noqa: N802
        return self.cuMemsetD8(address, value, count)

    def cuDeviceCanAccessPeer(self, device: int, other: int) -> Any:  # noqa: N802
        return OK, self.able

    def cuCtxEnablePeerAccess(self, context: int, flags: int) -> Any:  # noqa: N802
        self.reach.add((self.stack[-1] - 1000, context - 1000))
        return (self.enabled,)

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync = FakeDriver.cuMemcpyDtoDAsync  # noqa: N815

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:  # noqa: N802
        _, stream = self.cuStreamCreate(flags)
        self.stream_contexts[stream] = self.stack[-1]
        return OK, stream

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:  # noqa: N802
        self.waits.append((stream, event))
        return (OK,)

    def cuIpcGetMemHandle(self, address: int) -> Any:  # noqa: N802
        handle = bindings.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), struct.pack("<Q", address).ljust(64, b"\1"), 64)
        return OK, handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> Any:  # noqa: N802
        (address,) = struct.unpack("<Q", ctypes.string_at(handle.getPtr(), 8))
        self.opened[address] = self.opened.get(address, 0) + 1
        return OK, address

    def cuIpcCloseMemHandle(self, address: int) -> Any:  # noqa: N802
        self.opened[address] -= 1
        return (OK,)


PeerDriver.CUresult = CUresult


@pytest.fixture
def driver():
    return PeerDriver(devices=2)


@pytest.fixture
def devices(driver):
    return Devices(Driver(driver))


def test_ranks_of_a_process_see_each_other(driver, devices):
    first, second = in_process(devices, [0, 1], 1000)
    assert first.peers == second.peers == [first.address, second.address]
    assert driver.reach == {(0, 1), (1, 0)}
    assert [driver.owner[each] for each in first.peers] == [0, 1]
    assert ctypes.string_at(first.address, 1000) == bytes(1000)
    first.close()
    second.close()
    assert not driver.memory


def test_ranks_may_share_a_device(driver, devices):
    windows = in_process(devices, [0, 0, 0], 64)
    assert len(set(windows[0].peers)) == 3
    assert not driver.reach


def test_a_device_that_is_out_of_reach(driver, devices):
    driver.able = 0
    with pytest.raises(ArgumentError, match="cannot address the memory of device 1"):
        in_process(devices, [0, 1], 64)


def test_access_that_is_refused(driver, devices):
    driver.enabled = CUresult.CUDA_ERROR_INVALID_CONTEXT
    with pytest.raises(DriverError, match="cuCtxEnablePeerAccess of device 0"):
        in_process(devices, [0, 1], 64)


@pytest.mark.parametrize(
    ("ordinals", "size", "text"), [([], 64, "0 ranks"), ([0] * 33, 64, "33 ranks"), ([0], 0, "size = 0; it must be")]
)
def test_windows_that_make_no_sense(devices, ordinals, size, text):
    with pytest.raises(ArgumentError, match=text):
        in_process(devices, ordinals, size)


def test_memory_that_is_not_to_be_had_leaves_none_behind(driver, devices):
    whole = driver.cuMemAlloc

    def once(size: int) -> Any:
        return whole(size) if not driver.memory else (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)

    driver.cuMemAlloc = once
    with pytest.raises(DriverError, match="a window of 64 bytes on device 1"):
        in_process(devices, [0, 1], 64)
    assert not driver.memory


class Gathering:
    """What mpi4py's allgather does, between threads."""

    def __init__(self, ranks: int) -> None:
        self._records: list[bytes] = [b""] * ranks
        self._barrier = threading.Barrier(ranks)

    def of(self, rank: int):
        def gather(value: bytes) -> list[bytes]:
            self._records[rank] = value
            self._barrier.wait(10)
            got = list(self._records)
            self._barrier.wait(10)
            return got

        return gather


def together(ranks: int, body):
    """`body(rank)` in a thread for each; what they gave or raised."""
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    return results


def test_ranks_of_processes_open_each_others_windows(driver, devices):
    gathering = Gathering(2)
    windows = together(2, lambda rank: between_processes(devices, rank, rank, 4096, gathering.of(rank)))
    assert windows[0].peers == windows[1].peers
    assert driver.opened == dict.fromkeys(windows[0].peers, 1)
    assert together(2, lambda rank: windows[rank].close()) == [None, None]
    assert set(driver.opened.values()) == {0}
    assert not driver.memory


def test_a_window_is_there_until_all_ranks_have_closed_it(driver, devices):
    gathering, close, freed = Gathering(2), driver.cuIpcCloseMemHandle, driver.cuMemFree
    windows = together(2, lambda rank: between_processes(devices, rank, rank, 4096, gathering.of(rank)))

    def slowly(address: int) -> Any:
        if address == windows[0].address:
            time.sleep(0.2)
        return close(address)

    def free(address: int) -> Any:
        assert driver.opened[address] == 0
        return freed(address)

    driver.cuIpcCloseMemHandle, driver.cuMemFree = slowly, free
    assert together(2, lambda rank: windows[rank].close()) == [None, None]


def test_sizes_that_differ_are_refused_by_all(driver, devices):
    gathering = Gathering(2)
    errors = together(2, lambda rank: between_processes(devices, 0, rank, 4096 + rank, gathering.of(rank)))
    assert all(isinstance(each, ArgumentError) and "[4096, 4097]" in str(each) for each in errors)
    assert not driver.memory


def test_layers_that_differ_are_refused_by_all(driver, devices):
    gathering, layers = Gathering(4), [b"one", b"two", b"one", b"three"]
    errors = together(4, lambda rank: between_processes(devices, 0, rank, 64, gathering.of(rank), layers[rank]))
    assert all(isinstance(each, ArgumentError) and "ranks 1, 3 opened other layers than rank 0" in str(each)
               for each in errors)  # fmt: skip
    assert not driver.memory


def test_a_rank_that_is_gone_is_not_waited_for(driver, devices):
    gathering = Gathering(2)
    windows = together(2, lambda rank: between_processes(devices, rank, rank, 4096, gathering.of(rank)))
    windows[0].close(alone=True)
    assert len(driver.memory) == 1


def test_a_gather_that_fails_leaves_no_memory_behind(driver, devices):
    def gone(value: bytes) -> list[bytes]:
        raise RuntimeError("a rank ended")

    with pytest.raises(RuntimeError, match="a rank ended"):
        between_processes(devices, 0, 0, 4096, gone)
    assert not driver.memory


@pytest.mark.parametrize("meetings", [0, 1])
def test_windows_that_a_rank_does_not_close_can_be_closed_alone(driver, devices, meetings):
    """meetings: of those of a close, at which the other rank still is."""
    gathering, over, left = Gathering(2), threading.Event(), iter(range(meetings))

    def gather(rank: int):
        def gathered(value: bytes) -> list[bytes]:
            if over.is_set() and next(left, None) is None:
                raise RuntimeError("a rank ended")
            return [value] * 2 if over.is_set() else gathering.of(rank)(value)

        return gathered

    def rank_of_process(rank: int) -> Ranks:
        ranks = Ranks.of_process(devices, rank, rank, gather(rank))
        for key in (("rows",), ("sums",)):
            ranks.window(key, 4096)
        return ranks

    ranks = together(2, rank_of_process)[0]
    over.set()
    with pytest.raises(RuntimeError, match="a rank ended"):
        ranks.close()
    ranks.close(alone=True)
    assert [driver.owner[address] for address in driver.memory] == [1, 1]
    assert sum(driver.opened.values()) == 2


def test_ranks_in_threads_make_their_windows_once(driver, devices):
    ranks, whole, both = Ranks.in_process(devices, [0, 1]), driver.cuMemAlloc, threading.Barrier(2)

    def slowly(size: int) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return whole(size)

    driver.cuMemAlloc = slowly
    first, second = together(2, lambda rank: ranks[rank].window(("rows",), 4096))
    assert first.peers == second.peers
    assert len(driver.memory) == 2


def test_a_window_is_made_while_launches_wait_for_other_ranks(driver, devices):
    def waits() -> Any:
        raise AssertionError("what is pending on the device may wait for a rank after this call")

    driver.cuCtxSynchronize = waits
    assert in_process(devices, [0, 0], 64)


def test_a_timeout_names_the_rank(devices):
    window, _ = in_process(devices, [0, 1], 4096)
    window.check()
    ctypes.memmove(window.address + STATUS, struct.pack("<3i", 2, 1, 7), 12)
    with pytest.raises(PeerTimeoutError, match="rank 0 waited in launch 7 on this window for rank 1 to let") as caught:
        window.check()
    assert caught.value.rank == 1
    ctypes.memmove(window.address + STATUS, struct.pack("<3i", 1, 2, 7), 12)
    with pytest.raises(PeerTimeoutError, match=r"for rank 0 to send its rows.* longer timeout$"):
        window.check()
    window, _ = in_process(devices, [0, 0], 4096)
    ctypes.memmove(window.address + STATUS, struct.pack("<3i", 2, 1, 1), 12)
    with pytest.raises(PeerTimeoutError, match=r"ranks share device 0.* a device of its own"):
        window.check()


def test_the_windows_of_a_rank_are_a_ring(devices):
    """Which a launch that gave up goes round, so that no later one waits."""
    for rank in Ranks.in_process(devices, [0, 1]):
        windows = [rank.window((name,), 4096) for name in ("sent", "sums", "grads")]
        at, seen = windows[0].address + STATUS, []
        for _ in windows:
            (at,) = struct.unpack("<Q", ctypes.string_at(at + NEXT - STATUS, 8))
            seen.append(at)
        assert sorted(seen) == sorted(each.address + STATUS for each in windows) and at == windows[0].address + STATUS
    window, _ = in_process(devices, [0, 1], 4096)
    assert ctypes.string_at(window.address + NEXT, 8) == bytes(8)


@pytest.mark.parametrize("tokens", [1, 128, 129, 8192])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weighted": False},
        {"op": "moe-combine"},
        {"op": "moe-combine", "gradients": True},
        {"op": "moe-combine", "gradients": True, "rows": False},
        {"ranks": 8, "dtype": "f32"},
        {"ranks": 3, "topk": 1},
    ],
)
def test_parts_lie_apart_and_fill_the_window(tokens, changes):
    spec = SPEC | changes
    layout = Layout(spec, tokens, 96)
    assert layout.capacity >= tokens
    assert layout.capacity % 128 == 0
    got = sorted(layout.parts(0, 0).values(), key=lambda part: part.address)
    ends = [HEADER, *(part.address + part.nbytes for part in got)]
    assert all(part.address >= end and part.address % 128 == 0 for part, end in zip(got, ends, strict=False))
    assert ends[-1] == layout.bytes == evaluate(window_bytes(spec), {"capacity": layout.capacity, "H": 96})
    names = {"moe-dispatch": {"flags", "rows", "indices"}, "moe-combine": {"flags", "rows"}}[spec["op"]]
    names -= set() if spec.get("rows", True) else {"rows"}
    with_weights = spec["weighted"] if spec["op"] == "moe-dispatch" else spec["gradients"]
    assert set(layout.parts(0, 0)) == (names | {"weights"} if with_weights else names)


def test_sizes_of_numpy_do_not_overflow(devices):
    large = Layout(SPEC, np.int32(1 << 20), np.int32(7168))
    assert large.bytes == Layout(SPEC, 1 << 20, 7168).bytes > 2**31
    (window,) = in_process(devices, [np.int64(0)], np.int16(1 << 14))
    assert type(window.size) is int
    window = between_processes(devices, 0, 0, np.int64(4096), lambda record: [record])
    assert window.size == 4096


def test_a_layout_of_nothing():
    with pytest.raises(ArgumentError, match="tokens = 0; it must be a whole number, 1 or more"):
        Layout(SPEC, 0, 96)
