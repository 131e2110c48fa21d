"""Workspaces and scratch memory from another allocator than the driver."""

from __future__ import annotations

import pickle
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusekit.config import Config
from fusekit.errors import ArgumentError, UsageError
from fusekit.library import Library, open_library
from fusekit.runtime import Driver
from tests.runtime.fake import FakeDriver
from tests.runtime.samples import fake_for, publish, tensors
from tests.runtime.test_capture import sums

STREAM = 7


class Counted:
    """An allocator of addresses that nothing lies at."""

    def __init__(self, first: Any = 0x7000_0000) -> None:
        self.first, self.held = first, dict[int, tuple[int, int]]()

    def allocate(self, size: int, device: int) -> Any:
        address = self.first + (len(self.held) << 32)
        self.held[address] = size, device
        return address

    def free(self, address: int, device: int) -> None:
        assert self.held.pop(address)[1] == device


def opened(tmp_path: Path, allocator: Any) -> tuple[Library, FakeDriver]:
    fake = fake_for(sums())
    return Library(publish(tmp_path, launch_record=sums()), Driver(fake), allocator=allocator), fake


def addresses(fake: FakeDriver) -> list[int]:
    """Workspace and scratch of the last launch."""
    return [struct.unpack("<Q", data)[0] for data in fake.launches[-1].parameters[8:10]]


def test_kernels_get_memory_from_the_allocator_and_give_it_back(tmp_path: Path) -> None:
    allocator = Counted()
    library, fake = opened(tmp_path, allocator)
    kernel = library.load("sample/fc1")
    kernel(**tensors(), stream=STREAM)
    assert addresses(fake) == list(allocator.held)
    assert [(row.workspace, row.scratch) for row in library.memory()[1:]] == [
        tuple(size for size, _ in allocator.held.values())
    ]
    assert not fake.memory
    kernel.unload()
    assert not allocator.held


def test_pytorch_allocates_for_a_stream_that_it_does_not_use(tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[tuple[Any, ...]] = []
    counted = Counted()

    def alloc(size: int, device: int, stream: int) -> int:
        calls.append(("alloc", device, stream))
        return int(counted.allocate(size, device))

    cuda = SimpleNamespace(
        init=lambda: calls.append(("init",)),
        caching_allocator_alloc=alloc,
        caching_allocator_delete=lambda address: counted.free(address, 0),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    library, _ = opened(tmp_path, "torch")
    kernel = library.load("sample/fc1")
    kernel(**tensors(), stream=STREAM)
    (_, device, stream), (_, *again) = (call for call in calls if call[0] == "alloc")
    assert [device, stream] == again
    assert (device, stream > 4096) == (0, True)  # made by the driver
    assert calls[0] == ("init",)
    kernel.unload()
    assert not counted.held


def test_without_pytorch_its_allocator_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="allocator='torch' needs PyTorch"):
        opened(tmp_path, "torch")[0].load("sample/fc1")


@pytest.mark.parametrize("allocator", ["jax", 3, object(), Counted])
def test_what_is_no_allocator_is_refused(allocator: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="it must be 'torch', None, or an object with allocate") as caught:
        open_library(Config(store=tmp_path), allocator=allocator)
    assert caught.value.argument == "allocator"


@pytest.mark.parametrize("address", [0, 0x7000_0080, 1.5, 1 << 64])
def test_an_address_that_is_none_is_refused(address: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"Counted.allocate returned .*; it must return an address"):
        opened(tmp_path, Counted(address))[0].load("sample/fc1")


def test_a_copy_of_a_library_has_the_allocator() -> None:
    library = open_library(Config(store=Path("/nowhere")), allocator="torch")
    assert pickle.loads(pickle.dumps(library))._allocator == "torch"
