"""A launch worked out for one combination of shapes, strides, device and margin: everything but the addresses.

A `Plan` is made once and kept; a `Block` is the memory of one launch: parameters at the offsets that the kernel
expects, the array of pointers to them, and the launch configuration. Filling a block and launching it allocates
nothing.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusekit.abi import (
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    PointerParameter,
    TensorMapParameter,
    evaluate,
    evaluate_address,
)
from fusekit.errors import ArgumentError, DriverError
from fusekit.runtime.arguments import Bound, Pair, check_placement
from fusekit.runtime.devices import Device
from fusekit.runtime.driver import Driver

_TENSOR_MAP_DTYPES = {
    "bf16": "BFLOAT16", "fp16": "FLOAT16", "f32": "FLOAT32", "f64": "FLOAT64", "i32": "INT32", "i64": "INT64",
    "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64",
}  # fmt: skip
_INTEGER_FORMATS = {"i32": "<i", "i64": "<q"}
_GRID_LIMITS = (2**31 - 1, 65535, 65535)
# A tensor map seen again is copied instead of encoded; as many are kept as a training step has buffers.
_MAPS_KEPT = 64
_BASE_ALIGNMENT = 64
_POINTER = struct.Struct("<Q")
_FLOAT = struct.Struct("<f")


@dataclass(slots=True)
class Loaded:
    """A kernel made ready on one device. `function` becomes None when the kernel is unloaded."""

    device: Device
    function: Any
    workspace: int = 0


class MapSlot:
    """One tensor-map parameter with its dims and strides evaluated; `encode` adds the address."""

    def __init__(
        self, driver: Driver, context: Any, parameter: TensorMapParameter, env: Mapping[str, int], index: int
    ) -> None:
        self.offset = parameter.offset
        self.tensor = index
        self._driver = driver
        self._context = context
        self._name = f"{parameter.argument} (tensor map {parameter.name})"
        self._argument = parameter.argument
        # Almost always the tensor's own address, which needs no evaluation.
        self._address = None if parameter.address == f"{parameter.argument}.address" else parameter.address
        self._env = env
        self._maps: dict[int, bytes] = {}
        api = driver.api
        dims = [evaluate(expr, env) for expr in parameter.dims]
        strides = [evaluate(expr, env) for expr in parameter.strides]
        for dim in dims:
            if not 1 <= dim <= 2**32:
                raise ArgumentError(f"{self._name}: extent {dim}; TMA allows 1 to 2**32", argument=self._argument)
        for stride in strides:
            if not 0 <= stride < 2**40 or stride % 16:
                raise ArgumentError(
                    f"{self._name}: stride {stride} bytes; TMA takes multiples of 16 below 2**40",
                    argument=self._argument,
                )
        self._before = (
            getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TENSOR_MAP_DTYPES[parameter.dtype]}"),
            parameter.rank,
        )
        promotion = "NONE" if parameter.l2_promotion == "none" else f"L2_{parameter.l2_promotion}"
        fill = "NONE" if parameter.oob_fill == "none" else "NAN_REQUEST_ZERO_FMA"
        self._after = (
            [api.cuuint64_t(dim) for dim in dims],
            [api.cuuint64_t(stride) for stride in strides],
            [api.cuuint32_t(extent) for extent in parameter.box],
            [api.cuuint32_t(step) for step in parameter.element_strides],
            getattr(api.CUtensorMapInterleave, f"CU_TENSOR_MAP_INTERLEAVE_{parameter.interleave.upper()}"),
            getattr(api.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{parameter.swizzle.upper()}"),
            getattr(api.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"),
            getattr(api.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"),
        )

    def encoded(self, addresses: Sequence[int], names: Sequence[str]) -> bytes:
        """The 128 bytes for these addresses of the record's tensors."""
        if self._address is None:
            address = addresses[self.tensor]
        else:
            env = dict(self._env)
            env.update((f"{name}.address", value) for name, value in zip(names, addresses, strict=True))
            address = evaluate_address(self._address, env)
        found = self._maps.get(address)
        if found is None:
            if len(self._maps) >= _MAPS_KEPT:
                self._maps.clear()
            found = self._maps[address] = self._encode(address)
        return found

    def _encode(self, address: int) -> bytes:
        api, check = self._driver.api, self._driver.check
        check(api.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")  # the driver encodes only inside a context
        try:
            result = api.cuTensorMapEncodeTiled(*self._before, address, *self._after)
        finally:
            check(api.cuCtxPopCurrent(), "cuCtxPopCurrent")
        if result[0]:
            error = self._driver.error(result[0], f"cuTensorMapEncodeTiled for {self._name} at {address:#x}")
            raise ArgumentError(str(error), argument=self._argument)
        return ctypes.string_at(result[1].getPtr(), 128)


class Plan:
    """The launch of `record` for one signature. `skip` means that there is nothing to do (a dim is 0)."""

    def __init__(
        self, driver: Driver, record: LaunchRecord, loaded: Loaded, bound: Bound, overlaps: Sequence[Pair], margin: int,
        integers: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.driver = driver
        self.record = record
        self.loaded = loaded
        self.bound = bound
        self.overlaps = tuple(overlaps)
        # What a launch looks at first: (index, bits that must be 0) and (two indices, range of distances that is near).
        self._aligned = tuple(
            (position, tensor.alignment - 1)
            for position, (tensor, span) in enumerate(zip(record.tensors, bound.spans, strict=True))
            if span
        )
        self._near = tuple((pair.first, pair.second, -pair.second_span, pair.first_span) for pair in self.overlaps)
        self.names = tuple(tensor.name for tensor in record.tensors)
        self.skip = any(bound.env[name] == 0 for name in record.skip_if_zero)
        self.spare: list[Block] = []
        if self.skip:
            return
        env = {**bound.env, "sm_count": loaded.device.sm_count, "cluster_margin": margin}
        self.grid = tuple(evaluate(expr, env) for expr in record.grid)
        self._check_grid(env)
        index = {name: position for position, name in enumerate(self.names)}
        scalars = {scalar.name: position for position, scalar in enumerate(record.scalars)}
        self.size = max((parameter.offset + parameter.size for parameter in record.parameters), default=0)
        self.template = bytearray(self.size)
        self.maps: list[MapSlot] = []
        self.pointers: list[tuple[int, int]] = []
        self.floats: list[tuple[int, int]] = []
        for parameter in record.parameters:
            if isinstance(parameter, TensorMapParameter):
                self.maps.append(MapSlot(driver, loaded.device.context, parameter, env, index[parameter.argument]))
            elif isinstance(parameter, FloatParameter):
                self.floats.append((parameter.offset, scalars[parameter.argument]))
            elif isinstance(parameter, IntegerParameter):
                self._put_integer(parameter, {**env, **integers})
            elif isinstance(parameter, PointerParameter):
                if parameter.argument == "workspace":
                    _POINTER.pack_into(self.template, parameter.offset, loaded.workspace)
                else:
                    self.pointers.append((parameter.offset, index[parameter.argument]))

    def _put_integer(self, parameter: IntegerParameter, env: Mapping[str, int]) -> None:
        value = evaluate(parameter.value, env)
        bits = 8 * parameter.size
        if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
            raise ArgumentError(
                f"parameter {parameter.name} = {value}; it does not fit into {bits} bits; use a smaller shape"
            )
        struct.pack_into(_INTEGER_FORMATS[parameter.dtype], self.template, parameter.offset, value)

    def _check_grid(self, env: Mapping[str, int]) -> None:
        for axis, blocks, cluster, limit in zip("xyz", self.grid, self.record.cluster, _GRID_LIMITS, strict=True):
            if not 1 <= blocks <= limit or blocks % cluster:
                values = ", ".join(f"{name} = {env[name]}" for name in sorted(env) if "." not in name)
                raise ArgumentError(
                    f"grid {axis} is {blocks} blocks for {values}; it must be 1 to {limit}, a multiple of {cluster}"
                    " (the cluster)"
                )

    def take(self) -> Block:
        """A block that nobody else uses; give it back by appending it to `spare`. Safe from many threads."""
        try:
            return self.spare.pop()
        except IndexError:
            return Block(self)

    def fill(self, block: Block, addresses: Sequence[int], scalars: Sequence[float | int]) -> None:
        """Writes every parameter of one launch into `block`, after the checks that depend on addresses."""
        if self._suspect(addresses):
            check_placement(self.record, self.bound, self.overlaps, addresses)
        memory = block.memory
        for offset, index in self.pointers:
            _POINTER.pack_into(memory, offset, addresses[index])
        for offset, index in self.floats:
            _FLOAT.pack_into(memory, offset, scalars[index])
        for slot in self.maps:
            memory[slot.offset : slot.offset + 128] = slot.encoded(addresses, self.names)

    def _suspect(self, addresses: Sequence[int]) -> bool:
        """Whether an address is null or misaligned, or two tensors come so near that they may overlap."""
        for index, mask in self._aligned:
            address = addresses[index]
            if address & mask or not address:
                return True
        return any(low < addresses[second] - addresses[first] < high for first, second, low, high in self._near)


class Block:
    """The host memory of one launch: parameters, the array of their addresses, the driver's launch configuration."""

    __slots__ = ("_buffer", "_pointers", "config", "memory", "parameters")

    def __init__(self, plan: Plan) -> None:
        api, record = plan.driver.api, plan.record
        self._buffer = ctypes.create_string_buffer(plan.size + _BASE_ALIGNMENT)
        start = -ctypes.addressof(self._buffer) % _BASE_ALIGNMENT
        self.memory = memoryview(self._buffer).cast("B")[start : start + plan.size]
        self.memory[:] = plan.template
        base = ctypes.addressof(self._buffer) + start
        count = len(record.parameters)
        self._pointers = (ctypes.c_void_p * max(count, 1))()
        # The driver takes parameters in the kernel's order, which is that of their offsets.
        for index, offset in enumerate(sorted(parameter.offset for parameter in record.parameters)):
            self._pointers[index] = base + offset
        self.parameters = ctypes.addressof(self._pointers) if count else 0
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = plan.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = record.block
        config.sharedMemBytes = record.dynamic_shared
        attributes = launch_attributes(api, record, plan.loaded.device)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        self.config = config


def launch_attributes(api: Any, record: LaunchRecord, device: Device) -> list[Any]:
    """The launch attributes of `record`: the cluster where the device has clusters, and what the record switches on."""
    kinds, attributes = api.CUlaunchAttributeID, []
    if device.capability >= (9, 0):
        cluster = api.CUlaunchAttribute()
        cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dims = cluster.value.clusterDim
        dims.x, dims.y, dims.z = record.cluster
        attributes.append(cluster)
    if record.attributes.get("cooperative"):
        cooperative = api.CUlaunchAttribute()
        cooperative.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        attributes.append(cooperative)
    if record.attributes.get("programmatic_stream_serialization"):
        serialization = api.CUlaunchAttribute()
        serialization.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        serialization.value.programmaticStreamSerializationAllowed = 1
        attributes.append(serialization)
    return attributes


def launch(plan: Plan, block: Block, handle: int) -> None:
    """One cuLaunchKernelEx of a filled block in the stream `handle`, in the context of the plan's device."""
    api, loaded = plan.driver.api, plan.loaded
    block.config.hStream = handle
    if handle > 2:  # a stream of its own knows its context
        status = api.cuLaunchKernelEx(block.config, loaded.function, block.parameters, 0)[0]
    else:
        status = _launch_in_context(api, plan, block)
    if status:
        raise _failure(plan, status, handle)


def _launch_in_context(api: Any, plan: Plan, block: Block) -> Any:
    context = plan.loaded.device.context
    current = plan.driver.check(api.cuCtxGetCurrent(), "cuCtxGetCurrent")
    if int(current) == int(context):
        return api.cuLaunchKernelEx(block.config, plan.loaded.function, block.parameters, 0)[0]
    plan.driver.check(api.cuCtxPushCurrent(context), "cuCtxPushCurrent")
    try:
        return api.cuLaunchKernelEx(block.config, plan.loaded.function, block.parameters, 0)[0]
    finally:
        plan.driver.check(api.cuCtxPopCurrent(), "cuCtxPopCurrent")


def _failure(plan: Plan, status: Any, handle: int) -> DriverError | ArgumentError:
    """What a failed launch most likely means; asked only then, so that a good launch pays nothing."""
    api, device = plan.driver.api, plan.loaded.device
    if plan.loaded.function is None:
        return ArgumentError("the kernel was unloaded; load it again before launching it")
    if handle > 2:
        failed, context = api.cuStreamGetCtx(handle)[:2]
        if not failed and int(context) != int(device.context):
            return ArgumentError(
                f"the stream {handle:#x} is not of the primary context of {device}, where the tensors are; use a stream"
                " of that device",
                argument="stream",
            )
    return plan.driver.error(status, f"cuLaunchKernelEx on {device}")
