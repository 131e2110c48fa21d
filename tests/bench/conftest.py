"""A GPU that computes, and PyTorch on the CPU instead of PyTorch on it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.bench.rig import Rig


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Rig:
    """The GPU of this process; its store is the one at `tmp_path`."""
    gpu = Rig()
    monkeypatch.setattr("fusekit.runtime.driver._import_bindings", lambda: gpu)
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path))
    monkeypatch.delenv("FUSEKIT_STORES", raising=False)
    return gpu


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without PyTorch."""
    for name in ("torch", "fusekit.interop.torch", "fusekit.bench.torch_gemm", "fusekit.bench.torch_router"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("torch_gemm", "torch_router"):  # a package keeps what was imported from it
        monkeypatch.delattr(f"fusekit.bench.{name}", raising=False)


@pytest.fixture
def cpu_torch(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> Any:
    """PyTorch, if it is installed, on the memory of the rig; what it does takes invented time."""
    torch = pytest.importorskip("torch")
    from fusekit.bench import torch_gemm, torch_router
    from fusekit.interop.torch import DTYPES

    def view(array: Any) -> Any:
        memory = (ctypes.c_char * array.nbytes).from_address(array.data_ptr())
        return torch.frombuffer(memory, dtype=DTYPES[array.dtype]).reshape(array.shape)

    def on_stream(work: Callable[[], Any], device: int) -> Callable[[int], Any]:
        def run(stream: int) -> None:
            rig.peer()
            if not rig.timed:
                work()

        return run

    class Captured:
        def __init__(self, works: Any, count: int, device: int, stream: int) -> None:
            self.count = count
            for work in works:
                work()

        def __call__(self, stream: int) -> None:
            for _ in range(self.count):
                rig.peer()

        def close(self) -> None:
            pass

    class Dense(torch_gemm.Dense):
        def __init__(self, rows: int, n: int, k: int, dtype: str, device: str) -> None:
            super().__init__(rows, n, k, dtype, "cpu")

    for module in (torch_gemm, torch_router):
        monkeypatch.setattr(module, "view", view)
        monkeypatch.setattr(module, "on_stream", on_stream)
    monkeypatch.setattr(torch_router, "Captured", Captured)
    monkeypatch.setattr(torch_gemm, "Dense", Dense)
    return torch
