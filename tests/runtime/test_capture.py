"""Launches that are captured into graphs: what they need of memory is there, whichever came first."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fusekit.abi import PointerParameter
from fusekit.errors import DriverError
from tests.runtime.fake import GLOBAL, OK, FakeDriver
from tests.runtime.samples import Torchlike, load, record, tensors

MODES = [GLOBAL, "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"]
SIDE, CAPTURED = 20, 30


def sums() -> Any:
    """A kernel with a workspace and with scratch, as those that sum gradients have."""
    base = record()
    more = PointerParameter("counters", "workspace", 296), PointerParameter("parts", "scratch", 304)
    return record(
        parameters=(*base.parameters, *more), workspace=65536, workspace_zeroed=True, scratch=("mul", "M", 65536)
    )


def memory(fake: FakeDriver, launch: int = -1) -> tuple[int, ...]:
    """The addresses of workspace and scratch in a launch; both are allocated."""
    got = tuple(struct.unpack("<Q", data)[0] for data in fake.launches[launch].parameters[8:10])
    assert set(got) <= set(fake.memory)
    return got


@contextmanager
def capture(fake: FakeDriver, stream: int, mode: str) -> Iterator[None]:
    fake.cuStreamBeginCapture(stream, mode)
    yield
    assert fake.cuStreamEndCapture(stream)[0] == OK


@pytest.mark.parametrize("mode", MODES)
def test_a_first_launch_may_be_one_that_is_captured(mode: str) -> None:
    kernel, fake = load(sums())
    with capture(fake, CAPTURED, mode):
        kernel(**tensors(), stream=CAPTURED)
    assert fake.capture_mode == GLOBAL
    assert all(memory(fake))


@pytest.mark.parametrize("mode", MODES)
def test_a_warm_up_in_a_side_stream_then_a_capture_in_another(mode: str) -> None:
    kernel, fake = load(sums())
    launch = kernel.bind(**tensors())
    for _ in range(3):
        launch(SIDE)
    with capture(fake, CAPTURED, mode):
        launch(CAPTURED)
        launch(CAPTURED)
    side, first, second = (memory(fake, index) for index in (0, 3, 4))
    assert first == second
    assert not set(side) & set(first)


def test_memory_of_a_graph_outlives_larger_launches_in_its_stream() -> None:
    kernel, fake = load(sums())
    with capture(fake, CAPTURED, GLOBAL):
        kernel(**tensors(), stream=CAPTURED)
    more = {"x": Torchlike((960, 128)), "y": Torchlike((960, 160), address=0x5000_0000)}
    kernel(**(tensors() | more), stream=CAPTURED)
    assert memory(fake, 0)[1] != memory(fake, 1)[1]  # and both are still allocated
    kernel.unload()
    assert not fake.memory


def test_captures_of_other_threads_are_left_in_peace() -> None:
    kernel, fake = load(sums())
    with capture(fake, CAPTURED, GLOBAL):
        thread = threading.Thread(target=lambda: kernel(**tensors(), stream=SIDE))
        thread.start()
        thread.join()
    assert len(fake.launches) == 1


@pytest.mark.parametrize("mode", MODES)
def test_loading_is_still_refused(mode: str) -> None:
    _, fake = load(sums())
    fake.cuStreamBeginCapture(CAPTURED, mode)
    with pytest.raises(DriverError, match="before the capture begins"):
        load(sums(), fake)
