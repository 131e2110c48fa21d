"""Argument sets to prove a launch record on: edges, random ones, and both sides of every boundary in the record.

All of them are launchable.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusekit.abi import Dim, IntegerParameter, LaunchRecord, RecordError, TensorArgument, TensorMapParameter, flat
from fusekit.abi.expr import evaluate, evaluate_address
from fusekit.abi.limits import THREADS
from fusekit.abi.tensormap import TensorMap
from fusekit.compiler.boundaries import Axis, FloatAxis, directed
from fusekit.errors import BuildError

ADDRESS_LIMIT = 2**47
_ATTEMPTS = 400
_SMALL = 2**10
# Padding between the rows of a tensor whose strides are free, in steps of its stride divisor.
_TIGHT, _ONE_STEP, _RANDOM = 0, 1, -1
_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_MOST_SHARED = 227 << 10  # bytes of a block: of the H100, as the recording driver has it
_SPECIAL_FLOATS = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), 1e-45, 3.4028234663852886e38)
_MOST_MULTIPROCESSORS, _MOST_CLUSTERS, _INT32 = 264, 2**16, 2**31
# Extents to look for boundaries from, in steps from the smallest.
_BASES = (0, 100)


@dataclass(frozen=True, slots=True)
class ArgumentSet:
    """One random call. values: dims, strides, addresses, i32 scalars, sm_count, cluster_margin, active_clusters and
    the record's own values, by the names that its expressions use; floats: the f32 scalars; stream: a handle; edge:
    chosen, not random.
    """

    label: str
    values: dict[str, int]
    floats: dict[str, float]
    stream: int
    edge: bool

    def __str__(self) -> str:
        shown = {name: value for name, value in self.values.items() if not name.endswith(".address")} | self.floats
        return f"{self.label}: " + ", ".join(f"{name}={value}" for name, value in shown.items())


def argument_sets(record: LaunchRecord, seed: str, count: int) -> list[ArgumentSet]:
    """At least `count` sets, and those of the record's boundaries; the same for the same record and seed.

    The edges: every dim at its smallest, one step above it with padded rows, and each dim in turn at the largest value
    with which the launch is still possible (tensor-map limits, grid limits, address space). Raises BuildError when the
    record's constraints leave nothing to try.
    """
    sampler = _Sampler(record, random.Random(f"fusekit proof {seed}"))
    sets = list(sampler.edges())
    while len(sets) < count:
        sets.append(sampler.search(f"random {len(sets)}"))
    return [*sets, *sampler.directed()]


class _Sampler:
    def __init__(self, record: LaunchRecord, source: random.Random) -> None:
        self._record, self._source = record, source
        self._launches = record.launches
        self._deciding = [scalar for scalar in record.scalars if scalar.name in record.deciding]
        self._smallest = {dim.name: _smallest(record, dim) for dim in record.dims}

    def edges(self) -> Iterator[ArgumentSet]:
        dims, smallest = self._record.dims, self._smallest
        for label, steps in (("smallest", _TIGHT), ("next to smallest", _ONE_STEP)):
            fixed = {dim.name: min(smallest[dim.name] + steps * dim.divisor, _largest(dim)) for dim in dims}
            sample = self._attempt(label, fixed, steps)
            if sample is not None:
                yield sample
        for dim in dims:
            extent = _largest(dim)
            while extent > smallest[dim.name]:
                sample = self._attempt(f"largest {dim.name}", {**smallest, dim.name: extent}, _TIGHT)
                if sample is not None:
                    yield sample
                    break
                extent = max(extent // 2 // dim.divisor * dim.divisor, smallest[dim.name])

    def search(self, label: str) -> ArgumentSet:
        for attempt in range(_ATTEMPTS):
            padding = self._source.choice((_TIGHT, _RANDOM, _RANDOM))
            # Numbers of any size seldom fit together where many are multiplied.
            fixed = self._small() if attempt >= _ATTEMPTS // 2 else {}
            sample = self._attempt(label, fixed, padding)
            if sample is not None:
                return replace(sample, edge=False)
        rules = "; ".join(constraint.message for constraint in self._record.constraints) or "none"
        raise BuildError(
            f"launch record: no launchable arguments in {_ATTEMPTS} random tries (constraints: {rules}); widen the dims"
            " or state the rules as divisors"
        )

    def _small(self) -> dict[str, int]:
        """Small dims and scalars."""
        extents = {}
        for dim in self._record.dims:
            step = dim.divisor * _log_uniform(self._source, _SMALL // dim.divisor)
            extents[dim.name] = min(self._smallest[dim.name] + step, _largest(dim))
        scalars = [scalar for scalar in self._record.scalars if scalar.is_integer and not scalar.bounded]
        return extents | {scalar.name: 1 + _log_uniform(self._source, _SMALL) for scalar in scalars}

    def directed(self) -> Iterator[ArgumentSet]:
        """Both sides of every boundary of the record, as far as they can be launched."""
        dims, smallest = self._record.dims, self._smallest
        axes: list[Axis | FloatAxis] = [Axis(dim.name, smallest[dim.name], _largest(dim), dim.divisor) for dim in dims]
        integers = [scalar for scalar in self._record.scalars if scalar.is_integer]
        axes += [Axis(scalar.name, scalar.minimum, scalar.maximum, scalar.divisor) for scalar in integers]
        axes += [Axis("sm_count", 1, _MOST_MULTIPROCESSORS, 1), Axis("cluster_margin", 0, _INT32 - 1, 1)]
        axes += [Axis("active_clusters", 1, _MOST_CLUSTERS, 1)]
        axes += [FloatAxis(scalar.name, scalar.dtype, sign) for scalar in self._deciding for sign in (1, -1)]
        bases = []
        for steps in _BASES:
            fixed = {dim.name: min(smallest[dim.name] + steps * dim.divisor, _largest(dim)) for dim in dims}
            sample = self._attempt("base", {**fixed, "sm_count": _MOST_MULTIPROCESSORS, "cluster_margin": 0}, _TIGHT)
            if sample is not None:
                bases.append(
                    {**sample.values, **{scalar.name: sample.floats[scalar.name] for scalar in self._deciding}}
                )
        for label, fixed in directed(self._record, axes, bases):
            sample = self._attempt(label, fixed, _RANDOM) or self._attempt(label, fixed, _TIGHT)
            if sample is not None:
                yield sample

    def _attempt(self, label: str, fixed: Mapping[str, Any], padding: int) -> ArgumentSet | None:
        """A set with the values in `fixed`, or None when it cannot be launched. padding: between rows."""
        record, source = self._record, self._source
        values = {dim.name: fixed.get(dim.name, self._extent(dim)) for dim in record.dims}
        try:
            if not all(_place(tensor, values, source, padding) for tensor in record.tensors):
                return None
        except RecordError:  # no value in 64 bits
            return None
        for memory in ("workspace", "scratch"):
            values[f"{memory}.address"] = source.randrange(2**32, ADDRESS_LIMIT) // 256 * 256
        values["sm_count"] = source.choice((132, 114, 78, source.randrange(8, _MOST_MULTIPROCESSORS)))
        values["cluster_margin"] = source.choice((0, 0, source.randrange(values["sm_count"] + 8)))
        values["active_clusters"] = source.randrange(1, values["sm_count"] + 1)
        floats: dict[str, float] = {}
        for scalar in record.scalars:
            if scalar.is_float:
                number = source.choice((*_SPECIAL_FLOATS, source.gauss(0, 10)))
                if scalar.name in record.deciding:  # of any size, and whole as often as not
                    whole = float(source.randrange(-9, 99))
                    number = source.choice((number, whole, source.gauss(0, 2.0 ** source.randrange(34))))
                floats[scalar.name] = fixed.get(scalar.name, scalar.rounded(number))
            elif scalar.bounded:
                many = (scalar.maximum - scalar.minimum) // scalar.divisor
                values[scalar.name] = scalar.minimum + scalar.divisor * _log_uniform(source, many)
            elif scalar.dtype == "i64":
                size = source.randrange(1 << source.randrange(1, 64))
                values[scalar.name] = source.choice((size, -size))
            else:
                values[scalar.name] = source.choice((source.randrange(-_INT32, _INT32), source.randrange(1, 2**16)))
        values |= {name: value for name, value in fixed.items() if name in values}
        try:
            values = record.environment(values, floats)
        except RecordError:
            return None
        sample = ArgumentSet(label, values, floats, stream=source.randrange(1, 2**47), edge=bool(fixed))
        launches = [launch for launch in self._launches if launch.when == 1 or evaluate(launch.when, values)]
        return sample if all(_launchable(launch, values) for launch in launches) else None

    def _extent(self, dim: Dim) -> int:
        low, high = self._smallest[dim.name], _largest(dim)
        step = _log_uniform(self._source, 2**20 // dim.divisor)
        return low + dim.divisor * min(step, (high - low) // dim.divisor)


def _place(tensor: TensorArgument, values: dict[str, int], source: random.Random, padding: int) -> bool:
    """Sets the tensor's strides and address in `values`; False when it does not fit into the address space."""
    extents = [evaluate(extent, values) for extent in tensor.shape]
    span = 1
    for index in reversed(range(tensor.rank)):
        if tensor.reads_stride(index):
            step = tensor.stride_divisor
            stride = -(-span // step) * step
            extra = _log_uniform(source, 2**39 // tensor.itemsize // step) if padding == _RANDOM else padding
            stride += step * extra
        else:
            stride = evaluate(tensor.strides[index], values)
        values[tensor.stride_variable(index)] = stride
        span = max(span, stride * extents[index])
    room = ADDRESS_LIMIT - 2**32 - span * tensor.itemsize
    if room <= 0:
        return False
    values[f"{tensor.name}.address"] = (2**32 + source.randrange(room)) // tensor.alignment * tensor.alignment
    return True


def _launchable(record: LaunchRecord, values: Mapping[str, int]) -> bool:
    """Whether a launcher would launch; values that an expression does not have mean no."""
    try:
        if any(evaluate(constraint.expr, values) for constraint in record.constraints):
            return False
        grid = [evaluate(extent, values) for extent in record.grid]
        if not all(1 <= extent <= limit for extent, limit in zip(grid, _GRID_LIMITS, strict=True)):
            return False
        block = [evaluate(extent, values) for extent in record.block]
        if min(block) < 1 or math.prod(block) > THREADS:
            return False
        if not 0 <= evaluate(record.dynamic_shared, values) <= _MOST_SHARED:
            return False
        for _, parameter in flat(record.parameters):
            if isinstance(parameter, IntegerParameter):
                low, high = parameter.range
                if not low <= evaluate(parameter.value, values) <= high:
                    return False
            elif isinstance(parameter, TensorMapParameter) and parameter.encoding == "driver":
                expected_map(parameter, values).check()
    except RecordError:
        return False
    return True


def expected_map(parameter: TensorMapParameter, values: Mapping[str, int]) -> TensorMap:
    """The tensor map that the record asks for under `values`."""
    value = evaluate if parameter.encoding == "driver" else evaluate_address
    return TensorMap(
        address=evaluate_address(parameter.address, values),
        dtype=parameter.dtype,
        dims=tuple(value(dim, values) for dim in parameter.dims),
        strides=tuple(value(stride, values) for stride in parameter.strides),
        box=parameter.box,
        element_strides=parameter.element_strides,
        interleave=parameter.interleave,
        swizzle=parameter.swizzle,
        l2_promotion=parameter.l2_promotion,
        oob_fill=parameter.oob_fill,
    )


def _smallest(record: LaunchRecord, dim: Dim) -> int:
    # A zero in skip_if_zero never reaches a launch.
    least = max(dim.minimum, 1) if dim.name in record.skip_if_zero else dim.minimum
    return -(-least // dim.divisor) * dim.divisor


def _largest(dim: Dim) -> int:
    return dim.maximum // dim.divisor * dim.divisor


def _log_uniform(source: random.Random, limit: int) -> int:
    """0 to `limit`, every order of magnitude as likely as any other."""
    return source.randrange(1 << source.randrange(max(limit, 1).bit_length() + 1)) % (limit + 1)
