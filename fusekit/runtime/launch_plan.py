"""A launch for one combination of shapes, strides, device, cluster_margin and sm_count: everything but the addresses.

A `LaunchPlan` is made once and kept; a `Block` is the memory of one launch: parameters at the offsets that the kernel
expects, the array of pointers to them, and the launch configuration. Filling a block and launching it allocates
nothing.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fusekit.abi import (
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    PointerParameter,
    TensorMapParameter,
    evaluate,
    evaluate_address,
    flat,
)
from fusekit.abi.events import PROGRAMMATIC
from fusekit.abi.floats import with_integers
from fusekit.abi.limits import THREADS
from fusekit.errors import ArgumentError
from fusekit.runtime.binding import Bound, Pair, check_address, check_placement
from fusekit.runtime.devices import Device, Devices
from fusekit.runtime.driver import Driver
from fusekit.runtime.maps import MapSlot, map_slot
from fusekit.runtime.streams import PER_THREAD, check_handle
from fusekit.runtime.workspace import Scratch, Workspaces

GRID_LIMITS = (2**31 - 1, 65535, 65535)
# Combinations of addresses known to be aligned and apart; a step's launches come round again and again.
_PLACEMENTS_KEPT = 1024
_BASE_ALIGNMENT = 64
_WRAP = 2**64 - 1
_POINTER = struct.Struct("<Q")
_FLOAT = struct.Struct("<f")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a launch: `margin`, the reserved clusters; `priority` of its blocks (None: the stream's);
    `sm_count`, the multiprocessors that it is for (None: those of the stream's context).
    """

    margin: int = 0
    priority: int | None = None
    sm_count: int | None = None


@dataclass(slots=True)
class Loaded:
    """A kernel loaded on one device. `function` becomes None when the kernel is unloaded."""

    name: str
    device: Device
    function: Any
    workspaces: Workspaces | None = None
    scratch: Scratch | None = None
    active_clusters: int | None = None  # asked when a record reads it
    most_shared: int = 0  # dynamic shared memory of a block, where the arguments decide how much there is
    then: tuple[Loaded, ...] = ()  # of the launches that follow
    # Held while a record's launches are queued: launches of several threads in one stream share scratch memory.
    together: threading.Lock = field(default_factory=threading.Lock)


class LaunchPlan:
    """The launch of `record` for one signature. `skip` means that there is nothing to do (a dim is 0, or `when`)."""

    def __init__(
        self, driver: Driver, record: LaunchRecord, loaded: Loaded, bound: Bound, overlaps: Sequence[Pair],
        settings: Settings, integers: Mapping[str, int], floats: Mapping[str, float], whole: LaunchPlan | None = None,
    ) -> None:  # fmt: skip
        """floats: those that decide the launch. whole: the plan for the whole device, if this one is for a part."""
        self.driver = driver
        self.record = record
        self.loaded = loaded
        self.bound = bound
        self.overlaps = tuple(overlaps)
        self.priority = settings.priority
        self._placed: set[tuple[int, ...]] = set()
        # What a launch looks at first: (index, bits that must be 0) and (two indices, range of distances that is near).
        self._aligned = tuple(
            (position, tensor.alignment - 1)
            for position, (tensor, span) in enumerate(zip(record.tensors, bound.spans, strict=True))
            if span
        )
        self._near = tuple((pair.first, pair.second, -pair.second_span, pair.first_span) for pair in self.overlaps)
        self.names = tuple(tensor.name for tensor in record.tensors)
        self.index = {name: position for position, name in enumerate(self.names)}
        self.skip = any(bound.env[name] == 0 for name in record.skip_if_zero)
        self.spare: list[Block] = []
        self.then: tuple[LaunchPlan, ...] = ()  # of the launches that follow
        self._settings, self._integers, self._floats = settings, integers, floats
        self._whole, self._parts = whole or self, dict[int, LaunchPlan]()
        self._reads_sm_count = record.reads("sm_count") or record.reads("active_clusters")
        if self.skip:
            return
        sm_count = settings.sm_count or loaded.device.sm_count
        launch = {"sm_count": sm_count, "cluster_margin": settings.margin, **integers}
        if loaded.active_clusters is not None:
            share = loaded.active_clusters * sm_count // loaded.device.sm_count
            launch["active_clusters"] = max(share, min(loaded.active_clusters, 1))
        self.variables = launch  # what expressions read besides dims and strides
        env = record.environment({**bound.env, **launch}, floats)
        self._check_constraints(env)
        self.skip = evaluate(record.when, env) == 0
        if self.skip:
            return
        self.grid = tuple(evaluate(expr, env) for expr in record.grid)
        self.block = tuple(evaluate(expr, env) for expr in record.block)
        self.shared = evaluate(record.dynamic_shared, env)
        self.handles = {event.kind: env[event.argument] for event in record.events}
        self._check_grid(env)
        self._check_block(env)
        self._place(env)
        masks = dict(self._aligned)
        # For each tensor: the offset of its address, the maps that read it, and what its address is checked for.
        self.users = tuple(
            (
                [(offset, 0) for offset, index in self.pointers if index == position]
                + [(offset, shift) for offset, index, shift in self.shifted if index == position],
                [index for index, slot in enumerate(self.maps) if name in slot.reads],
                masks.get(position, 0),
                [(second, low, high) for first, second, low, high in self._near if first == position]
                + [(first, -high, -low) for first, second, low, high in self._near if second == position],
            )
            for position, name in enumerate(self.names)
        )

    def followed_by(self, then: Iterable[LaunchPlan]) -> None:
        """Sets the launches that follow."""
        self.then = tuple(then)
        self._reads_sm_count |= any(plan._reads_sm_count for plan in self.then)

    def on(self, stream: int, devices: Devices) -> LaunchPlan:
        """This launch for the multiprocessors that `stream` has: a green context has a part of the device's."""
        if not self._reads_sm_count or self._whole._settings.sm_count is not None:
            return self
        part = devices.part_of(stream)
        if not part or part == self.loaded.device.sm_count:
            return self._whole
        return self._whole._on_part(part)

    def _on_part(self, part: int) -> LaunchPlan:
        plan = self._parts.get(part)
        if plan is None:
            settings = replace(self._settings, sm_count=part)
            plan = LaunchPlan(
                self.driver, self.record, self.loaded, self.bound, self.overlaps, settings, self._integers,
                self._floats, self,
            )  # fmt: skip
            plan.followed_by(later._on_part(part) for later in self.then)
            plan = self._parts.setdefault(part, plan)
        return plan

    def _place(self, env: Mapping[str, int]) -> None:
        """The parameters' bytes as far as `env` decides them, and the offsets of the others."""
        driver, record, loaded = self.driver, self.record, self.loaded
        scalars = {scalar.name: position for position, scalar in enumerate(record.scalars)}
        self.size = max((parameter.offset + parameter.size for parameter in record.parameters), default=0)
        self.template = bytearray(self.size)
        self.maps: list[MapSlot] = []
        self.pointers: list[tuple[int, int]] = []
        self.shifted: list[tuple[int, int, int]] = []  # pointers into a tensor: offset, tensor, bytes from its begin
        self.floats: list[tuple[int, int]] = []
        self.computed: list[tuple[int, FloatParameter]] = []
        self.workspace_at: list[tuple[int, int]] = []  # (offset of the workspace's address, bytes added to it)
        self.scratch_at: list[tuple[int, int]] = []
        self.scratch_bytes = evaluate(record.scratch, env)
        for offset, parameter in flat(record.parameters):
            if isinstance(parameter, TensorMapParameter):
                self.maps.append(
                    map_slot(driver, loaded.device.context, parameter, env, self.index[parameter.argument])
                )
            elif isinstance(parameter, FloatParameter):
                if parameter.argument and parameter.dtype == "f32":
                    self.floats.append((offset, scalars[parameter.argument]))
                else:
                    known = replace(parameter, argument="", value=with_integers(parameter.value, env))
                    self.computed.append((offset, known))
            elif isinstance(parameter, IntegerParameter):
                self._put_integer(parameter, offset, env)
            else:
                self._put_pointer(parameter, offset, env)

    def _put_integer(self, parameter: IntegerParameter, offset: int, env: Mapping[str, int]) -> None:
        value = evaluate(parameter.value, env)
        low, high = parameter.range
        if not low <= value <= high:
            raise ArgumentError(
                f"parameter {parameter.name} = {value}; it does not fit into {8 * parameter.size} bits; use a smaller"
                " shape"
            )
        self.template[offset : offset + parameter.size] = parameter.to_bytes(value)

    def _put_pointer(self, parameter: PointerParameter, offset: int, env: Mapping[str, int]) -> None:
        shift = evaluate_address(parameter.shift, env)
        if parameter.argument == "workspace":
            self.workspace_at.append((offset, shift))
        elif parameter.argument == "scratch":
            self.scratch_at.append((offset, shift))
        elif shift:
            self.shifted.append((offset, self.index[parameter.argument], shift))
        else:
            self.pointers.append((offset, self.index[parameter.argument]))

    def _check_constraints(self, env: Mapping[str, int]) -> None:
        """Those that read more than shapes and strides; the others were checked with them."""
        for constraint in self.record.constraints:
            if not constraint.reads <= self.bound.env.keys() and evaluate(constraint.expr, env) != 0:
                given = {**{dim.name: env[dim.name] for dim in self.record.dims}, **self._floats}
                shown = ", ".join(f"{name} = {value}" for name, value in given.items())
                raise ArgumentError(f"{constraint.message}; got {shown}")

    def _check_grid(self, env: Mapping[str, int]) -> None:
        for axis, blocks, cluster, limit in zip("xyz", self.grid, self.record.cluster, GRID_LIMITS, strict=True):
            if not 1 <= blocks <= limit or blocks % cluster:
                values = ", ".join(f"{name} = {env[name]}" for name in sorted(env) if "." not in name)
                raise ArgumentError(
                    f"grid {axis} is {blocks} blocks for {values}; it must be 1 to {limit}, a multiple of {cluster}"
                    " (the cluster)"
                )

    def _check_block(self, env: Mapping[str, int]) -> None:
        """What is no constant of the record; those were checked with it."""
        values = ", ".join(f"{name} = {env[name]}" for name in sorted(env) if "." not in name)
        x, y, z = self.block
        if min(self.block) < 1 or x * y * z > THREADS:
            raise ArgumentError(
                f"the block is {x}x{y}x{z} threads for {values}; each is at least 1 and their product at most {THREADS}"
            )
        if not isinstance(self.record.dynamic_shared, int) and not 0 <= self.shared <= self.loaded.most_shared:
            raise ArgumentError(
                f"shared memory is {self.shared} bytes a block for {values}; {self.loaded.device} has 0 to"
                f" {self.loaded.most_shared} for it"
            )

    def take(self, addresses: list[int]) -> Block:
        """A block that nobody else uses; return it by appending it to `spare`. Thread-safe."""
        try:
            return self.spare.pop()
        except IndexError:
            self.place(addresses)
            return Block(self, addresses)

    def fill(self, block: Block, addresses: list[int], scalars: Sequence[float | int] | None = None) -> None:
        """Writes one launch's changed parameters into `block`, after the checks that depend on addresses.

        scalars: in the record's order; None keeps those of before. After an ArgumentError the block is as before.
        """
        memory, before = block.memory, block.addresses
        if addresses != before:
            self.place(addresses)
            moved = [at for at, address in enumerate(addresses) if address != before[at]]
            if self.maps:
                self._put_maps(block, [slot for at in moved for slot in self.users[at][1]], addresses)
            for at in moved:
                address = addresses[at]
                for offset, shift in self.users[at][0]:
                    _POINTER.pack_into(memory, offset, address + shift & _WRAP)
            block.addresses = addresses
        if scalars is not None and scalars is not block.scalars:
            for offset, index in self.floats:
                _FLOAT.pack_into(memory, offset, scalars[index])
            if self.computed:
                pairs = zip(self.record.scalars, scalars, strict=True)
                known = {scalar.name: scalar.rounded(value) for scalar, value in pairs if scalar.is_float}
                for offset, parameter in self.computed:
                    memory[offset : offset + parameter.size] = parameter.to_bytes(parameter.evaluate(known))
            block.scalars = scalars

    def move(self, block: Block, addresses: list[int], position: int) -> None:
        """`fill` for a filled block of which tensor `position` alone lies elsewhere than before."""
        pointers, slots, mask, near = self.users[position]
        address = addresses[position]
        suspect = type(address) is not int or not 0 < address <= _WRAP or address & mask
        if not suspect:
            for other, low, high in near:
                if low < addresses[other] - address < high:
                    suspect = True
        if suspect:
            check_placement(self.record, self.bound, self.overlaps, addresses)
        if slots:
            self._put_maps(block, slots, addresses)
        for offset, shift in pointers:
            _POINTER.pack_into(block.memory, offset, address + shift & _WRAP)
        block.addresses = addresses

    def _put_maps(self, block: Block, slots: Sequence[int], addresses: list[int]) -> None:
        """Moves the tensor maps `slots` of `block` to these addresses; after an error they are as before."""
        maps = block.maps
        try:
            for index in slots:
                slot = self.maps[index]
                slot.move(maps[index], slot.address(addresses, self.names))
        except BaseException:
            for index in slots:
                self.maps[index].move(maps[index], self.maps[index].address(block.addresses, self.names))
            raise

    def aim(self, block: Block, handle: int, *, scratch: bool = True) -> None:
        """Sets a block's stream, whose workspace it then uses, and its `scratch`."""
        check_handle(handle)
        if self.workspace_at:
            assert self.loaded.workspaces is not None
            address = self.loaded.workspaces.of(handle)
            for offset, shift in self.workspace_at:
                _POINTER.pack_into(block.memory, offset, address + shift & _WRAP)
        if self.scratch_at and scratch:
            self.put_scratch(block, handle, self.scratch_bytes, [shift for _, shift in self.scratch_at])
        block.config.hStream = handle
        # Every thread has a per-thread default stream of its own behind the one handle.
        block.stream = None if handle == PER_THREAD and (self.workspace_at or self.scratch_at) else handle

    def put_scratch(self, block: Block, handle: int, size: int, shifts: Sequence[int]) -> None:
        """Gives a block `size` bytes of the stream's scratch. shifts: where in them each pointer begins."""
        assert self.loaded.scratch is not None
        address = self.loaded.scratch.of(handle, size)
        for (offset, _), shift in zip(self.scratch_at, shifts, strict=True):
            _POINTER.pack_into(block.memory, offset, address + shift & _WRAP)

    def place(self, addresses: list[int]) -> None:
        """Checks alignment and overlap, once for each combination of addresses."""
        key = tuple(addresses)
        if key in self._placed:
            return
        for name, address in zip(self.names, addresses, strict=True):
            check_address(name, address)
        if self._suspect(addresses):
            check_placement(self.record, self.bound, self.overlaps, addresses)
        if len(self._placed) >= _PLACEMENTS_KEPT:
            self._placed.clear()
        self._placed.add(key)

    def _suspect(self, addresses: Sequence[int]) -> bool:
        """Whether an address is null or misaligned, or two tensors are so near that they may overlap."""
        for index, mask in self._aligned:
            address = addresses[index]
            if address & mask or not address:
                return True
        for first, second, low, high in self._near:  # noqa: SIM110 (a generator costs as much as the comparisons)
            if low < addresses[second] - addresses[first] < high:
                return True
        return False


class Block:
    """The host memory of one launch: parameters, the array of their addresses, the driver's launch configuration.

    Whoever holds a block is alone with it: a bound launch for good, a call until it has launched.
    """

    __slots__ = ("_buffer", "_elsewhere", "_pointers", "addresses", "config", "maps", "memory", "parameters", "scalars",
                 "stream")  # fmt: skip

    def __init__(self, plan: LaunchPlan, addresses: list[int]) -> None:
        api, record = plan.driver.api, plan.record
        self._buffer = ctypes.create_string_buffer(plan.size + _BASE_ALIGNMENT)
        start = -ctypes.addressof(self._buffer) % _BASE_ALIGNMENT
        self.memory = memoryview(self._buffer).cast("B")[start : start + plan.size]
        self.memory[:] = plan.template
        base = ctypes.addressof(self._buffer) + start
        count = len(record.parameters)
        self._pointers = (ctypes.c_void_p * max(count, 1))()
        # The driver takes parameters in the kernel's order, which is that of their offsets.
        # A tensor map stays where the driver's own object has it, so that another address can be put in.
        self.maps = [slot.encode(slot.address(addresses, plan.names)) for slot in plan.maps]
        places = {slot.offset: tensor_map.getPtr() for slot, tensor_map in zip(plan.maps, self.maps, strict=True)}
        for index, offset in enumerate(sorted(parameter.offset for parameter in record.parameters)):
            self._pointers[index] = places.get(offset, base + offset)
        self.parameters = ctypes.addressof(self._pointers) if count else 0
        self.config = launch_config(
            api, record, plan.grid, plan.block, plan.shared, plan.loaded.device, plan.priority, plan.handles
        )
        if plan.driver.plans is not None:
            plan.driver.plans[id(self.config)] = plan
        for offset, index in plan.pointers:
            _POINTER.pack_into(self.memory, offset, addresses[index])
        for offset, index, shift in plan.shifted:
            _POINTER.pack_into(self.memory, offset, addresses[index] + shift & _WRAP)
        self.addresses = addresses  # those that `maps` and `memory` hold
        self.scalars: Sequence[float | int] | None = None  # those that `memory` holds
        self.stream: int | None = None  # the one that `config` and the workspace are for

    def point(self, plan: LaunchPlan, places: Mapping[int, int], memory: object) -> None:
        """Lets the driver take parameters from elsewhere, where `fill` and `move` do not write.

        places: their addresses by offset, all in `memory`, which is kept.
        """
        for index, offset in enumerate(sorted(parameter.offset for parameter in plan.record.parameters)):
            if offset in places:
                self._pointers[index] = places[offset]
        self._elsewhere = memory


def launch_config(
    api: Any, record: LaunchRecord, grid: tuple[int, ...], block: tuple[int, ...], shared: int, device: Device,
    priority: int | None = None, handles: Mapping[str, int] | None = None,
) -> Any:  # fmt: skip
    """The driver's configuration of a launch of `record` over `grid`. Its attributes: the clusters where the device has
    clusters, what the record switches on, a priority where the launch has one of its own, and its events. handles: of
    these, by kind; without them it has none.
    """
    attributes = []

    def add(kind: str) -> Any:
        attribute = api.CUlaunchAttribute()
        attribute.id = getattr(api.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{kind}")
        attributes.append(attribute)
        return attribute.value

    if device.capability >= (9, 0):
        dims = add("CLUSTER_DIMENSION").clusterDim
        dims.x, dims.y, dims.z = record.cluster
        if record.preferred_cluster:
            dims = add("PREFERRED_CLUSTER_DIMENSION").preferredClusterDim
            dims.x, dims.y, dims.z = record.preferred_cluster
    if record.attributes.get("cooperative"):
        add("COOPERATIVE").cooperative = 1
    if record.attributes.get("programmatic_stream_serialization"):
        add("PROGRAMMATIC_STREAM_SERIALIZATION").programmaticStreamSerializationAllowed = 1
    if priority is not None:
        add("PRIORITY").priority = priority
    for event in record.events if handles else ():
        programmatic = event.kind == PROGRAMMATIC
        value = add("PROGRAMMATIC_EVENT" if programmatic else "LAUNCH_COMPLETION_EVENT")
        fields = value.programmaticEvent if programmatic else value.launchCompletionEvent
        fields.event, fields.flags = (handles or {})[event.kind], event.flags
        if programmatic:
            fields.triggerAtBlockStart = event.at_block_start
    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def active_clusters(driver: Driver, record: LaunchRecord, function: Any, device: Device) -> int:
    """Clusters of `record`'s launch that the device runs at a time, the context being current."""
    block, shared = (evaluate(extent, {}) for extent in record.block), evaluate(record.dynamic_shared, {})
    config = launch_config(driver.api, record, record.cluster, tuple(block), shared, device)
    count: int = driver.check(driver.api.cuOccupancyMaxActiveClusters(function, config), "cuOccupancyMaxActiveClusters")
    return count
