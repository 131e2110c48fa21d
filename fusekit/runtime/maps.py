"""Tensor maps on the launch path: encoded once for dims and strides, then given other addresses in place."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from fusekit.abi import TensorMapParameter, evaluate, evaluate_address
from fusekit.abi.expr import variables
from fusekit.abi.parameters import TENSOR_MAP_BYTES
from fusekit.abi.tensormap import TensorMap, encode_raw
from fusekit.dtypes import DTYPES
from fusekit.errors import ArgumentError
from fusekit.runtime.driver import Driver

_RAW_WORDS = 2  # of a descriptor hold the address
MAP_ALIGNMENT = 64


def map_slot(
    driver: Driver, context: Any, parameter: TensorMapParameter, env: Mapping[str, int], index: int
) -> MapSlot:
    """The slot of `parameter`; index: of its tensor among the record's."""
    kind = MapSlot if parameter.encoding == "driver" else RawMapSlot
    return kind(driver, context, parameter, env, index)


class MapSlot:
    """One tensor-map parameter of a plan, its dims and strides evaluated."""

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
        self.reads = {name.removesuffix(".address") for name in variables(parameter.address) if ".address" in name}
        value = evaluate if parameter.encoding == "driver" else evaluate_address  # what is cut to fields may wrap
        dims = [value(expr, env) for expr in parameter.dims]
        strides = [value(expr, env) for expr in parameter.strides]
        self._prepare(parameter, dims, strides)

    def _prepare(self, parameter: TensorMapParameter, dims: list[int], strides: list[int]) -> None:
        api = self._driver.api
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
            getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{DTYPES[parameter.dtype].tensor_map}"),
            parameter.rank,
        )
        promotion = "NONE" if parameter.l2_promotion == "none" else f"L2_{parameter.l2_promotion}"
        fill = "NONE" if parameter.oob_fill == "none" else "NAN_REQUEST_ZERO_FMA"
        self._after = (
            [api.cuuint64_t(dim) for dim in dims],
            # At rank 1 there is none, but the driver wants a pointer all the same.
            [api.cuuint64_t(stride) for stride in strides or (16,)],
            [api.cuuint32_t(extent) for extent in parameter.box],
            [api.cuuint32_t(step) for step in parameter.element_strides],
            getattr(api.CUtensorMapInterleave, f"CU_TENSOR_MAP_INTERLEAVE_{parameter.interleave.upper()}"),
            getattr(api.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{parameter.swizzle.upper()}"),
            getattr(api.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}"),
            getattr(api.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"),
        )

    def address(self, addresses: Sequence[int], names: Sequence[str]) -> int:
        """Where this map begins, for these addresses of the record's tensors."""
        if self._address is None:
            return addresses[self.tensor]
        env = dict(self._env)
        env.update((f"{name}.address", value) for name, value in zip(names, addresses, strict=True))
        return evaluate_address(self._address, env)

    def encode(self, address: int) -> Any:
        """A new CUtensorMap at `address`. Raises ArgumentError for one that the driver refuses."""
        return self._call(self._driver.api.cuTensorMapEncodeTiled, *self._before, address, *self._after)

    def encode_as(self, address: int, dims: Sequence[int], strides: Sequence[int]) -> Any:
        """The same with other dims and strides."""
        api = self._driver.api
        shape = list(map(api.cuuint64_t, dims)), list(map(api.cuuint64_t, strides or (16,)))
        return self._call(api.cuTensorMapEncodeTiled, *self._before, address, *shape, *self._after[2:])

    def move(self, tensor_map: Any, address: int) -> None:
        """Sets the address of a map from `encode`, in place. Raises as `encode`."""
        if not address:  # an empty tensor's: the driver encodes it, but does not put it into a map that is there
            encoded = self.encode(address)  # kept while it is copied
            ctypes.memmove(tensor_map.getPtr(), encoded.getPtr(), TENSOR_MAP_BYTES)
        elif self._driver.api.cuTensorMapReplaceAddress(tensor_map, address)[0]:
            self._call(self._driver.api.cuTensorMapReplaceAddress, tensor_map, address)

    def _call(self, function: Any, *arguments: Any) -> Any:
        # It takes a context, and one of a device that has tensor maps: another one may be current, or none.
        driver = self._driver
        with nullcontext() if driver.is_inside(self._context) else driver.inside(self._context):
            result = function(*arguments)
        if result[0]:
            error = self._driver.error(result[0], f"encoding {self._name}")
            raise ArgumentError(str(error), argument=self._argument)
        return result[-1]


def memory_of(tensor_map: Any) -> memoryview:
    """The bytes of a map from `MapSlot.encode`, which has to be kept."""
    return memoryview((ctypes.c_char * TENSOR_MAP_BYTES).from_address(tensor_map.getPtr())).cast("B")


class RawMap:
    """A descriptor in its own memory, as the driver's objects have it."""

    def __init__(self, data: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + MAP_ALIGNMENT)
        start = -ctypes.addressof(self._buffer) % MAP_ALIGNMENT
        self.memory = memoryview(self._buffer).cast("B")[start : start + TENSOR_MAP_BYTES]
        self.memory[:] = data
        self._address = ctypes.addressof(self._buffer) + start

    def getPtr(self) -> int:  # noqa: N802 (the name in cuda.bindings)
        return self._address


class RawMapSlot(MapSlot):
    """A tensor map that the launcher writes itself, as the compiler's host code does: the driver would refuse it."""

    def _prepare(self, parameter: TensorMapParameter, dims: list[int], strides: list[int]) -> None:
        self._fields: dict[str, Any] = {
            "dtype": parameter.dtype, "dims": tuple(dims), "strides": tuple(strides), "box": parameter.box,
            "element_strides": parameter.element_strides, "interleave": parameter.interleave,
            "swizzle": parameter.swizzle, "l2_promotion": parameter.l2_promotion, "oob_fill": parameter.oob_fill,
        }  # fmt: skip

    def encode(self, address: int) -> Any:
        return RawMap(encode_raw(TensorMap(address=address, **self._fields)))

    def move(self, tensor_map: Any, address: int) -> None:
        address &= (1 << 57) - 1
        tensor_map.memory[: 4 * _RAW_WORDS] = address.to_bytes(4 * _RAW_WORDS, "little")
