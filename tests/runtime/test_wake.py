"""The driver's head start: what it asks of libcuda, and that it is quiet about everything that is wrong."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from fusekit.runtime import wake


class FakeCuda:
    """libcuda with a status for each function; `context` of a process that uses CUDA already is another matter."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = {"cuCtxGetCurrent": 3} | statuses
        self.calls: list[str] = []
        self.ordinals: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def called(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuDeviceGet":
                self.ordinals.append(arguments[1])
            return self.statuses.get(name, 0)

        return called


def woken(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, ordinal: int | None = None) -> list[str]:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    waking = wake.Waking(ordinal)
    waking.wait()
    return cuda.calls


def test_it_initialises_and_holds_a_context_until_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    assert woken(monkeypatch, cuda, 2) == [
        "cuCtxGetCurrent", "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2",
    ]  # fmt: skip
    assert cuda.ordinals == [2]


@pytest.mark.parametrize(
    ("statuses", "last"),
    [
        ({"cuCtxGetCurrent": 0}, "cuCtxGetCurrent"),  # CUDA is in use: leave it alone
        ({"cuInit": 100}, "cuInit"),
        ({"cuDeviceGet": 101}, "cuDeviceGet"),
        ({"cuDevicePrimaryCtxRetain": 2}, "cuDevicePrimaryCtxRetain"),
    ],
)
def test_it_stops_quietly(monkeypatch: pytest.MonkeyPatch, statuses: dict[str, int], last: str) -> None:
    assert woken(monkeypatch, FakeCuda(**statuses))[-1] == last


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    wake.Waking(None).wait()
