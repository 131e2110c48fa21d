"""Device memory of kernels, as a library lists it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from fusekit.errors import DriverError
from fusekit.runtime.usage import MemoryUse
from tests.runtime.fake import GLOBAL
from tests.runtime.samples import CUBIN, Torchlike, library, publish, tensors
from tests.runtime.test_capture import sums
from tests.threads import at_once

NAME = "sample/fc1@128x160-c2x1"
GRANULE, SCRATCH = 1 << 21, 65536  # bytes that are allocated at least, and for each row


def rows(count: int) -> dict[str, Torchlike]:
    return {"x": Torchlike((count, 128)), "y": Torchlike((count, 160), address=0x5000_0000)}


def test_memory_is_listed_by_kernel_device_and_stream(tmp_path: Path) -> None:
    opened, fake = library(publish(tmp_path, launch_record=sums()), sums(), devices=2)
    fake.stream_contexts[9] = 1001
    assert opened.memory() == []
    kernel = opened.load(NAME)
    code, stock = len(CUBIN), 65536
    assert opened.memory() == [MemoryUse(NAME, 0, None, code, stock)]
    kernel(**(tensors() | rows(32)), stream=7)
    kernel(**(tensors() | rows(64)), stream=7)  # what was outgrown stays: graphs may use it
    kernel(**(tensors() | rows(1)))
    on_1 = {
        name: Torchlike(t.shape, t.dtype, t.address, device=1) for name, t in tensors().items() if name != "act_alpha"
    }
    kernel(**on_1, act_alpha=1.0, stream=9)
    assert opened.memory() == [
        MemoryUse(NAME, 0, None, code),
        MemoryUse(NAME, 0, 1, 0, stock, GRANULE),
        MemoryUse(NAME, 0, 7, 0, stock, GRANULE + 2 * GRANULE),
        MemoryUse(NAME, 1, None, code),
        MemoryUse(NAME, 1, 9, 0, stock, 96 * SCRATCH),
    ]
    assert sum(row.workspace + row.scratch for row in opened.memory()) == sum(
        len(buffer) - 256 for buffer in fake.memory.values()
    )
    kernel.unload()
    assert opened.memory() == []


def test_default_streams_of_threads_are_one_line(tmp_path: Path) -> None:
    opened, _ = library(publish(tmp_path, launch_record=sums()), sums())
    kernel = opened.load(NAME)
    at_once(3, lambda number: kernel(**(tensors() | rows(32)), stream=2))
    assert [(row.stream, row.workspace, row.scratch) for row in opened.memory()[1:]] == [(2, 3 * 65536, 3 * GRANULE)]


def test_a_kernel_that_nobody_unloaded_is_listed(tmp_path: Path) -> None:
    opened, fake = library(publish(tmp_path, launch_record=sums()), sums())
    for _ in range(3):
        opened.load(NAME)
        gc.collect()
    assert len(opened.memory()) == fake.loaded == 3
    for _ in range(3):
        opened.load(NAME).unload()
    assert len(opened._held) <= 4


def test_trim_unloads_kernels_whose_objects_are_gone(tmp_path: Path) -> None:
    opened, fake = library(publish(tmp_path, launch_record=sums()), sums())
    kept, gone = opened.load(NAME), opened.load(NAME)
    launch = opened.load(NAME).bind(**(tensors() | rows(32)))
    for kernel in (kept, gone):
        kernel(**(tensors() | rows(32)), stream=7)
    assert opened.trim() == 0
    before = len(fake.memory)
    fake.calls.clear()
    del kernel, gone
    gc.collect()
    assert opened.trim() == len(CUBIN) + 65536 + GRANULE
    assert fake.calls.index("cuCtxSynchronize") < fake.calls.index("cuMemFree")
    assert (fake.loaded, len(fake.memory)) == (2, before - 2)
    kept(**(tensors() | rows(32)), stream=7)
    launch()
    assert opened.trim() == 0


def test_trim_during_a_capture_unloads_nothing(tmp_path: Path) -> None:
    opened, fake = library(publish(tmp_path, launch_record=sums()), sums())
    opened.load(NAME)
    gc.collect()
    fake.cuStreamBeginCapture(7, GLOBAL)
    with pytest.raises(DriverError, match=r"trim: unloading sample/fc1@128x160-c2x1.*capture"):
        opened.trim()
    assert fake.loaded == 1
    fake.cuStreamEndCapture(7)
    assert opened.trim() > 0
    assert fake.loaded == 0
