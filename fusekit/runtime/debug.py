"""Launches that are waited for (`FUSEKIT_DEBUG=1`), or marked for a profiler (`FUSEKIT_NVTX=1`).

The functions here replace `Driver.api`, so that launches without them pay nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from fusekit.abi import evaluate
from fusekit.errors import UsageError

if TYPE_CHECKING:
    from fusekit.runtime.driver import Driver
    from fusekit.runtime.launch_plan import LaunchPlan

_LAST = 16

Annotate = Callable[[str], AbstractContextManager[Any]]  # a range of a profiler, by its name


def ranges() -> Annotate:
    """Ranges of NVTX in the domain "fusekit". Raises UsageError without the package nvtx."""
    from importlib import import_module

    try:
        return partial(import_module("nvtx").annotate, domain="fusekit")
    except ImportError as error:
        raise UsageError(
            f"FUSEKIT_NVTX=1 needs the package nvtx, which cannot be imported ({error}); pip install nvtx, or unset it"
        ) from None


class RangeApi:
    """The driver's functions. A launch is a range with the name of its kernel."""

    def __init__(self, driver: Driver, annotate: Annotate) -> None:
        self._driver, self._api, self._annotate = driver, driver.api, annotate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> Any:  # noqa: N802
        with self._annotate(self._driver.plan_of(config).loaded.name):
            return self._api.cuLaunchKernelEx(config, function, parameters, extra)


class DebugApi:
    """The driver's functions. A launch returns when it is done, or raises the DriverError that names it."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._api = driver, driver.api
        self._last: deque[str] = deque(maxlen=_LAST)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> Any:  # noqa: N802
        plan, stream = self._driver.plan_of(config), int(config.hStream)
        text = f"{description(plan)}, grid {'x'.join(map(str, plan.grid))}, {plan.loaded.device}, stream {stream:#x}"
        if status := self._wait(stream, plan.loaded.device.context):
            raise self._error(
                status, f"work before {text}",
                "it was not one of fusekit's launches in this stream: look at other streams, CUDA graphs and libraries",
            )  # fmt: skip
        result = self._api.cuLaunchKernelEx(config, function, parameters, extra)
        if not result[0]:
            self._last.append(text)
            if status := self._wait(stream, plan.loaded.device.context):
                raise self._error(status, text, "compute-sanitizer shows the instruction")
        return result

    def _wait(self, stream: int, context: Any) -> Any:
        """Waits for the stream, and returns the status of its work; at once with 0 while it is captured.

        The other calls' statuses do not count: all of them may fail once the context is broken.
        """
        api, modes = self._api, self._api.CUstreamCaptureMode
        pushed = not api.cuCtxPushCurrent(context)[0]
        before = api.cuThreadExchangeStreamCaptureMode(modes.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            status, capturing = api.cuStreamIsCapturing(stream)
            if status == api.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT or (not status and int(capturing)):
                return 0
            return status or api.cuStreamSynchronize(stream)[0]
        finally:
            if not before[0]:
                api.cuThreadExchangeStreamCaptureMode(before[1])
            if pushed:
                api.cuCtxPopCurrent()

    def _error(self, status: Any, what: str, remedy: str) -> Exception:
        last = "".join(f"\n  {text}" for text in self._last)
        error = self._driver.error(status, what, f"{remedy}\nThe last launches, the latest last:{last or ' none'}")
        error.one_line = False
        return error


def description(plan: LaunchPlan) -> str:
    """Kernel and tensors of a launch: their dtypes and shapes."""
    env = plan.bound.env
    tensors = (
        f"{tensor.name} {tensor.dtype}[{', '.join(str(evaluate(extent, env)) for extent in tensor.shape)}]"
        for tensor in plan.record.tensors
    )
    return f"{plan.loaded.name} on {', '.join(tensors)}"
