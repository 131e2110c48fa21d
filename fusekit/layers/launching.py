"""How a layer's pass is planned, bound and launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fusekit.abi.layer_pass import LayerBuffer
from fusekit.abi.layer_record import LayerRecord
from fusekit.abi.symbolic import NotCompiledError
from fusekit.errors import ArgumentError
from fusekit.layers.arguments import check_tensors, most_tokens, outputs_among
from fusekit.layers.fitting import CallClasses, FittedPasses, Idle, Passes
from fusekit.layers.kernels import LayerKernels
from fusekit.layers.memory import Slice, required, whole
from fusekit.layers.options import LayerOptions
from fusekit.layers.pass_plan import PassPlan, pass_plan
from fusekit.layers.passes import BACKWARD, FORWARD, MovingPass, Pass, of_the_pass
from fusekit.runtime.log import debug_log
from fusekit.runtime.recent import Recent
from fusekit.runtime.side_stream import Chain, JoinLaunch, Queue, SideStream, SideStreamLaunch, chain_named
from fusekit.runtime.streams import PER_THREAD, handle_of
from fusekit.runtime.tensors import describe, read

if TYPE_CHECKING:
    from fusekit.exchange import Window
    from fusekit.library import Library
    from fusekit.runtime import Kernel
    from fusekit.runtime.launch import Launch

Arguments = tuple[Mapping[str, LayerBuffer], Mapping[str, LayerBuffer]]
MOVING_KEPT = 128  # token counts differ from step to step, and so do the arguments that are given


class Launching:
    """The launches of a layer: `Layer` has its interface."""

    name: str
    options: LayerOptions
    record: LayerRecord
    _library: Library
    _kernels: LayerKernels
    _alignment: int | None = None  # of `kept` and `scratch`; None: that of devices
    _moving: Recent[Any, Passes]  # by all of a call's arguments but addresses, where none of `_idle` serves
    _idle: Idle
    _compiles = False  # passes for any number of tokens

    def arguments(self, which: str) -> Arguments:
        """(inputs, outputs) of a pass; none of a pass that the layer does not have."""
        return self.record.arguments.get(which, ({}, {}))

    def dims(self, tokens: int) -> dict[str, int]:
        """The dims of shapes for so many tokens."""
        return self.record.environment(tokens)

    def _bind(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], cluster_margin: int | None = None,
        in_place: bool = False, sm_count: int | None = None,
    ) -> Pass:  # fmt: skip
        settings = _settings(cluster_margin, sm_count)
        plan, calls, places = self._resolve(which, kept, scratch, arguments, settings, in_place)
        launches = self._in_order(plan, self._bound(calls, places))
        given = {**arguments, "kept": kept, "scratch": scratch}
        return Pass(launches, given, plan.written, self._shared(which), chain=self._chain(which))

    def _chain(self, which: str) -> Chain:
        return chain_named(self._library.devices.driver.annotate, f"{self.name} {which}")

    def _shared(self, which: str) -> Sequence[Window]:
        """The windows of a pass, which other layers may share."""
        return ()

    def _call(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], stream: Any,
        cluster_margin: int | None = None, in_place: bool = False, sm_count: int | None = None,
    ) -> None:  # fmt: skip
        handle = stream if type(stream) is int else handle_of(stream, (*arguments.values(), kept, scratch))
        settings: list[Any] = [which, cluster_margin, in_place, sm_count]
        shapes: list[Any] = []
        addresses: list[int] = []
        for name, tensor in (*arguments.items(), ("kept", kept), ("scratch", scratch)):
            if tensor is not None:
                try:
                    address, shape, strides = tensor.data_ptr(), tensor.shape, tensor.stride()
                    settings += name, tensor.dtype, tensor.device
                except AttributeError:
                    outputs_among(self, which, arguments)  # a wrong name is reported before a wrong type
                    driver, written = self._library.devices.driver, name in self.arguments(which)[1]
                    address, (dtype, shape, strides, device) = read(tensor, name, driver, written)
                    settings += name, dtype, device
                addresses.append(address)
                shapes += shape, strides
        passes, moving = self._idle_pass(settings, shapes, addresses, handle)
        if moving is None:
            self._refuse_capture(which, arguments, handle)
            given = _settings(cluster_margin, sm_count)
            plan, moving = self._bind_moving(which, kept, scratch, arguments, given, in_place)
            passes = passes or self._kept_passes(tuple(settings), shapes, plan, moving)
        # Every launch is checked before the first is queued: half a pass would leave half of the sums updated.
        moving.queue(handle)
        passes.append(moving)  # type: ignore[union-attr]

    def _idle_pass(
        self, kind: Sequence[Any], shapes: Sequence[Any], addresses: list[int], stream: int
    ) -> tuple[Passes | FittedPasses | None, MovingPass | None]:
        """(where passes of such calls are kept, one that is moved there and free). Raises ArgumentError."""
        try:
            if self._compiles and self._kernels.classes is not None:
                fitted = self._kernels.classes.passes(kind, shapes, self._idle)
                if fitted is not None:
                    try:
                        return fitted[0], fitted[0].take(fitted[1], shapes, addresses, stream)
                    except NotCompiledError:
                        pass
            passes = self._moving.get((tuple(kind), *shapes))
        except TypeError:  # unhashable: refused when it is bound
            return None, None
        return passes, None if passes is None else passes.take(addresses)

    def _kept_passes(
        self, kind: Sequence[Any], shapes: Sequence[Any], plan: PassPlan, moving: MovingPass
    ) -> Passes | FittedPasses:
        """Where the passes of calls like this one are kept, which was bound."""
        devices = self._library.devices
        if self._compiles and devices.driver.plans is None:
            if self._kernels.classes is None:
                self._kernels.classes = CallClasses(self.record, devices, most_tokens(self.options))
            alignment = required(self._alignment)
            fitted = self._kernels.classes.add(kind, shapes, self._idle, plan, moving, alignment)
            if fitted is not None:
                return fitted
        passes = Passes(self.name, self.arguments(kind[0])[1], self._alignment)
        self._moving.remember((kind, *shapes), passes)
        return passes

    def _refuse_capture(self, which: str, arguments: Mapping[str, Any], stream: int) -> None:
        """Raises ArgumentError if the stream is captured and a kernel of the pass is not loaded: loading it would end
        the capture.
        """
        driver = self._library.devices.driver
        if stream <= PER_THREAD or not int(driver.check(driver.api.cuStreamIsCapturing(stream), "cuStreamIsCapturing")):
            return
        given = {name: tensor for name, tensor in arguments.items() if tensor is not None}
        asked = outputs_among(self, which, given)
        tokens, device, _ = self._check(which, given)
        for step in self.record.passes[which].queued(asked):
            name = self._kernels.name(step.part, self._chosen_for(tokens))
            kernel = self._kernels.loaded(step.part, self._chosen_for(tokens))
            if name and (kernel is None or not kernel.is_ready(device)):
                raise ArgumentError(
                    f"{self.name}: the stream is captured, and {name} is not loaded on device {device} yet, which a"
                    f" capture cannot do; call layer.load({tokens}, devices=[{device}]), or the pass once, before the"
                    " capture",
                    argument="stream",
                )

    def _chosen_for(self, tokens: int) -> int:
        """The tokens that variants are chosen for, in a pass of `tokens`."""
        return tokens

    def _bind_moving(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], settings: dict[str, int],
        in_place: bool,
    ) -> tuple[PassPlan, MovingPass]:  # fmt: skip
        """A pass for arguments of these shapes, at their addresses so far."""
        driver, outputs = self._library.devices.driver, self.arguments(which)[1]
        given = {**arguments, "kept": kept, "scratch": scratch}
        tensors = {
            name: read(tensor, name, driver, name in outputs) for name, tensor in given.items() if tensor is not None
        }
        views = {name: describe(meta, name) for name, (_, meta) in tensors.items()}
        slices = {
            name: Slice(tensors[name][0], view.shape, view.dtype, view.device, view.strides)
            for name, view in views.items()
        }
        kept, scratch = (slices.pop(name, None) for name in ("kept", "scratch"))
        plan, calls, places = self._resolve(which, kept, scratch, slices, settings, in_place)
        launches = self._bound(calls, places)
        names = list(views)
        numbers = {name: number for number, name in enumerate(names)}
        parts = [
            [
                (numbers[where[argument][0]], where[argument][1]) if argument in where else (-1, address)
                for argument, address in launch.addresses.items()
            ]
            for launch, where in zip(launches, places, strict=True)
        ]
        addresses = [address for address, _ in tensors.values()]
        queue = self._chain(which)(self._in_order(plan, launches))
        return plan, MovingPass(names, list(views.values()), addresses, launches, parts, queue)

    def _bound(
        self, calls: Sequence[tuple[Kernel, dict[str, Any]]], places: Sequence[Mapping[str, tuple[str, int]]]
    ) -> list[Launch]:
        """Binds each kernel to its arguments. Raises ArgumentError naming the argument of the pass."""
        launches = []
        for (kernel, given), where in zip(calls, places, strict=True):
            try:
                launches.append(kernel.bind(**given))
            except ArgumentError as error:
                raise of_the_pass(error, kernel.name, {name: base for name, (base, _) in where.items()}) from error
        return launches

    def _in_order(self, plan: PassPlan, launches: Sequence[Queue]) -> list[Queue]:
        """The launches of a plan, with those that go to the side stream or join it."""
        return [
            SideStreamLaunch(launch, self._side_stream())
            if step.on_side
            else JoinLaunch(launch, self._side_stream())
            if joins
            else launch
            for (step, _), joins, launch in zip(plan.steps, plan.joins, launches, strict=True)
        ]

    def _side_stream(self) -> SideStream:
        """The side stream of a layer over ranks."""
        raise NotImplementedError

    def _resolve(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], settings: dict[str, int],
        in_place: bool,
    ) -> tuple[PassPlan, list[tuple[Kernel, dict[str, Any]]], list[dict[str, tuple[str, int]]]]:  # fmt: skip
        """The plan of a pass; each kernel with its arguments; and where each of its tensors outside windows lies, as
        `PassPlan.place` says.
        """
        given = {name: tensor for name, tensor in arguments.items() if tensor is not None}
        asked = outputs_among(self, which, given)
        tokens, device, compact = self._check(which, given)
        plan = self._plan(which, tokens, asked, compact.keys() & asked, in_place)
        driver = self._library.devices.driver
        memory = compact | {
            name: whole(tensor, name, needed, device, driver, self._alignment)
            for name, tensor, needed in (
                ("kept", kept, plan.kept_bytes if which in (FORWARD, BACKWARD) else 0),
                ("scratch", scratch, plan.scratch_bytes),
            )
        }
        slices: dict[str, Any] = {}
        inputs, buffers = self.arguments(which)[0], self.record.buffers
        where_of = {
            name: plan.place(self.record, name, given, inputs)
            for step, _ in plan.steps
            for name in step.arguments.values()
        }

        def tensor(name: str) -> Any:
            buffer, where = buffers[name], where_of[name]
            if where is None:
                return self._in_window(name)
            if where == (name, 0) and name in given:
                return given[name]
            if name not in slices:
                slices[name] = Slice(memory[where[0]] + where[1], buffer.extents(plan.dims), buffer.dtype, device)
            return slices[name]

        calls = [
            (
                kernel,
                {argument: tensor(name) for argument, name in step.arguments.items()}
                | self._together(step.window)
                | settings,
            )
            for step, kernel in plan.steps
        ]
        places = [
            {argument: where for argument, name in step.arguments.items() if (where := where_of[name]) is not None}
            for step, _ in plan.steps
        ]
        return plan, calls, places

    def _in_window(self, name: str) -> Any:
        """A buffer that lies in a window."""
        raise NotImplementedError

    def _together(self, window: str) -> dict[str, Any]:
        """Further arguments of a launch that stores into `window`; "": into none."""
        return {}

    def _check(self, which: str, given: Mapping[str, Any]) -> tuple[int, int, dict[str, int]]:
        return check_tensors(self, which, given, self._library.devices.driver)

    def _plan(
        self, which: str, tokens: int, asked: set[str], compact: set[str] | None = None, in_place: bool = False
    ) -> PassPlan:
        """asked: outputs; compact: those of them that are contiguous, None: all."""
        compact = asked if compact is None else compact
        key = which, tokens, frozenset(asked), frozenset(compact), in_place
        plans = self._kernels.plans
        plan: PassPlan | None = plans.get(key)
        if plan is None:
            plan = pass_plan(self.record, which, self.dims(tokens), asked, compact, in_place, self._kernel)
            plans.remember(key, plan)
            if (log := debug_log()) is not None:
                log.debug("new plan: %s %s of %d tokens", self.name, which, tokens)
        return plan

    def _kernel(self, part: str, dims: Mapping[str, int]) -> Kernel | None:
        return self._kernels.load(part, self._chosen_for(dims["T"]))


def _settings(cluster_margin: int | None, sm_count: int | None) -> dict[str, int]:
    """What each kernel of a pass is given besides its arguments."""
    settings = {"cluster_margin": cluster_margin, "sm_count": sm_count}
    return {name: value for name, value in settings.items() if value is not None}
