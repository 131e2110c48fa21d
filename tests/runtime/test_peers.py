"""Launches with the windows of ranks: addresses or tensors of any device, as many as the kernel has ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusekit.errors import ArgumentError
from tests.abi.test_schema_3 import whole
from tests.runtime.samples import Torchlike, load, tensors

ADDRESSES = [0x5000_0000, 0x6000_0000]
NEEDED = 256 * 128  # capacity times K


@pytest.fixture
def loaded():
    launch_record = whole()
    kernel, fake = load(replace(launch_record, symbol="kernel"))
    return kernel, fake


def usual(**changes):
    return {**tensors(), "window": ADDRESSES, "capacity": 256, **changes}


def windows_of(launched):
    return [int.from_bytes(data, "little") for data in launched.parameters[-3:]]


@pytest.mark.parametrize(
    "window",
    [
        ADDRESSES,
        tuple(ADDRESSES),
        [Torchlike((NEEDED,), "torch.uint8", ADDRESSES[0]), ADDRESSES[1]],
        # A peer's window is on a device of its own.
        [Torchlike((NEEDED // 2,), "torch.bfloat16", each, device=rank) for rank, each in enumerate(ADDRESSES)],
    ],
)
def test_each_window_goes_to_its_pointer(loaded, window):
    kernel, fake = loaded
    kernel(**usual(window=window), stream=77)
    assert windows_of(fake.launches[0]) == [ADDRESSES[0], ADDRESSES[1] + 64, 256]


def test_a_bound_launch_takes_other_windows(loaded):
    kernel, fake = loaded
    launch = kernel.bind(**usual())
    launch(77)
    launch.update(window=[0x7000_0000, 0x8000_0000])(77)
    launch.update(y=Torchlike((96, 160), address=0x9000_0000))(77)
    assert [windows_of(each)[0] for each in fake.launches] == [ADDRESSES[0], 0x7000_0000, 0x7000_0000]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"window": ADDRESSES[:1]}, "window has 1 windows; .* is for 2 ranks; give the window of each"),
        ({"window": [*ADDRESSES, 4096]}, "window has 3 windows"),
        ({"window": ADDRESSES[0]}, "window is a int"),
        ({"window": "ab"}, "window is a str"),
        ({"window": [ADDRESSES[0], None]}, "window.1 is a NoneType"),
        ({"window": [ADDRESSES[0], -1]}, "window.1 is -1; it must be an address"),
        ({"window": [ADDRESSES[0], 0]}, "window.1 has a null address"),
        ({"window": [ADDRESSES[0], 4096 + 64]}, "window.1 begins at 0x1040, 64 bytes after a multiple of 128"),
        ({"window": [ADDRESSES[0], Torchlike((NEEDED - 1,), "torch.uint8", 4096)]},
         f"window.1 has {NEEDED - 1} bytes; it must have at least {NEEDED}"),
        ({"window": [ADDRESSES[0], Torchlike((4, NEEDED), "torch.uint8", 4096, (2 * NEEDED, 1))]}, "contiguous"),
        ({"capacity": 100}, "capacity is 100; it must be a multiple of 128 from 128 to 1048576"),
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": 2**31}, "capacity is 2147483648"),
    ],
)  # fmt: skip
def test_a_wrong_window_is_said_in_words(loaded, changes, text):
    kernel, fake = loaded
    with pytest.raises(ArgumentError, match=text):
        kernel(**usual(**changes))
    assert not fake.launches


def test_missing_windows_are_named(loaded):
    kernel, _ = loaded
    given = usual()
    del given["window"]
    with pytest.raises(ArgumentError, match=r"window is missing; .* needs the windows of 2 ranks"):
        kernel(**given)


def test_a_size_is_that_of_the_launch(loaded):
    """The same shapes again, with more capacity: the window is then too small."""
    kernel, fake = loaded
    window = [Torchlike((NEEDED,), "torch.uint8", each) for each in ADDRESSES]
    kernel(**usual(window=window), stream=77)
    with pytest.raises(ArgumentError, match=r"window\.0 has"):
        kernel(**usual(window=window, capacity=384), stream=77)
    assert len(fake.launches) == 1
