"""Tensor maps on the launch path: encoded once for what they depend on, copied afterwards."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from fusekit.abi import TensorMapParameter, evaluate, evaluate_address
from fusekit.abi.expr import variables
from fusekit.errors import ArgumentError
from fusekit.runtime.driver import Driver

_DTYPES = {
    "bf16": "BFLOAT16", "fp16": "FLOAT16", "f32": "FLOAT32", "f64": "FLOAT64", "i32": "INT32", "i64": "INT64",
    "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64",
}  # fmt: skip
# Addresses kept for one map, and maps kept by one kernel: a training step's buffers, several times over.
_ADDRESSES_KEPT = 256
_MAPS_KEPT = 1024


class MapCache:
    """Encoded tensor maps of one kernel, by all that their bytes depend on: parameter, dims, strides, address."""

    def __init__(self) -> None:
        self._maps: dict[tuple[Any, ...], dict[int, bytes]] = {}

    def of(self, key: tuple[Any, ...]) -> dict[int, bytes]:
        """Address -> 128 bytes, for a map with these dims and strides."""
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= _MAPS_KEPT:
                self._maps.clear()
            found = self._maps.setdefault(key, {})
        return found


class MapSlot:
    """One tensor-map parameter with its dims and strides evaluated; `encode` adds the address."""

    def __init__(
        self, driver: Driver, context: Any, parameter: TensorMapParameter, env: Mapping[str, int], index: int,
        cache: MapCache,
    ) -> None:  # fmt: skip
        self.offset = parameter.offset
        self.end = parameter.offset + parameter.size
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
        self._maps = cache.of((parameter.name, *dims, *strides))
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
            getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_DTYPES[parameter.dtype]}"),
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
            if len(self._maps) >= _ADDRESSES_KEPT:
                self._maps.clear()
            found = self._maps[address] = self._encode(address)
        return found

    def _encode(self, address: int) -> bytes:
        api, check = self._driver.api, self._driver.check
        result = api.cuTensorMapEncodeTiled(*self._before, address, *self._after)
        if result[0] == api.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # the driver encodes inside any context, but in one
            check(api.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
            try:
                result = api.cuTensorMapEncodeTiled(*self._before, address, *self._after)
            finally:
                check(api.cuCtxPopCurrent(), "cuCtxPopCurrent")
        if result[0]:
            error = self._driver.error(result[0], f"cuTensorMapEncodeTiled for {self._name} at {address:#x}")
            raise ArgumentError(str(error), argument=self._argument)
        return ctypes.string_at(result[1].getPtr(), 128)
