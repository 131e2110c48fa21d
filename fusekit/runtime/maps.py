"""Tensor maps on the launch path: encoded once for dims and strides, then given another address where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from fusekit.abi import TensorMapParameter, evaluate, evaluate_address
from fusekit.abi.expr import variables
from fusekit.abi.parameters import TENSOR_MAP_BYTES
from fusekit.errors import ArgumentError
from fusekit.runtime.driver import Driver

DTYPE_NAMES = {
    "bf16": "BFLOAT16", "fp16": "FLOAT16", "f32": "FLOAT32", "f64": "FLOAT64", "i32": "INT32", "i64": "INT64",
    "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64",
}  # fmt: skip


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
        self.reads = {name.removesuffix(".address") for name in variables(parameter.address)}
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
            getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{DTYPE_NAMES[parameter.dtype]}"),
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

    def move(self, tensor_map: Any, address: int) -> None:
        """Gives a map that `encode` has made another address, in place. Errors are those of `encode`."""
        if not address:  # an empty tensor's: the driver encodes it, but does not put it into a map that is there
            made = self.encode(address)  # kept while it is copied
            ctypes.memmove(tensor_map.getPtr(), made.getPtr(), TENSOR_MAP_BYTES)
        elif self._driver.api.cuTensorMapReplaceAddress(tensor_map, address)[0]:
            self._call(self._driver.api.cuTensorMapReplaceAddress, tensor_map, address)

    def _call(self, function: Any, *arguments: Any) -> Any:
        api, check = self._driver.api, self._driver.check
        result = function(*arguments)
        # It takes a context, and one of a device that has tensor maps: another one may be current, or none.
        if result[0] and int(check(api.cuCtxGetCurrent(), "cuCtxGetCurrent")) != int(self._context):
            check(api.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
            try:
                result = function(*arguments)
            finally:
                check(api.cuCtxPopCurrent(), "cuCtxPopCurrent")
        if result[0]:
            error = self._driver.error(result[0], f"encoding {self._name}")
            raise ArgumentError(str(error), argument=self._argument)
        return result[-1]
