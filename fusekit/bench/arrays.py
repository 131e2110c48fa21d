"""Random tensors of any size in device memory, for kernels whose results are timed and compared on the device.

A block of random numbers is made on the host and copied over the whole tensor on the device, doubling what is there:
gigabytes take milliseconds. The block's length has no factor in common with any row's, so rows differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.abi import evaluate
from fusekit.errors import UsageError
from fusekit.plan.activations import kind as kind_of
from fusekit.plan.operations import OPERATIONS
from fusekit.plan.quant import NONE, PACKED, SIDE, Quant
from fusekit.reference import group_sizes, mxfp4, offsets_of
from fusekit.reference.inputs import RMS, bits
from fusekit.reference.operands.gather import CHOICES
from fusekit.runtime import DeviceArray, Devices, Kernel

GROUPS = ("uneven", "even", "one")
BLOCK = 8_388_593  # the largest prime below 2**23
MOST_IN_ONE = 0.9
SCALAR_ALPHA = 0.75


def sizes_of(groups: str, rows: int, count: int, seed: int = 1) -> NDArray[np.int64]:
    """int64[count] rows of each group, `rows` in all.

    groups: "uneven": in proportion to weights drawn evenly from 0.5 to 1.5; "even": equal, but for a remainder; "one":
    one group has nine tenths, the others share the rest evenly.
    """
    if groups == "uneven":
        return group_sizes(rows, count, seed)
    if groups not in GROUPS:
        raise UsageError(f"groups {groups!r}; they are {', '.join(GROUPS)}")
    first = round(rows * MOST_IN_ONE) if groups == "one" and count > 1 else 0
    others = count - (1 if first else 0)
    ends = np.arange(1, others + 1) * (rows - first) // others
    even = np.diff(ends, prepend=0)
    return np.insert(even, count // 2, first) if first else even


def index_of(sizes: NDArray[np.int64], rows: int, tokens: int, seed: int = 1) -> NDArray[np.int32]:
    """int32[rows]: the token of each row, in order within a group, as a router's choices lie."""
    rng = np.random.default_rng(seed)
    parts = [np.sort(rng.integers(0, tokens, size)) for size in sizes]
    index = np.concatenate([*parts, np.full(rows - int(sizes.sum()), -1)])
    return index.astype(np.int32)


def dims_of(spec: Mapping[str, Any], problem: Mapping[str, int]) -> dict[str, int]:
    """The record's dims for a spec's problem E, M, N, K: I is N of a backward activation, N / 2 of a forward one; P
    tokens of transposed factors.
    """
    kind = kind_of(spec["activation"]["kind"])
    forward_gated = kind.gated and not kind.backward
    room = -(-(problem["M"] + (SIDE - 1) * problem["E"]) // SIDE) * SIDE  # for tokens, groups at multiples of SIDE
    return {**problem, "I": problem["N"] // 2 if forward_gated else problem["N"], "P": room}


class Tensors:
    """Every tensor of a GEMM `kernel` for `problem` (E, M, N, K) and `sizes` rows a group: inputs random, outputs
    poisoned. `arrays` by argument name; `scalars` are those that have no default.
    """

    def __init__(
        self, devices: Devices, kernel: Kernel, problem: Mapping[str, int], sizes: NDArray[np.int64], seed: int = 0
    ) -> None:  # fmt: skip
        self.kernel, self._seed, self._devices = kernel, seed, devices
        self._exponents = _exponents(kernel.spec, problem)
        self._sizes, self._depth = sizes, problem["K"]
        self.scalars = {"alpha": SCALAR_ALPHA} if kernel.spec["alpha"] == "scalar" else {}
        self.arrays: dict[str, DeviceArray] = {}
        choices = kernel.spec.get("choices") or kernel.spec.get("layer", {}).get("topk") or CHOICES
        dims = dims_of(kernel.spec, problem) | {"T": max(problem["M"] // choices, 1)}
        self._tokens = dims["T"]
        try:
            for tensor in kernel.record.tensors:
                shape = tuple(evaluate(extent, dims) for extent in tensor.shape)
                self.arrays[tensor.name] = DeviceArray(devices, shape, tensor.dtype, kernel.device)
            for tensor in kernel.record.tensors:
                if tensor.role == "input":
                    self._fill(tensor.name)
            self.reset()
        except BaseException:
            self.free()
            raise

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call."""
        return {**self.arrays, **self.scalars}

    @property
    def outputs(self) -> list[str]:
        """Names of what the kernel writes."""
        return [tensor.name for tensor in self.kernel.record.tensors if tensor.written]

    def reset(self) -> None:
        """Poisons the outputs: all ones, a NaN in every format. What is added to gets its random numbers again.

        Waits for the device before and after: streams that do not wait for the default one may be in use.
        """
        device = self._devices.get(self.kernel.device)
        self._devices.synchronize(device)
        for tensor in self.kernel.record.tensors:
            if tensor.role == "inout":
                self._fill(tensor.name)
            elif tensor.written:
                self.arrays[tensor.name].fill(0xFF)
        self._devices.synchronize(device)

    def _fill(self, name: str) -> None:
        array = self.arrays[name]
        if name == "offsets":
            array.upload(offsets_of(self._sizes))
            return
        if name == "index":
            array.upload(index_of(self._sizes, array.shape[0], self._tokens))
            return
        if name == "indices":  # as many for each group
            array.upload(np.arange(_count(array), dtype=np.int32).reshape(array.shape) % len(self._sizes))
            return
        seed = self._seed + sum(name.encode())
        if array.dtype == "f32":
            block: NDArray[Any] = np.random.default_rng(seed).uniform(0.25, 1.0, min(BLOCK, _count(array)))
            array.upload_repeated((block * 2.0 ** self._exponents.get(name, 0)).astype(np.float32))
        elif array.dtype == PACKED and name == "w_s":
            rng, count = np.random.default_rng(seed), min(BLOCK, _count(array))
            array.upload_repeated(mxfp4.random_scales((count,), self._depth, rng))
        elif array.dtype == PACKED:
            array.upload_repeated(mxfp4.random_bytes((min(BLOCK, _count(array)),), seed))
        else:
            exponent = self._exponents.get(name, 0)
            array.upload_repeated(bits((min(BLOCK, _count(array)),), array.dtype, seed, exponent))

    def free(self) -> None:
        """Gives the memory back."""
        while self.arrays:
            self.arrays.popitem()[1].free()


def _count(array: DeviceArray) -> int:
    return int(np.prod(array.shape))


def _exponents(spec: Mapping[str, Any], problem: Mapping[str, int]) -> dict[str, int]:
    """Powers of two by which inputs are scaled so that products have a spread of about 1."""
    wgrad, fp8 = OPERATIONS[spec["op"]].reduces_rows, Quant.of(spec["quant"]).inputs != NONE
    depth = problem["M"] / problem["E"] if wgrad else problem["K"]
    factor = "dy" if wgrad else "w"
    if fp8:  # FP8 values fill their range, scales are free
        factor = "dy_ts" if wgrad else "w_s"
    return {factor: -round(0.5 * float(np.log2(max(depth, 1) * RMS**4))), "bias": -1}
