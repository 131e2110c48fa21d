"""The driver call at the end of every launch, and `Launch`, a kernel bound to its arguments.

Between the caller and cuLaunchKernelEx a bound launch looks at the stream and nothing else: no allocation, no lock, no
question to the driver unless the stream is another one than before. What a failure means is worked out only once there
is one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError, DriverError
from fusekit.runtime.handle import Handle
from fusekit.runtime.launch_plan import Block, LaunchPlan, Loaded
from fusekit.runtime.streams import LEGACY, PER_THREAD, Current, current_stream, stream_handle
from fusekit.runtime.tensors import Meta

if TYPE_CHECKING:
    from fusekit.runtime.kernel import Kernel


class Launch(Handle):
    """A kernel bound to its arguments. `launch(stream)` is one driver call; a CUDA graph may capture it.

    It keeps the bound arguments alive. It belongs to one thread at a time; bind again for another thread.
    """

    again = "bind its kernel again"

    __slots__ = ("_arguments", "_block", "_current", "_driver", "_metas", "_plan", "_settings", "kernel")

    def __init__(
        self, kernel: Kernel, arguments: Mapping[str, Any], settings: tuple[int | None, int | None, int | None]
    ) -> None:
        self.kernel = kernel
        self._settings = settings
        self._driver = kernel._driver
        self._block: Block | None = None
        self._bind(dict(arguments))

    def _bind(self, arguments: dict[str, Any]) -> None:
        arguments = self.kernel.spread(arguments)
        plan, addresses, scalars = self.kernel._resolve(arguments, *self._settings)
        metas = [self._read(name, arguments[name])[1] for name in plan.names]
        parts = [] if plan.skip else filled(plan, addresses, scalars)
        # Nothing fails from here on: a launch that is bound anew is the old one or the new one.
        self._plan, self._arguments, self._metas = plan, arguments, metas
        self._current: Current | None = None
        self._keep(parts)

    def _keep(self, parts: Sequence[tuple[LaunchPlan, Block]]) -> None:
        for _, before in self.parts:
            before.stream = None  # a sequence that has it ready looks again
        self._block = parts[0][1] if parts else None

    def _read(self, name: str, tensor: Any) -> tuple[int, Meta]:
        try:
            return tensor.data_ptr(), (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        except AttributeError:
            return self.kernel.read(name, tensor)

    def __call__(self, stream: Any = None) -> None:
        """Queues the launch on `stream` (as a kernel's); nothing at all where a dim of the skip rule is 0."""
        block = self._block
        if block is None:
            return
        handle = stream if type(stream) is int else self._handle(stream)
        if handle != block.stream:
            block = self._aim(handle)
        if handle <= PER_THREAD:
            launch(self._plan, block, handle)
            return
        status = self._driver.api.cuLaunchKernelEx(block.config, self._plan.loaded.function, block.parameters, 0)[0]
        if status:
            _relaunch(self._plan, block, status, handle)

    def _aim(self, handle: int) -> Block:
        """The block for launches in another stream, which may have another part of the device.

        A default stream is aimed at by `launch`.
        """
        block = self._block
        assert block is not None
        plan = self._plan.on(handle, self.kernel._devices)
        if plan is not self._plan:
            parts = filled(plan, block.addresses, block.scalars)
            self._plan = plan
            self._keep(parts)
            block = parts[0][1]
        if handle > PER_THREAD:
            plan.aim(block, handle)
        return block

    def update(self, **changed: Any) -> Launch:
        """Binds other tensors or scalars instead of those named; the rest stays. Returns itself.

        With the same shapes, strides, dtypes and device, only what depends on the changed arguments is written again.
        Otherwise the launch is bound anew, and may have another grid. A graph that captured this launch keeps the
        arguments that it captured. After an ArgumentError the launch is as before.
        """
        plan, block = self._plan, self._block
        if block is None:
            return self._rebind(changed)
        addresses = block.addresses.copy()
        for name, value in changed.items():
            index = plan.index.get(name)
            if index is None:
                return self._rebind(changed)
            address, meta = self._read(name, value)
            if meta != self._metas[index]:
                return self._rebind(changed)
            addresses[index] = address
        self._move(addresses, plan.index[name] if len(changed) == 1 else None)
        self._arguments |= changed
        self._current = None
        return self

    def _handle(self, stream: Any) -> int:
        if stream is not None:
            return stream_handle(stream)
        if self._current is None:
            self._current = current_stream(self._arguments.values())
        return self._current()

    @property
    def parts(self) -> Sequence[tuple[LaunchPlan, Block]]:
        """Each driver launch with its memory."""
        return () if self._block is None else ((self._plan, self._block),)

    @property
    def addresses(self) -> dict[str, int]:
        """Addresses of the tensors by name, in the order of `place`; empty for a launch with nothing to do."""
        return {} if self._block is None else dict(zip(self._plan.names, self._block.addresses, strict=True))

    def place(self, addresses: list[int]) -> None:
        """Binds tensors of the same shapes at these addresses; keeps none of them alive. After an ArgumentError the
        launch is as before.
        """
        if self._block is not None:
            self._move(addresses, None)

    def _move(self, addresses: list[int], position: int | None) -> None:
        """Moves the launch to these addresses. position: of the tensor that moved, if it is one."""
        assert self._block is not None
        if position is None:
            self._plan.fill(self._block, addresses)
        else:
            self._plan.move(self._block, addresses, position)

    def _rebind(self, changed: dict[str, Any]) -> Launch:
        self._bind(self._arguments | changed)
        return self

    def __repr__(self) -> str:
        shown = "nothing to do" if self._block is None else f"grid {'x'.join(map(str, self._plan.grid))}"
        return f"<Launch of {self.kernel.name}: {shown}>"


class Launches(Launch):
    """A record of several launches bound to its arguments: one call queues them all, in order, in one stream."""

    __slots__ = ("_parts",)

    def _keep(self, parts: Sequence[tuple[LaunchPlan, Block]]) -> None:
        super()._keep(parts)
        self._parts = parts

    @property
    def parts(self) -> Sequence[tuple[LaunchPlan, Block]]:
        return () if self._block is None else self._parts

    def __call__(self, stream: Any = None) -> None:
        handle = stream if type(stream) is int else self._handle(stream)
        if self._block is not None and handle != self._block.stream:
            self._aim(handle)
        with self._plan.loaded.together:
            if handle <= PER_THREAD:
                for plan, block in self._parts:
                    launch(plan, block, handle)
                return
            call = self._driver.api.cuLaunchKernelEx
            for plan, block in self._parts:
                if handle != block.stream:
                    plan.aim(block, handle)
                status = call(block.config, plan.loaded.function, block.parameters, 0)[0]
                if status:
                    _relaunch(plan, block, status, handle)

    def _move(self, addresses: list[int], position: int | None) -> None:
        before = self._parts[0][1].addresses
        super()._move(addresses, position)
        try:
            for plan, block in self._parts[1:]:
                plan.fill(block, addresses)
        except BaseException:
            for plan, block in self._parts:  # None for one that could not be filled
                plan.fill(block, before)
            raise


class LaunchSequence:
    """Bound launches of one device, queued in order in one stream. What the driver is given is kept ready.

    It belongs to one thread at a time, as its launches do.
    """

    __slots__ = ("_blocks", "_context", "_driver", "_launches", "_ready")

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = launches
        self._driver = launches[0]._driver
        self._blocks: Sequence[Block] = ()
        # (None, parts of launches that follow one another), or (lock, those of a record of several launches)
        self._ready: Sequence[tuple[threading.Lock | None, Sequence[tuple[Any, Loaded, int, LaunchPlan, Block]]]] = ()

    def __call__(self, handle: int) -> None:
        """Queues the launches on the stream."""
        ready = self._ready
        for block in self._blocks:
            if block.stream != handle:
                ready = ()
                break
        if not ready:
            self._queue_each(handle)
            if handle != PER_THREAD:
                self._prepare()
            return
        api = self._driver.api
        if handle <= PER_THREAD:  # default streams are those of the current context
            failed, context = api.cuCtxGetCurrent()
            if failed or int(context) != self._context:
                self._queue_each(handle)
                return
        call = api.cuLaunchKernelEx
        for lock, parts in ready:
            if lock is not None:  # `with` takes twice as long
                lock.acquire()
            try:
                for config, loaded, parameters, plan, block in parts:
                    if status := call(config, loaded.function, parameters, 0)[0]:
                        _relaunch(plan, block, status, handle)
            finally:
                if lock is not None:
                    lock.release()

    def _queue_each(self, handle: int) -> None:
        for launch in self._launches:
            launch(handle)

    def _prepare(self) -> None:
        """Notes the blocks of all launches; none where one has nothing to do, and may have later."""
        if not all(launch.parts for launch in self._launches):
            return
        self._blocks = [block for launch in self._launches for _, block in launch.parts]
        self._context = int(self._launches[0].parts[0][0].loaded.device.context)
        self._ready = [
            (
                lock,
                [
                    (block.config, plan.loaded, block.parameters, plan, block)
                    for each in group
                    for plan, block in each.parts
                ],
            )
            for lock, group in groupby(self._launches, _lock)
        ]


def _lock(launch: Launch) -> threading.Lock | None:
    """What is held while a launch is queued."""
    return launch.parts[0][0].loaded.together if len(launch.parts) > 1 else None


def launch_parts(parts: Sequence[tuple[LaunchPlan, Block]], handle: int) -> None:
    """Queues `filled` launches in order, and returns their blocks."""
    if len(parts) > 1:
        with parts[0][0].loaded.together:
            _queue(parts, handle)
    else:
        _queue(parts, handle)


def _queue(parts: Sequence[tuple[LaunchPlan, Block]], handle: int) -> None:
    for plan, block in parts:
        launch(plan, block, handle)
        plan.spare.append(block)


def filled(
    plan: LaunchPlan, addresses: list[int], scalars: Sequence[float | int] | None
) -> list[tuple[LaunchPlan, Block]]:
    """The launches of `plan` and of those that follow it, each with a block of its own; nothing is queued."""
    parts = [(part, part.take(addresses)) for part in (plan, *plan.then)]
    for part, block in parts:
        part.fill(block, addresses, scalars)
    return parts


def launch(plan: LaunchPlan, block: Block, handle: int) -> None:
    """One cuLaunchKernelEx of a filled block in the stream `handle`, in the context of the plan's device."""
    if handle != block.stream:
        plan.aim(block, handle)
    if handle > PER_THREAD:  # a stream of its own knows its context
        status = plan.driver.api.cuLaunchKernelEx(block.config, plan.loaded.function, block.parameters, 0)[0]
    else:
        status = _launch_in_context(plan, block, handle)
    if status:
        _relaunch(plan, block, status, handle)


def _launch_in_context(plan: LaunchPlan, block: Block, handle: int) -> Any:
    driver, context = plan.driver, plan.loaded.device.context
    call = driver.api.cuLaunchKernelEx
    current = int(driver.check(driver.api.cuCtxGetCurrent(), "cuCtxGetCurrent"))
    if current == int(context):
        return call(block.config, plan.loaded.function, block.parameters, 0)[0]
    if current and handle <= PER_THREAD:
        _refuse_green(plan)
    with driver.inside(context):
        return call(block.config, plan.loaded.function, block.parameters, 0)[0]


def _refuse_green(plan: LaunchPlan) -> None:
    """Raises ArgumentError if the current context is a green context of the plan's device: its default stream is not
    the one of the primary context, where a launch on a default stream goes.
    """
    driver, device = plan.driver, plan.loaded.device
    failed, green = driver.api.cuStreamGetGreenCtx(LEGACY)
    if not failed and int(green) and int(driver.check(driver.api.cuCtxGetDevice(), "cuCtxGetDevice")) == device.ordinal:
        raise ArgumentError(
            f"{plan.loaded.name}: a default stream, while a green context of {device} is current; give a stream of that"
            " context (cuGreenCtxStreamCreate), or make the primary context current",
            argument="stream",
        )


def _relaunch(plan: LaunchPlan, block: Block, status: Any, handle: int) -> None:
    """Repeats a failed launch with the device's context current, if another context may be why it failed. Raises the
    error for the failure.
    """
    api, context = plan.driver.api, plan.loaded.device.context
    if (
        status in (api.CUresult.CUDA_ERROR_INVALID_CONTEXT, api.CUresult.CUDA_ERROR_INVALID_HANDLE)
        and handle > PER_THREAD
        and plan.loaded.function is not None
        and not plan.driver.is_inside(context)
    ):
        status = _launch_in_context(plan, block, handle)
    if status:
        raise _failure(plan, status, handle)


def _failure(plan: LaunchPlan, status: Any, handle: int) -> DriverError | ArgumentError:
    """The most likely error of a failed launch; looked for only then, so that a good launch pays nothing."""
    api, device = plan.driver.api, plan.loaded.device
    if plan.loaded.function is None:
        return ArgumentError("the kernel was unloaded; load it again before launching it")
    if handle > PER_THREAD:
        failed, context = api.cuStreamGetCtx(handle)[:2]
        green = api.cuStreamGetGreenCtx(handle)  # of which the context is another one than the device's
        if not failed and int(context) != int(device.context) and (green[0] or not int(green[1])):
            return ArgumentError(
                f"the stream {handle:#x} is not of the primary context of {device}, where the tensors are; use a stream"
                " of that device",
                argument="stream",
            )
    return plan.driver.error(status, f"{plan.loaded.name}: cuLaunchKernelEx on {device}")
