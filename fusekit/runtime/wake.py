"""A head start for the driver: initialising it and making a context take 0.2 s, in which Python has nothing to do.

`Waking` does both in a thread while the caller imports and reads files. It finds libcuda itself, so that it need not
wait for an import; where anything is wrong it says nothing, and the driver proper says it afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

_NOT_INITIALIZED = 3


class Waking:
    """A thread that starts at once. `wait` returns when it is done, which it must be before the process ends.

    In a process that uses CUDA already nothing happens: which context is wanted there is not known here.
    """

    def __init__(self, ordinal: int | None) -> None:
        self._ordinal = ordinal or 0
        self._release = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            driver = ctypes.CDLL("libcuda.so.1")
            context, device = ctypes.c_void_p(), ctypes.c_int()
            if driver.cuCtxGetCurrent(ctypes.byref(context)) != _NOT_INITIALIZED or driver.cuInit(0):
                return
            if driver.cuDeviceGet(ctypes.byref(device), self._ordinal):
                return
            if not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
                self._release.callback(driver.cuDevicePrimaryCtxRelease_v2, device)

    def wait(self) -> None:
        """Releases the context, which users of the device have retained by now."""
        self._thread.join()
        self._release.close()
