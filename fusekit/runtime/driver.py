"""The CUDA driver through cuda.bindings: imported at first use, checked once, errors with CUDA's texts.

Tests pass another object with the same functions instead of ``cuda.bindings.driver``.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

from fusekit.errors import DriverError

if TYPE_CHECKING:
    from fusekit.runtime.debug import Annotate
    from fusekit.runtime.launch_plan import LaunchPlan

# cuKernelGetParamInfo, the youngest function in use, came with CUDA 12.4.
MINIMUM_VERSION = 12040
_BEFORE_CAPTURE = (
    "impossible while a stream is captured; load every kernel, on every device it runs on, before the capture begins"
)
_BEFORE_FORK = (
    "CUDA does not survive a fork; start the process with the multiprocessing methods spawn or forkserver, or fork"
    " before the first load"
)
_REMEDIES = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "kernel module and libcuda are of different versions; reboot or reinstall",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the cubin is for another architecture; build the kernel for this one",
    "CUDA_ERROR_OUT_OF_MEMORY": "the device is out of memory; free some or use a smaller problem",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": _BEFORE_CAPTURE,
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": _BEFORE_CAPTURE,
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "the capture was broken by an earlier error; begin it again",
    "CUDA_ERROR_NOT_INITIALIZED": _BEFORE_FORK,
}
# Errors of a kernel, which every later call returns as well.
_STICKY = {
    f"CUDA_ERROR_{name}"
    for name in (
        "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "TENSOR_MEMORY_LEAK",
    )
}  # fmt: skip
_EARLIER = "an earlier launch, of any library, may be the cause, and this process can launch no more; "


def version_text(version: int) -> str:
    """13000 -> "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"


class Driver:
    """An initialised CUDA driver. `api` is the module of driver functions, `version` such as 13000.

    bindings: replaces cuda.bindings.driver. debug: every launch is waited for, and its errors name it. nvtx: kernels
    and passes are ranges in a profiler.

    plans: of launch configurations by id, if launches are looked at; else None. annotate: makes a range, or None.

    Raises DriverError, with expected and found, when cuda-bindings or the driver is absent or too old, or has no
    device.
    """

    def __init__(self, bindings: Any = None, *, debug: bool = False, nvtx: bool = False) -> None:
        self.debug = debug
        # A configuration lives no longer than its plan.
        self.plans: WeakValueDictionary[int, LaunchPlan] | None = WeakValueDictionary() if debug or nvtx else None
        self.annotate: Annotate | None = None
        self.api: Any = _import_bindings() if bindings is None else bindings
        try:
            self.version: int = self.check(self.api.cuDriverGetVersion(), "cuDriverGetVersion")
        except DriverError:
            raise
        except Exception as error:  # what is raised for a missing libcuda differs between releases of cuda-bindings
            raise DriverError(
                f"no NVIDIA driver (cuda.bindings: {' '.join(str(error).split()).rstrip('.')}); expected one for CUDA"
                f" {version_text(MINIMUM_VERSION)} or newer; install it, or run where there is one",
                name="CUDA_ERROR_STUB_LIBRARY",
            ) from error
        self.require(MINIMUM_VERSION, "fusekit")
        self.check(self.api.cuInit(0), "cuInit")
        if debug or nvtx:
            from fusekit.runtime.debug import DebugApi, RangeApi, ranges

            if debug:
                self.api = DebugApi(self)
            if nvtx:
                self.annotate = ranges()
                self.api = RangeApi(self, self.annotate)
        # In a child process the driver would answer with anything from an error to a crash: refuse before asking it.
        os.register_at_fork(after_in_child=_refuser(weakref.ref(self)))

    def plan_of(self, config: Any) -> LaunchPlan:
        """The plan of a launch configuration, where launches are looked at."""
        assert self.plans is not None
        return self.plans[id(config)]

    def require(self, version: int, who: str) -> None:
        """Raises DriverError unless the driver supports CUDA `version`, which `who` needs."""
        if self.version < version:
            raise DriverError(
                f"the NVIDIA driver supports CUDA {version_text(self.version)}; {who} expects CUDA"
                f" {version_text(version)} or newer; update the driver",
                name="CUDA_ERROR_INSUFFICIENT_DRIVER",
            )

    def check(self, result: tuple[Any, ...], what: str) -> Any:
        """The values behind the status in `result` (None, one, or a tuple); DriverError when the status is an error."""
        if result[0]:
            raise self.error(result[0], what)
        if len(result) <= 2:
            return result[1] if len(result) == 2 else None
        return result[1:]

    @contextlib.contextmanager
    def inside(self, context: Any) -> Iterator[None]:
        """Makes `context` current inside, and restores the previous one."""
        self.check(self.api.cuCtxPushCurrent(context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self.check(self.api.cuCtxPopCurrent(), "cuCtxPopCurrent")

    def is_inside(self, context: Any) -> bool:
        """Whether `context` is this thread's current one."""
        return int(self.check(self.api.cuCtxGetCurrent(), "cuCtxGetCurrent")) == int(context)

    def error(self, status: Any, what: str, remedy: str = "") -> DriverError:
        """The DriverError for `status` of `what`, with CUDA's name and text. Default for `remedy`: by the name."""
        name = self._text(self.api.cuGetErrorName, status) or f"CUresult {int(status)}"
        text = self._text(self.api.cuGetErrorString, status)
        message = f"{what} failed: {name}" + (f" ({text})" if text else "")
        remedy = remedy or _REMEDIES.get(name, "")
        if not remedy and name in _STICKY:
            remedy = (
                _EARLIER + ("" if self.debug else "run it again with FUSEKIT_DEBUG=1, or ") + "run compute-sanitizer"
            )
        return DriverError(f"{message}; {remedy}" if remedy else message, name=name, text=text)

    @staticmethod
    def _text(function: Any, status: Any) -> str:
        try:
            failed, text = function(status)
        except (RuntimeError, ValueError):
            return ""
        return text.decode() if not failed and text else ""


class _Forked:
    """Replaces the driver's functions in a process that was forked after they were in use."""

    def __getattr__(self, name: str) -> NoReturn:
        raise DriverError(
            f"{name}: this process was forked after CUDA was initialised; {_BEFORE_FORK}",
            name="CUDA_ERROR_NOT_INITIALIZED",
        )


def _refuser(driver: weakref.ref[Driver]) -> Callable[[], None]:
    def refuse() -> None:
        driver_ = driver()
        if driver_ is not None:
            driver_.api = _Forked()

    return refuse


def _import_bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(
            f"cuda.bindings cannot be imported: {error}; launching needs it; pip install 'cuda-bindings>=12.9,<14'"
        ) from error
    return driver
