"""Which stream a launch goes to: the one that is given, else the current one of the framework whose tensors are."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
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


CURRENT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
KEPT: list[Any] = []  # tables live as long as the process


def exchange(current: Callable[[int, int], int | None], major: int = 1, previous: int = 0) -> int:
    """The address of a DLPackExchangeAPI. current: from device type and ordinal to a stream, None or an error."""

    def current_work_stream(kind: int, ordinal: int, out: Any) -> int:
        out[0] = current(kind, ordinal)
        return 0

    function = CURRENT(current_work_stream)
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    version = major | 3 << 32
    table = (ctypes.c_uint64 * 7)(version, previous, 1, 1, 1, 1, address)  # what is 1 is not called
    KEPT.extend([function, table])
    return ctypes.addressof(table)


def capsule(address: int, name: bytes = b"dlpack_exchange_api") -> Any:
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    KEPT.append(name)
    return new(("PyCapsule_New", ctypes.pythonapi))(address, name, None)


def exchanging(table: Any, kind: int = 2) -> type[Torchlike]:
    """A framework's tensor type with an exchange API."""

    class Tensor(Torchlike):
        __dlpack_c_exchange_api__ = table
        __module__ = "lattice.arrays"

        def __dlpack_device__(self) -> tuple[int, int]:
            return kind, int(self.device)

    return Tensor


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


def test_a_framework_with_an_exchange_api_has_a_current_stream(frameworks: Frameworks) -> None:
    asked, streams = [], {0: 91}

    def current(kind: int, ordinal: int) -> int | None:
        asked.append((kind, ordinal))
        return streams[ordinal]

    kernel, fake = load()
    arguments = given(exchanging(capsule(exchange(current))), Torchlike)
    launch = kernel.bind(**arguments)
    for stream in (91, 92, 0):
        streams[0] = stream
        kernel(**arguments)
        launch()
    assert queued(fake) == [91, 91, 92, 92, 0, 0]
    assert asked == [(2, 0)] * 6
    streams[0] = None  # type: ignore[assignment]
    launch()
    kernel(**arguments, stream=7)
    assert queued(fake)[6:] == [0, 7]
    assert len(asked) == 7


def test_an_older_table_is_found_behind_a_newer_one(frameworks: Frameworks) -> None:
    kernel, fake = load()
    old = exchange(lambda kind, ordinal: 93)
    kernel(**given(exchanging(capsule(exchange(lambda kind, ordinal: 94, major=2, previous=old)))))
    assert queued(fake) == [93]


def test_memory_of_the_host_decides_nothing(frameworks: Frameworks) -> None:
    kernel, fake = load()
    kernel(**given(exchanging(capsule(exchange(lambda kind, ordinal: 95)), kind=1)))
    assert queued(fake) == [0]


def test_a_framework_next_to_another_needs_a_stream(frameworks: Frameworks) -> None:
    kernel, fake = load()
    mixed = given(exchanging(capsule(exchange(lambda kind, ordinal: 96))), TorchTensor)
    with pytest.raises(
        ArgumentError, match=r"tensors of lattice and of PyTorch.*stream=torch\.cuda\.current_stream\(\)"
    ):
        kernel(**mixed)
    kernel(**mixed, stream=5)
    assert queued(fake) == [5]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (5, "a capsule|PyCapsule"),
        (capsule(exchange(lambda kind, ordinal: 97), b"other"), "incorrect name"),
        (capsule(exchange(lambda kind, ordinal: 97, major=2)), r"version 2\.3; fusekit reads version 1"),
    ],
)
def test_a_table_that_cannot_be_read_is_no_legacy_stream(frameworks: Frameworks, table: Any, reason: str) -> None:
    kernel, fake = load()
    arguments = given(exchanging(table))
    with pytest.raises(
        ArgumentError, match=rf"lattice does not give its current stream .*({reason}).*; give the stream"
    ):
        kernel(**arguments)
    kernel(**arguments, stream="legacy")
    assert queued(fake) == [0]


def test_pytorchs_own_table() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"PyTorch {torch.__version__} has no exchange API")
    from fusekit.runtime.work_stream import _function, current_of

    assert current_of(torch.zeros(4)) is None  # on the CPU
    stream = ctypes.c_void_p(5)
    assert _function(torch.Tensor)(1, 0, ctypes.byref(stream)) == 0
    assert stream.value is None
