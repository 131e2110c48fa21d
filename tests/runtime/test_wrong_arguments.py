"""What no launch can take is refused in words, before anything is queued, and leaves bound launches as they were."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusekit.errors import ArgumentError
from fusekit.runtime.streams import stream_handle
from tests.runtime.samples import Torchlike, load, tensors

X, Y = 0x1000_0000, 0x4000_0000


class Dlpack:
    """A tensor by DLPack, of this device and capsule; an exception is raised."""

    def __init__(self, device: Any, capsule: Any = None) -> None:
        self.device_, self.capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        if isinstance(self.device_, Exception):
            raise self.device_
        return self.device_

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.capsule


def interface(**changes: Any) -> Any:
    """An array [96, 160] that shows ``__cuda_array_interface__``; ... leaves a member out."""
    shown = {"typestr": "<V2", "shape": (96, 160), "data": (Y, False), "version": 3} | changes
    return SimpleNamespace(__cuda_array_interface__={name: value for name, value in shown.items() if value is not ...})


def y(**changes: Any) -> Any:
    return Torchlike(**({"shape": (96, 160), "address": Y} | changes))


def stepped(*strides: Any) -> Any:
    class Stepped(Torchlike):
        def stride(self) -> Any:
            return strides

    return Stepped((96, 160), address=Y)


WRONG = [
    *((y(address=value), "y has the address") for value in (None, -16, 2**64, 1.5, "a", 2**70)),
    *((y(shape=value, strides=(160, 1)), "y has shape") for value in (None, 5, "ab", (96, None), (96.5, 160))),
    (y(shape=(-96, 160), strides=(160, 1)), "y has -96 at dim 0"),
    (y(shape=[96, 160]), r"y has shape \[96, 160\], a list; it must be hashable"),
    *((stepped(*value), "y has shape .* and strides") for value in ((), (160,), (160.5, 1), (None, 1), ("a", 1))),
    (stepped(2**62, 1), "y has strides .*so that it reaches over [0-9]+ bytes"),
    *((y(device=value), "y is on") for value in (-2, True, None, "cpu", "cuda:0")),
    *((y(dtype=value), "y has dtype") for value in (None, 5, [], "float8")),
    *(
        (interface(**{name: value}), "y has the __cuda_array_interface__")
        for name, value in (
            ("typestr", ...), ("shape", ...), ("shape", None), ("shape", (96.5, 160)), ("data", ...), ("data", None),
            ("data", ("x", False)), ("data", ()), ("strides", (320, 2.0)), ("strides", "ab"),
        )
    ),
    (SimpleNamespace(__cuda_array_interface__=5), "y has the __cuda_array_interface__ 5"),
    (interface(strides=(320,)), "y has shape .* and strides"),
    (interface(typestr=None), "y has typestr None"),
    (interface(mask=5), "y has a mask"),
    (interface(data=(Y, True)), "y is read-only, and the kernel writes to it"),
    *((Dlpack(value), "y does not say its device") for value in (None, 5, (2,), ("a", 0), RuntimeError("gone"))),
    (Dlpack((2, 0), 5), "y refuses to be viewed through DLPack"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("way", ["call", "bind", "update", "update of several"])
def test_a_tensor_that_is_none(given: Any, text: str, way: str) -> None:
    kernel, fake = load()
    fake.owner[Y] = 0
    launch = kernel.bind(**tensors())
    launch(9)
    ways: dict[str, Callable[[], object]] = {
        "call": lambda: kernel(**tensors() | {"y": given}, stream=9),
        "bind": lambda: kernel.bind(**tensors() | {"y": given}),
        "update": lambda: launch.update(y=given),
        "update of several": lambda: launch.update(x=Torchlike((96, 128), address=0x7000_0000), y=given),
    }
    with pytest.raises(ArgumentError, match=text) as caught:
        ways[way]()
    assert caught.value.argument == "y"
    launch(9)
    assert fake.launches[0].parameters == fake.launches[1].parameters and len(fake.launches) == 2


def test_a_read_only_array_may_be_read() -> None:
    kernel, fake = load()
    fake.owner[X] = 0
    kernel(**tensors() | {"x": interface(shape=(96, 128), data=(X, True))})
    assert len(fake.launches) == 1


@pytest.mark.parametrize("value", [1e39, -1e39, 3.4028235677973366e38, -3.4028235677973366e38, 10**400, -(10**400)])
def test_a_number_that_no_f32_holds(value: Any) -> None:
    kernel, fake = load()
    with pytest.raises(ArgumentError, match=r"act_alpha is .*; it does not fit into f32, which ends at"):
        kernel(**tensors() | {"act_alpha": value})
    with pytest.raises(ArgumentError, match="does not fit into f32"):
        kernel(**tensors() | {"act_alpha": 10**5000})  # which has no decimal form
    kernel(**tensors() | {"act_alpha": 3.4028235677973362e38})
    assert len(fake.launches) == 1


@pytest.mark.parametrize(
    "value",
    [
        -1, 2**64, 1.5, np.float32(3.5), np.int64(-9), float("inf"), "s", b"1", SimpleNamespace(__cuda_stream__=5),
        SimpleNamespace(__cuda_stream__=lambda: None), SimpleNamespace(__cuda_stream__=(0,)),
        SimpleNamespace(__cuda_stream__=(0, "x")), SimpleNamespace(__cuda_stream__=(0, None)),
        SimpleNamespace(__cuda_stream__=(0, 2.5)), SimpleNamespace(cuda_stream=None), SimpleNamespace(ptr=2.5),
    ],
)  # fmt: skip
def test_a_stream_that_is_none(value: Any) -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors())
    for queue in (launch, lambda stream: kernel(**tensors(), stream=stream), stream_handle):
        with pytest.raises(ArgumentError, match="stream is ") as caught:
            queue(value)
        assert caught.value.argument == "stream"
    assert not fake.launches
    launch(9)
    assert [launched.stream for launched in fake.launches] == [9]


def test_an_array_of_settings_and_a_name_with_a_dot() -> None:
    kernel, fake = load()
    with pytest.raises(ArgumentError, match=r"cluster_margin is \[\]"):
        kernel(**tensors(), cluster_margin=[])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"priority is \[\]"):
        kernel(**tensors(), priority=[])  # type: ignore[arg-type]
    for queue in (kernel, kernel.bind, kernel.bind(**tensors()).update):
        with pytest.raises(ArgumentError, match=r"x\.0 is no argument"):
            queue(**tensors(), **{"x.0": 1})
    assert not fake.launches
