"""A layer ready on a device: what its passes take, how much memory they need, and their launches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fusekit.errors import ArgumentError, NotBuiltError, UsageError
from fusekit.layers.memory import Slice, check_aligned, whole
from fusekit.layers.passes import MovingPass, Pass, Sizes, of_the_pass
from fusekit.layers.stored import options_of, records_of
from fusekit.plan.layer import Buffer, Options, Program, Step, program, stored_options
from fusekit.plan.layer.program import ARGUMENT, BACKWARD, FORWARD, INFERENCE, KEPT, QUANTISE, SCRATCH, Arguments
from fusekit.plan.operations import OPERATIONS
from fusekit.runtime.devices import ordinal_of
from fusekit.runtime.side import Aside, Late, Queue, Side, run
from fusekit.runtime.streams import PER_THREAD, handle_of
from fusekit.runtime.tensors import View, describe, read, strides_of

if TYPE_CHECKING:
    from fusekit.exchange import Window
    from fusekit.library import Library
    from fusekit.runtime import Kernel
    from fusekit.runtime.launch import Launch
    from fusekit.store import NameRecord

PASSES = (FORWARD, INFERENCE, BACKWARD, QUANTISE)
_PLANS_KEPT = 64  # token counts differ from step to step
_ROWS = 2**31 - 1  # kernels count them in int32
_MOVING_KEPT = 256  # likewise, and so do the arguments that are given
_BY_TILE = ("dprob",)  # operands that sum a row tile by tile; all others add up in an order that no tile changes


@dataclass(frozen=True, slots=True)
class _PassPlan:
    """A pass for one count of tokens and one set of outputs: its steps with kernels and buffers, and where each one
    lies. late: whether a step waits for those aside. written: after how many steps each output is there.
    """

    steps: tuple[tuple[Step, Kernel, Mapping[str, Buffer]], ...]
    late: Sequence[bool]
    written: Mapping[str, int]
    kept: Mapping[str, int]
    kept_bytes: int
    scratch: Mapping[str, tuple[str, int]]
    scratch_bytes: int
    dims: Mapping[str, int]


class Layer:
    """A layer of the store `library`, for one architecture.

    `options` say what it is. `inputs(pass)` and `outputs(pass)` are what the caller gives: shapes with the dims "T",
    tokens, and "M", rows; the kernels that a pass needs are loaded when it is first asked for. A layer with a
    recipe has one pass more, "quantise", which makes codes of the weights for the others.
    """

    def __init__(
        self, library: Library, name: str, arch: str | None = None, device: int | None = None,
        options: Options | None = None, records: Iterable[NameRecord] | None = None,
    ) -> None:  # fmt: skip
        self.name, self._library, self._arch = name, library, arch
        self._device = None if device is None else ordinal_of(device)
        records = records_of(library, name) if records is None else records
        # What its names stand for: a build meanwhile changes no kernel of a layer that is open.
        self._records = {(record.name, record.arch): record for record in records}
        self.options = options or options_of(library, name, self._records.values())
        self.program: Program = program(self.options)
        self._variants: dict[str, str] = {}  # by part, where `set_variant` chose one
        self._kernels: dict[str, Kernel] = {}
        self._plans: dict[Any, _PassPlan] = {}
        # By what a call is given, but for its addresses: passes that no thread is launching.
        self._moving: dict[Any, list[MovingPass]] = {}

    def __repr__(self) -> str:
        return f"<Layer {self.name}: {len(self.program.parts)} kernels>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer) and self._identity == other._identity and self.options == other.options

    def __hash__(self) -> int:
        return hash(self._identity)

    def __deepcopy__(self, memo: Any) -> Layer:
        return self  # a copy of a module launches the same kernels, into the same windows

    @property
    def _identity(self) -> tuple[Any, ...]:
        keys = frozenset(record.key for record in self._records.values())
        return id(self._library), self.name, self._arch, self._device, keys

    def inputs(self, which: str) -> dict[str, Buffer]:
        """The inputs of "forward", "inference", "backward" or "quantise" by name; none where the layer lacks that pass.
        Raises ArgumentError.
        """
        return dict(self._arguments(which)[0])

    def outputs(self, which: str) -> dict[str, Buffer]:
        """The outputs by name, likewise."""
        return dict(self._arguments(which)[1])

    def _arguments(self, which: str) -> Arguments:
        if which not in PASSES:
            raise ArgumentError(f"there is no pass {which!r}; the passes are {', '.join(PASSES)}")
        return self.program.arguments(which)

    def sizes(self, tokens: int, gradients: Collection[str] | None = None, *, in_place: bool = False) -> Sizes:
        """The memory for so many tokens, whatever outputs are asked for.

        gradients: the outputs that every backward pass will be asked for, all contiguous. Less scratch memory is needed
        then: until they are written, outputs serve as such. in_place: as `bind_backward` will be told. Loads nothing,
        and needs no GPU. Raises ArgumentError.
        """
        dims = self.program.dims(self._rows_of(tokens))
        passes = (FORWARD, INFERENCE, BACKWARD)
        lent: dict[str, Collection[str] | None] = dict.fromkeys(passes, ())
        given = {which: set(self.outputs(which)) for which in passes}
        if gradients is not None:
            given[BACKWARD], lent[BACKWARD] = self._named(gradients), None
        found = {
            which: self.program.scratch(which, given[which], dims, lent[which], in_place=in_place)[1]
            for which in passes
        }
        codes = sum(buffer.bytes(dims) for buffer in self.outputs(QUANTISE).values())
        return Sizes(self.program.kept(dims)[1], found[FORWARD], found[INFERENCE], found[BACKWARD], codes=codes)

    def bind_forward(
        self, *, kept: Any = None, scratch: Any = None, cluster_margin: int | None = None, **arguments: Any
    ) -> Pass:
        """The forward pass on the caller's memory.

        arguments: `inputs` and `outputs` by name; an output may be left out. kept, scratch: device tensors of any type
        with the bytes of `sizes`, aligned to 128; without `kept`, the pass is one of inference, which keeps nothing.
        cluster_margin: clusters that each GEMM holds back for other kernels; None takes the spec's, which is 0.
        Raises ArgumentError naming the argument, and what loading a kernel raises.
        """
        return self._bind(FORWARD if kept is not None else INFERENCE, kept, scratch, arguments, cluster_margin)

    def bind_backward(
        self, *, kept: Any = None, scratch: Any = None, cluster_margin: int | None = None, in_place: bool = False,
        **arguments: Any,
    ) -> Pass:  # fmt: skip
        """The backward pass, after a forward pass with the same `kept`, on the caller's memory, as `bind_forward`.

        An output that is left out is not computed. Outputs that are added to hold what is there before. in_place: the
        pass writes to `kept` what else needs scratch memory, such as dz over z; so after each forward pass there is one
        backward pass alone.
        """
        return self._bind(BACKWARD, kept, scratch, arguments, cluster_margin, in_place)

    def bind_quantise(self, **arguments: Any) -> Pass:
        """The pass of layers with a recipe that makes codes of weights: of w1 w1_q, w1_s, w1_t and w1_ts, and so on.

        Launch it when weights have changed, such as after each step of the optimiser; the other passes read the codes.
        arguments: `inputs("quantise")` and `outputs("quantise")` by name; a weight may be left out with all its codes.
        """
        return self._bind(QUANTISE, None, None, arguments)

    def quantise(self, *, stream: Any = None, **arguments: Any) -> None:
        """Queues that pass without binding it first; arguments and errors are those of `bind_quantise`."""
        self._call(QUANTISE, None, None, arguments, stream)

    def forward(
        self, *, stream: Any = None, kept: Any = None, scratch: Any = None, cluster_margin: int | None = None,
        **arguments: Any,
    ) -> None:  # fmt: skip
        """Queues a forward pass without binding it first; arguments and errors are those of `bind_forward`."""
        self._call(FORWARD if kept is not None else INFERENCE, kept, scratch, arguments, stream, cluster_margin)

    def backward(
        self, *, stream: Any = None, kept: Any = None, scratch: Any = None, cluster_margin: int | None = None,
        in_place: bool = False, **arguments: Any,
    ) -> None:  # fmt: skip
        """Queues a backward pass without binding it first; arguments and errors are those of `bind_backward`."""
        self._call(BACKWARD, kept, scratch, arguments, stream, cluster_margin, in_place)

    def load(self, tokens: int | None = None, *, devices: Iterable[int] = ()) -> None:
        """Loads every kernel now, for so many tokens; a capture can load none. None: those of the spec. devices: by
        their ordinals, further ones to make them ready on; else that happens in the first launch there. Raises
        ArgumentError, and what loading a kernel raises.
        """
        if isinstance(devices, str) or not isinstance(devices, Iterable):
            raise ArgumentError(f"devices = {devices!r}; it must be ordinals, such as [0, 1]", argument="devices")
        ordinals = [ordinal_of(device) for device in devices]
        for which in self.program.steps:
            count = self.options.tokens if tokens is None else self._rows_of(tokens)
            plan = self._plan(which, count, set(self.outputs(which)))
            for device in ordinals:
                for _, kernel, _ in plan.steps:
                    kernel.prepare(device)

    def _rows_of(self, tokens: Any) -> int:
        """`tokens` as a number. Raises ArgumentError."""
        most = _ROWS // max(self.options.topk, 1)
        rule = f"a whole number, 0 or more, and {most} at most: a layer has 2**31 - 1 rows at most"
        count = ArgumentError.integer("tokens", tokens, rule, 0)
        if count > most:
            raise ArgumentError(f"tokens = {count}; it must be {rule}", argument="tokens")
        return count

    def current_device(self) -> int:
        """The ordinal of this thread's current context, or 0 where none is current."""
        return self._library.devices.current()

    # -- launches -----------------------------------------------------------------------------------------------------

    def _bind(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], cluster_margin: int | None = None,
        in_place: bool = False,
    ) -> Pass:  # fmt: skip
        plan, calls, places = self._resolve(which, kept, scratch, arguments, cluster_margin, in_place)
        launches = self._in_order(plan, self._bound(calls, places))
        given = {**arguments, "kept": kept, "scratch": scratch}
        return Pass(launches, given, plan.written, self._shared(which))

    def _shared(self, which: str) -> Sequence[Window]:
        """The windows of a pass, which other layers may use, too."""
        return ()

    def _call(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], stream: Any,
        cluster_margin: int | None = None, in_place: bool = False,
    ) -> None:  # fmt: skip
        handle = stream if type(stream) is int else handle_of(stream, (*arguments.values(), kept, scratch))
        driver, outputs = self._library.devices.driver, self.program.arguments(which)[1]
        key: list[Any] = [which, cluster_margin, in_place]
        addresses: list[int] = []
        for name, tensor in (*arguments.items(), ("kept", kept), ("scratch", scratch)):
            if tensor is not None:
                try:
                    address, meta = tensor.data_ptr(), (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
                except AttributeError:
                    self._known(which, arguments)  # a wrong name comes before a wrong type
                    address, meta = read(tensor, name, driver, name in outputs)
                addresses.append(address)
                key += (name, meta)
        signature = tuple(key)
        try:
            moving = self._moving[signature].pop()
        except (KeyError, IndexError, TypeError):  # new, or another thread has it; of what no key is, the error follows
            self._refuse_capture(which, arguments, handle)
            moving = self._bind_moving(which, kept, scratch, arguments, cluster_margin, in_place)
        else:
            if not moving.knows(addresses):
                self._refuse_places(moving.lying(addresses), outputs)
                moving.trust(addresses)
            moving.move(addresses)
        # Every launch is checked before the first is queued: half a pass would leave half of the sums added to.
        run(moving.queue, handle)
        if signature not in self._moving and len(self._moving) >= _MOVING_KEPT:
            self._moving.clear()
        self._moving.setdefault(signature, []).append(moving)

    def _refuse_capture(self, which: str, arguments: Mapping[str, Any], stream: int) -> None:
        """Raises ArgumentError where the stream is captured and a kernel of the pass is still to be loaded: the driver
        would refuse that, and end the capture.
        """
        driver = self._library.devices.driver
        if stream <= PER_THREAD or not int(driver.check(driver.api.cuStreamIsCapturing(stream), "cuStreamIsCapturing")):
            return
        given = {name: tensor for name, tensor in arguments.items() if tensor is not None}
        asked = self._known(which, given)
        tokens, device, _ = self._check(which, given)
        for step in self.program.needed(which, asked):
            name = self.kernel_name(step.part, self._chosen_for(tokens))
            kernel = self._kernels.get(name)
            if kernel is None or not kernel.is_ready(device):
                raise ArgumentError(
                    f"{self.name}: the stream is captured, and {name} is not loaded on device {device} yet, which a"
                    f" capture cannot do; call layer.load({tokens}, devices=[{device}]), or the pass once, before the"
                    " capture",
                    argument="stream",
                )

    def _chosen_for(self, tokens: int) -> int:
        """The tokens that variants are chosen for."""
        return tokens

    def _bind_moving(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], cluster_margin: int | None,
        in_place: bool,
    ) -> MovingPass:  # fmt: skip
        """A pass for arguments like these, at their addresses."""
        driver, outputs = self._library.devices.driver, self.program.arguments(which)[1]
        given = {**arguments, "kept": kept, "scratch": scratch}
        found = {
            name: read(tensor, name, driver, name in outputs) for name, tensor in given.items() if tensor is not None
        }
        views = {name: describe(meta, name) for name, (_, meta) in found.items()}
        slices = {
            name: Slice(found[name][0], view.shape, view.dtype, view.device, view.strides)
            for name, view in views.items()
        }
        kept, scratch = (slices.pop(name, None) for name in ("kept", "scratch"))
        plan, calls, places = self._resolve(which, kept, scratch, slices, cluster_margin, in_place)
        launches = self._bound(calls, places)
        names = list(views)
        numbers = {name: number for number, name in enumerate(names)}
        parts = [
            [
                (numbers[each[argument][0]], each[argument][1]) if argument in each else (-1, address)
                for argument, address in launch.addresses.items()
            ]
            for launch, each in zip(launches, places, strict=True)
        ]
        addresses = [address for address, _ in found.values()]
        return MovingPass(names, list(views.values()), addresses, launches, parts, self._in_order(plan, launches))

    def _bound(
        self, calls: Sequence[tuple[Kernel, dict[str, Any]]], places: Sequence[Mapping[str, tuple[str, int]]]
    ) -> list[Launch]:
        """Each kernel bound to what it is given. Raises ArgumentError naming the argument of the pass."""
        launches = []
        for (kernel, given), where in zip(calls, places, strict=True):
            try:
                launches.append(kernel.bind(**given))
            except ArgumentError as error:
                raise of_the_pass(error, kernel.name, {name: base for name, (base, _) in where.items()}) from error
        return launches

    def _in_order(self, plan: _PassPlan, launches: Sequence[Queue]) -> list[Queue]:
        """The launches of a plan, with those that are queued aside or wait for them."""
        return [
            Aside(launch, self._side()) if step.aside else Late(launch, self._side()) if late else launch
            for (step, _, _), late, launch in zip(plan.steps, plan.late, launches, strict=True)
        ]

    def _side(self) -> Side:
        """The stream of launches that are queued aside."""
        raise NotImplementedError

    def _resolve(
        self, which: str, kept: Any, scratch: Any, arguments: Mapping[str, Any], cluster_margin: int | None,
        in_place: bool,
    ) -> tuple[_PassPlan, list[tuple[Kernel, dict[str, Any]]], list[dict[str, tuple[str, int]]]]:  # fmt: skip
        """The plan of a pass; each kernel with what it is given; and where each of its tensors lies that is not in a
        window: in the memory of which argument of the pass, and how many bytes from its begin.
        """
        given = {name: tensor for name, tensor in arguments.items() if tensor is not None}
        asked = self._known(which, given)
        tokens, device, compact = self._check(which, given)
        plan = self._plan(which, tokens, asked, compact.keys() & asked, in_place)
        driver = self._library.devices.driver
        memory = compact | {
            "kept": whole(kept, "kept", plan.kept_bytes if which in (FORWARD, BACKWARD) else 0, device, driver),
            "scratch": whole(scratch, "scratch", plan.scratch_bytes, device, driver),
        }
        made: dict[str, Any] = {}
        inputs = self.program.arguments(which)[0]
        margin = {} if cluster_margin is None else {"cluster_margin": cluster_margin}

        def place(buffer: Buffer) -> tuple[str, int] | None:
            name = buffer.name
            if name in given and (name in asked or name in inputs):
                return name, 0
            if buffer.place not in (ARGUMENT, KEPT, SCRATCH):
                return None
            return plan.scratch[name] if name in plan.scratch else ("kept", plan.kept[name])

        def tensor(buffer: Buffer) -> Any:
            name, where = buffer.name, place(buffer)
            if where is None:
                return self._in_window(buffer)
            if where == (name, 0) and name in given:
                return given[name]
            if name not in made:
                made[name] = Slice(memory[where[0]] + where[1], buffer.extents(plan.dims), buffer.dtype, device)
            return made[name]

        calls = [
            (
                kernel,
                {argument: tensor(buffer) for argument, buffer in buffers.items()}
                | self._together(step.window)
                | margin,
            )
            for step, kernel, buffers in plan.steps
        ]
        places = [
            {argument: where for argument, buffer in buffers.items() if (where := place(buffer)) is not None}
            for _, _, buffers in plan.steps
        ]
        return plan, calls, places

    def _in_window(self, buffer: Buffer) -> Any:
        """A buffer that lies in a window."""
        raise NotImplementedError

    def _together(self, window: str) -> dict[str, Any]:
        """What a launch that stores into `window` is given beside its buffers; "": into none."""
        return {}

    def _named(self, gradients: Any) -> set[str]:
        """Outputs of the backward pass, as a caller names them. Raises ArgumentError."""
        self._known(BACKWARD, ())
        known = list(self.outputs(BACKWARD))
        several = isinstance(gradients, Iterable) and not isinstance(gradients, str)
        names = list(gradients) if several else [gradients]
        wrong = [name for name in names if not several or name not in known]
        if wrong:
            raise ArgumentError(
                f"{self.name}: gradients = {gradients!r}, with {wrong[0]!r}; it must be a list of outputs of the"
                f" backward pass, such as ['{known[0]}']; they are {', '.join(known)}",
                argument="gradients",
            )
        return set(names)

    def _known(self, which: str, given: Collection[str]) -> set[str]:
        """The outputs among `given`, of which every one must be an argument. Raises ArgumentError."""
        if which == QUANTISE and which not in self.program.steps:
            raise ArgumentError(
                f"{self.name} has no recipe, so its passes read the weights themselves; quantise nothing"
            )
        if not self.program.steps[which]:
            raise ArgumentError(untrained(self.options, which))
        inputs, outputs = self.program.arguments(which)
        unknown = sorted(set(given) - inputs.keys() - outputs.keys())
        if unknown:
            raise ArgumentError(
                f"{self.name}: the {which} pass has no {', '.join(unknown)}; its inputs are {', '.join(inputs)}, its"
                f" outputs {', '.join(outputs)}",
                argument=unknown[0],
            )
        return set(given) & outputs.keys()

    def _check(self, which: str, given: Mapping[str, Any]) -> tuple[int, int, dict[str, int]]:
        """(tokens, device, addresses of what is contiguous) of what is given, after a look at every shape and dtype."""
        inputs, outputs = self.program.arguments(which)
        driver = self._library.devices.driver
        lead = {BACKWARD: "dy", QUANTISE: next(iter(outputs.keys() & given), "")}.get(which, "x")
        if not lead:
            raise ArgumentError(f"{self.name}: no codes to write are given, such as {', '.join(list(outputs)[:4])}")
        if lead not in given:
            raise ArgumentError(f"{self.name}: {lead} is missing, whose rows are the tokens", argument=lead)
        found = {name: read(tensor, name, driver, name in outputs) for name, tensor in given.items()}
        seen = {name: describe(meta, name) for name, (_, meta) in found.items()}
        tokens = seen[lead].shape[0] if seen[lead].shape and which != QUANTISE else 0
        dims, known = self.program.dims(tokens), {**inputs, **outputs}
        for name, view in seen.items():
            buffer = known[name]
            if view.shape != buffer.extents(dims) or view.dtype != buffer.dtype:
                few = "" if which == QUANTISE else f"for {tokens} tokens "
                raise ArgumentError(
                    f"{self.name}: {name} is {view.dtype} {list(view.shape)}; {few}it must be"
                    f" {buffer.dtype} {list(buffer.extents(dims))}",
                    argument=name,
                )
        steps = self.program.needed(which, set(given) & outputs.keys())
        if not steps:
            raise ArgumentError(
                f"{self.name}: no output is given, so the {which} pass has nothing to do; give one or more of"
                f" {', '.join(outputs)}",
                argument=next(iter(outputs)),
            )
        needed = {name for step in steps for name in step.reads.values()}
        if which == QUANTISE:  # without scratch memory, a step writes all of its results to the caller's
            needed |= {name for step in steps for name in step.writes.values()}
        missing = [name for name in known if name in needed and name not in given]
        if missing:
            raise ArgumentError(
                f"{self.name}: the {which} pass needs {', '.join(missing)}, too; give"
                f" {', '.join(f'{name} {list(known[name].extents(dims))}' for name in missing)}",
                argument=missing[0],
            )
        self._refuse_overlaps({name: (found[name][0], seen[name]) for name in seen}, outputs.keys())
        compact = {name for name, view in seen.items() if view.strides == strides_of(view.shape)}
        return tokens, seen[lead].device, {name: found[name][0] for name in compact}

    def _refuse_places(self, given: dict[str, tuple[int, View]], outputs: Collection[str]) -> None:
        """What depends on addresses alone of the checks of a call. Raises ArgumentError."""
        for name in ("kept", "scratch"):
            if name in given:
                address, view = given.pop(name)
                check_aligned(name, address, view)
        self._refuse_overlaps(given, outputs)

    def _refuse_overlaps(self, given: Mapping[str, tuple[int, View]], outputs: Collection[str]) -> None:
        """Raises ArgumentError for an output that shares memory with another tensor: until it is written, it serves as
        scratch memory.
        """
        spans = sorted((begin, begin + view.span, name) for name, (begin, view) in given.items() if view.span)
        last, written = (0, ""), (0, "")  # where what came before ends, and what of it is an output
        for begin, end, name in spans:
            before = last if name in outputs else written
            if begin < before[0]:
                one, other = (name, before[1]) if name in outputs else (before[1], name)
                raise ArgumentError(
                    f"{self.name}: the output {one} shares memory with {other}; give it memory of its own", argument=one
                )
            last = max(last, (end, name))
            written = max(written, (end, name)) if name in outputs else written

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _plan(
        self, which: str, tokens: int, asked: set[str], compact: set[str] | None = None, in_place: bool = False
    ) -> _PassPlan:
        """compact: of the outputs `asked`, those that are contiguous; None: all."""
        compact = asked if compact is None else compact
        key = which, tokens, frozenset(asked), frozenset(compact), in_place
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            plan = self._plans[key] = self._planned(which, tokens, asked, compact, in_place)
        return plan

    def _planned(self, which: str, tokens: int, asked: set[str], compact: set[str], in_place: bool) -> _PassPlan:
        dims = self.program.dims(tokens)
        buffers = self.program.buffers
        steps: list[tuple[Step, Kernel, Mapping[str, Buffer]]] = []
        written: dict[str, int] = {}
        needed = self.program.needed(which, asked, in_place=in_place)
        for step in needed:
            given = {each: buffers[name] for each, name in step.arguments.items()}
            steps.append((step, self._kernel(step.part, dims), given))
            written |= {name: len(steps) for name in asked.intersection(step.writes.values())}
        scratch, scratch_bytes = self.program.scratch(which, asked, dims, compact, in_place=in_place)
        kept, kept_bytes = self.program.kept(dims)
        return _PassPlan(
            tuple(steps), self.program.late(needed), written, kept, kept_bytes, scratch, scratch_bytes, dims
        )

    def set_variant(self, part: str, variant: str) -> None:
        """A part is this variant from now on, for any number of tokens; passes that are bound stay as they are."""
        self._variants[part] = variant
        self._plans.clear()
        self._moving.clear()

    def kernel_name(self, part: str, tokens: int) -> str:
        """The full name of the variant of a part for so many tokens. Of a part whose bits depend on its tile it is
        always that for the tokens of the spec. Raises ArgumentError.
        """
        if part not in self.program.parts:
            raise ArgumentError(f"{self.name} has no part {part!r}; its parts are {', '.join(self.program.parts)}")
        if part in self._variants:
            return f"{self.name}.{part}@{self._variants[part]}"
        keys = self.program.parts[part]
        operation = OPERATIONS[keys["op"]]
        dims = self.program.dims(self.options.tokens if pinned(keys) else self._rows_of(tokens))
        problem = {"T": dims["T"]}
        if operation.gemm:
            problem = {**keys["problem"], "M": dims["M"] if operation.ragged else dims["T"]}
        return self._library.find(f"{self.name}.{part}", self._arch, self._device, problem).name

    def _kernel(self, part: str, dims: Mapping[str, int]) -> Kernel:
        """A part for so many tokens, loaded once."""
        name = self.kernel_name(part, dims["T"])
        if name not in self._kernels:
            now = self._library.find(name, self._arch, self._device)
            found = self._records.get((now.name, now.arch), now)
            self._refuse_another_table(found)
            try:
                self._kernels[name] = self._library.load_found(found, self._device)
            except NotBuiltError as error:
                if found.key == now.key:
                    raise
                raise UsageError(
                    f"{name} was built again since {self.name} was opened, and its kernel of before is gone; open the "
                    "layer again, and bind its passes again"
                ) from error
        return self._kernels[name]

    def _refuse_another_table(self, found: NameRecord) -> None:
        """Raises UsageError for a kernel that was built from another table since this layer was opened."""
        ours, theirs = self.options, stored_options(self.name, {found.name: found.spec})
        ours = replace(ours, tokens=theirs.tokens) if theirs else ours  # for which only variants were chosen
        if theirs != ours:
            told = theirs.canonical() if theirs else {}
            differ = [key for key, value in ours.canonical().items() if told.get(key) != value]
            raise UsageError(
                f"{found.name} was built from another table since {self.name} was opened (other {', '.join(differ)});"
                " open the layer again, and bind its passes again"
            )


def pinned(keys: Mapping[str, Any]) -> bool:
    """Whether the bits of a row's results depend on the variant. keys: of a kernel's table."""
    return any(keys.get(name) for name in _BY_TILE)


def untrained(options: Options, which: str = BACKWARD) -> str:
    """That a layer for inference has no such pass, in words."""
    return (
        f'{options.file}/{options.name} was built for inference alone (keep = "none") and has no {which} pass; build it'
        ' with keep = "z" to train it'
    )
