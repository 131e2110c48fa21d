"""Which stream a launch goes to: the one that is given, else the current one of the framework whose tensors are."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fusekit.errors import ArgumentError
from fusekit.runtime.streams import stream_handle
from tests.runtime.samples import Torchlike, load, tensors


class TorchTensor(Torchlike):
    """A tensor of the module that replaces PyTorch here."""


class Parameter(TorchTensor):
    """A subclass, in another module than its base."""


class CupyArray(Torchlike):
    """An array of the module that replaces CuPy."""


class Frameworks:
    """Modules with a current stream for each device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch, self.cupy = {0: 71, 1: 72}, {0: 81, 1: 82}
        streams = {"current_stream": lambda device: SimpleNamespace(cuda_stream=self.torch[device.index])}
        torch = SimpleNamespace(Tensor=TorchTensor, cuda=SimpleNamespace(**streams))
        arrays = {"get_current_stream": lambda device: SimpleNamespace(ptr=self.cupy[device])}
        cupy = SimpleNamespace(ndarray=CupyArray, cuda=SimpleNamespace(**arrays))
        monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch) -> Frameworks:
    return Frameworks(monkeypatch)


class Ordinal(int):
    """A device's number, as a launch takes it, with what frameworks say of it."""

    type = "cuda"
    index = property(int)
    id = property(int)


def given(*kinds: type[Torchlike]) -> dict[str, Any]:
    """The arguments of a kernel as tensors of these kinds, in turn."""
    named = tensors()
    places = [name for name, value in named.items() if isinstance(value, Torchlike)]
    for number, name in enumerate(places):
        kind, plain = kinds[number % len(kinds)], named[name]
        named[name] = kind(plain.shape, plain.dtype, plain.address, plain.strides, Ordinal(0))
    return named


def queued(fake: Any) -> list[int]:
    return [launched.stream for launched in fake.launches]


@pytest.mark.parametrize(
    ("kinds", "stream"),
    [((TorchTensor,), 71), ((Parameter, TorchTensor), 71), ((CupyArray,), 81), ((Torchlike,), 0),
     ((Torchlike, TorchTensor), 71)],
)  # fmt: skip
def test_a_launch_is_in_the_current_stream_of_its_tensors(frameworks: Frameworks, kinds: Any, stream: int) -> None:
    kernel, fake = load()
    arguments = given(*kinds)
    kernel(**arguments)
    launch = kernel.bind(**arguments)
    launch()
    assert queued(fake) == [stream] * 2


def test_a_stream_that_is_given_counts(frameworks: Frameworks) -> None:
    kernel, fake = load()
    for stream in (9, "legacy", SimpleNamespace(cuda_stream=7)):
        kernel(**given(TorchTensor), stream=stream)
        kernel.bind(**given(TorchTensor))(stream)
    assert queued(fake) == [9, 9, 0, 0, 7, 7]


def test_a_bound_launch_follows_the_current_stream_and_other_tensors(frameworks: Frameworks) -> None:
    kernel, fake = load()
    launch = kernel.bind(**given(TorchTensor))
    launch()
    frameworks.torch[0] = 75
    launch()
    launch.update(**{name: value for name, value in given(Torchlike).items() if name != "act_alpha"})()
    assert queued(fake) == [71, 75, 0]


def test_tensors_of_two_frameworks_need_a_stream(frameworks: Frameworks) -> None:
    kernel, fake = load()
    mixed = given(TorchTensor, CupyArray)
    launch = kernel.bind(**mixed)
    for queue in (lambda: kernel(**mixed), launch):
        with pytest.raises(
            ArgumentError, match=r"PyTorch and of CuPy.*stream=torch\.cuda\.current_stream\(\)"
        ) as caught:
            queue()
        assert caught.value.argument == "stream"
    assert not fake.launches
    kernel(**mixed, stream="legacy")
    launch(5)
    assert queued(fake) == [0, 5]


def test_a_framework_that_is_not_imported_has_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    kernel, fake = load()
    kernel(**given(TorchTensor))
    assert queued(fake) == [0]
    assert not {"torch", "cupy"} & sys.modules.keys()


def test_names_of_streams() -> None:
    assert stream_handle("legacy") == stream_handle(None) == 0
    with pytest.raises(ArgumentError, match="must be None, 'legacy', an integer handle"):
        stream_handle("default")
