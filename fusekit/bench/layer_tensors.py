"""BlockTensor-up tensors of a layer, on the device and for the definition, which reads weights expert by expert.

A tensor is one block of random numbers, repeated: gigabytes take milliseconds to make, and the host holds one block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.bench.arrays import BLOCK
from fusekit.dtypes import DTYPES
from fusekit.plan.layer import Options
from fusekit.plan.layer.options import MLP, MXFP4
from fusekit.plan.quant import PACKED, SIDE, W_FORMAT
from fusekit.reference import decode, fp8, held, mxfp4
from fusekit.reference.inputs import RMS, bits
from fusekit.runtime import DeviceArray

Array = NDArray[np.float64]
LOSS = 16.0  # the loss's coefficient for each token: its gradient is then of the size of the others
GIVEN = ("dloss", "total_tokens", "aux_coefficient", "indices", "weights", "logits")  # not random


@dataclass(frozen=True)
class BlockTensor:
    """A tensor of `shape`: the elements of `block`, again and again. block: bits of a 16-bit format, or of e4m3."""

    shape: tuple[int, ...]
    dtype: str
    block: NDArray[Any]

    @cached_property
    def _numbers(self) -> NDArray[Any]:
        if self.dtype == W_FORMAT:
            return fp8.decode(self.block, self.dtype)
        wide = self.block.dtype.kind == "u" and self.dtype != PACKED
        return decode(self.block, self.dtype) if wide else self.block

    def place(self, array: DeviceArray) -> None:
        """Fills a tensor on the device."""
        array.upload_repeated(np.ascontiguousarray(self.block))

    def values(self, start: int = 0, count: int | None = None) -> Array:
        """`count` elements from `start`, as they lie in memory; all of the tensor without them."""
        count = int(np.prod(self.shape)) - start if count is None else count
        numbers = self._numbers
        first = start % len(numbers)
        turns = max(-(-(first + count) // len(numbers)), 1)
        return np.concatenate([numbers] * turns)[first : first + count].astype(np.float64)

    def whole(self) -> Array:
        """The whole tensor, in its shape."""
        return self.values().reshape(self.shape)


class Experts:
    """Weights [X, N, K] for the definition, in float64 one expert at a time. turned: the tensor has [X, K, N]. scales:
    of FP8 values, [X, N / 128, K / 128]; of MXFP4 values [X, N, K / 32, 16], [X, N, K / 32] bytes.
    """

    def __init__(self, tensor: BlockTensor, *, turned: bool, scales: Array | None = None) -> None:
        self._tensor, self._turned, self._scales = tensor, turned, scales
        shape = tensor.shape
        if tensor.dtype == PACKED:
            shape = (*shape[:-2], 2 * shape[-2] * shape[-1])
        count, *sides = shape if len(shape) == 3 else (1, *shape)
        self._sides = tuple(sides)
        self.shape = (count, *(reversed(sides) if turned else sides))

    def __getitem__(self, expert: int) -> Array:
        size = self._sides[0] * self._sides[1]
        if self._tensor.dtype == PACKED:
            assert self._scales is not None
            exponents = self._scales.reshape(-1, self._sides[0], self._scales.shape[-1])[expert]
            given = self._tensor.values(expert * size // 2, size // 2).reshape(*exponents.shape, -1)
            return mxfp4.decode(given.astype(np.uint8), exponents.astype(np.uint8))
        matrix = self._tensor.values(expert * size, size).reshape(self._sides)
        if self._scales is not None:
            matrix = scaled(matrix, self._scales.reshape(-1, *self._scales.shape[-2:])[expert])
        return matrix.T if self._turned else matrix

    def transpose(self, *axes: int) -> Experts:
        """[X, K, N]."""
        if axes != (0, 2, 1):
            raise ValueError(f"axes {axes}; an expert's own two change places: 0, 2, 1")
        return Experts(self._tensor, turned=not self._turned, scales=self._scales)


def scaled(matrix: Array, scales: Array) -> Array:
    """FP8 values [N, K] times the scale of each square."""
    each = np.repeat(np.repeat(scales, SIDE, axis=0), SIDE, axis=1)
    value: Array = matrix * each[: matrix.shape[0], : matrix.shape[1]]
    return value


def random_tensor(name: str, shape: tuple[int, ...], dtype: str, options: Options, seed: int) -> BlockTensor:
    """The tensor `name` of a layer. Projections are scaled so that what they give has a spread of about 1."""
    count, seed = min(BLOCK, max(int(np.prod(shape)), 1)), seed + sum(name.encode())
    depth = {"w1": options.hidden, "shared_w1": options.hidden, "router": options.hidden, "shared_gate": options.hidden,
             "w2": options.intermediate, "shared_w2": options.shared}.get(name.removesuffix("_s"))  # fmt: skip
    if options.weights == MXFP4 and depth and dtype == PACKED:
        if name.endswith("_s"):
            return BlockTensor(shape, dtype, mxfp4.random_scales((count,), depth, np.random.default_rng(seed)))
        return BlockTensor(shape, dtype, mxfp4.random_bytes((count,), seed))
    if depth and name.endswith("_s"):
        spread = 2.0 ** -round(0.5 * float(np.log2(depth * RMS**4)))
        scales = np.random.default_rng(seed).uniform(0.5 * spread, 1.5 * spread, count).astype(np.float32)
        return BlockTensor(shape, dtype, scales)
    if dtype == "f32" and (name == "router" or not depth):
        spread = {"expert_bias": 0.25, "router": (3.0 / options.hidden) ** 0.5 / RMS}.get(name, 1.0)
        block: NDArray[Any] = np.random.default_rng(seed).uniform(-spread, spread, count).astype(np.float32)
        return BlockTensor(shape, dtype, block)
    exponent = -round(0.5 * float(np.log2(depth * RMS**4))) if depth else 0
    exponent = 0 if dtype == W_FORMAT else exponent  # the scales do it
    exponent = -1 if name in ("b1", "b2", "router_bias") else exponent
    return BlockTensor(shape, dtype, bits((count,), dtype, seed, exponent).view(held(dtype)))


def given(dtype: str, value: Any) -> BlockTensor:
    """A tensor of known numbers."""
    numbers = np.asarray(value)
    return BlockTensor(numbers.shape, dtype, numbers.reshape(-1).astype(DTYPES[dtype].array))


def definitions(options: Options, tensors: Mapping[str, BlockTensor]) -> dict[str, Any]:
    """The parameters as the definition takes them: an MLP is a layer of one expert that every token has."""
    inputs: dict[str, Any] = {}
    for name, tensor in tensors.items():
        scales = tensors[f"{name}_s"].whole() if f"{name}_s" in tensors else None
        if name in ("w1", "w2"):
            inputs[name] = Experts(tensor, turned=options.b_major == "n", scales=scales)
        elif scales is not None and tensor.dtype == PACKED:
            inputs[name] = mxfp4.decode(tensor.whole().astype(np.uint8), scales.astype(np.uint8))
        elif scales is not None:
            inputs[name] = scaled(tensor.whole(), scales)
        elif name.removesuffix("_s") in tensors and name.endswith("_s"):
            continue
        elif name not in ("x", "dy", *GIVEN):
            inputs[name] = tensor.whole()
    if options.kind == MLP:
        inputs |= {name: inputs[name][None] for name in ("b1", "b2") if name in inputs}
        inputs["router"] = np.zeros((1, options.hidden))
    return inputs
