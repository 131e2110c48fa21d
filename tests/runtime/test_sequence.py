"""Launches that are queued together do what each of them would do alone."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Any

import pytest

from fusekit.errors import ArgumentError, DriverError
from fusekit.runtime.launch import Launch, LaunchSequence
from tests.runtime.fake import GREEN, CUresult, Launched
from tests.runtime.samples import Torchlike, fake_for, load, record, tensors, with_workspace

GREEN_STREAM = 70
STREAMS = (0, 1, 2, 9, 11, GREEN_STREAM)


def kernels() -> tuple[list[Any], Any]:
    """A kernel, one with a workspace, and one of two launches, with their driver."""
    second = replace(record(), symbol="second")
    both = replace(with_workspace(), then=(second,))
    others = {"second": [(parameter.offset, parameter.size) for parameter in second.parameters]}
    fake = fake_for(both, greens={GREEN_STREAM: 64}, others=others)
    return [load(each, fake)[0] for each in (both, with_workspace(), both, with_workspace())], fake


def seen(fake: Any) -> list[Any]:
    """What the driver was given since, tensor maps as their fields."""

    def parameter(data: bytes) -> Any:
        if len(data) != 128:
            return data
        (number,) = struct.unpack_from("<Q", data, 64)
        modes = {**fake.encoded[number - 1]}
        return data[:64], [modes[name] for name in ("dtype", "swizzle", "interleave", "promotion", "fill")]

    def fields(launched: Launched) -> Any:
        return launched.grid, launched.stream, launched.context, list(map(parameter, launched.parameters))

    result = [fields(each) for each in fake.launches]
    fake.launches.clear()
    return result


def test_any_changes_between_the_calls_are_followed() -> None:
    rng, (loaded, fake) = random.Random(3), kernels()
    launches, others = ([kernel.bind(**tensors()) for kernel in loaded] for _ in range(2))
    sequence, queued, stream = LaunchSequence(launches), 0, 9
    for _ in range(1000):
        near, far = rng.randrange(1, 50), rng.randrange(50, 99)
        stream, number = rng.choice((stream, stream, *STREAMS)), rng.randrange(len(launches))
        match rng.randrange(6):
            case 0:  # other rows: another block, or nothing to do
                rows = rng.choice([0, 64, 64, 64, 300, 300, 300])
                x, y = Torchlike((rows, 128), address=near << 32), Torchlike((rows, 160), address=far << 32)
                for each in (launches, others):
                    each[number].update(x=x, y=y)
            case 1:
                y = Torchlike(launches[number]._arguments["y"].shape, address=far << 32)
                for each in (launches, others):
                    each[number].update(y=y)
            case 2:  # as a part of a split pass is launched
                launches[number](stream)
                alone = seen(fake)
                others[number](stream)
                assert seen(fake) == alone
            case _:
                sequence(stream)
                together = seen(fake)
                for launch in others:
                    launch(stream)
                assert together == seen(fake)
                queued += len(together)
    assert queued > 2000


@pytest.mark.parametrize("handle", [0, 1])
@pytest.mark.parametrize("context", [1000, 1001])
def test_launches_on_a_default_stream_ask_for_the_current_context_once(handle: int, context: int) -> None:
    loaded, fake = kernels()
    launches = [kernel.bind(**tensors()) for kernel in loaded]
    sequence = LaunchSequence(launches)
    sequence(handle)
    fake.calls.clear()
    fake.launches.clear()
    fake.cuCtxPushCurrent(context)
    sequence(handle)
    assert [(each.stream, each.context) for each in fake.launches] == [(handle, 1000)] * 6
    assert fake.calls.count("cuCtxGetCurrent") == (1 if context == 1000 else 7)
    assert fake.stack == [context]


def test_launches_of_one_record_are_queued_under_its_lock() -> None:
    loaded, fake = kernels()
    launches = [kernel.bind(**tensors()) for kernel in loaded]
    sequence, locks = LaunchSequence(launches), [launch.parts[0][0].loaded.together for launch in launches]
    held: list[list[bool]] = []
    fake.on_launch = lambda launched: held.append([lock.locked() for lock in locks])
    for _ in range(2):
        held.clear()
        sequence(9)
        assert held == [[at == number for at in range(4)] for number in (0, 0)] + [[False] * 4] + [
            [at == number for at in range(4)] for number in (2, 2)
        ] + [[False] * 4]
    fake.fail["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(DriverError, match="LAUNCH_FAILED"):
        sequence(9)
    assert not any(lock.locked() for lock in locks)


def test_a_kernel_that_was_unloaded_is_named() -> None:
    loaded, fake = kernels()
    sequence = LaunchSequence([kernel.bind(**tensors()) for kernel in loaded])
    sequence(9)
    loaded[0].unload()
    fake.fail["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_INVALID_HANDLE  # as the driver says of a function that is None
    with pytest.raises(ArgumentError, match="the kernel was unloaded"):
        sequence(9)


def test_a_green_context_that_is_current_is_refused_for_a_default_stream() -> None:
    loaded, fake = kernels()
    launches: list[Launch] = [kernel.bind(**tensors()) for kernel in loaded]
    sequence = LaunchSequence(launches)
    sequence(0)
    fake.launches.clear()
    fake.cuCtxPushCurrent(GREEN + GREEN_STREAM)
    fake.cuCtxGetDevice = lambda: (0, 0)
    with pytest.raises(ArgumentError, match=r"while a green context of device 0 .* is current"):
        sequence(0)
    assert not fake.launches
