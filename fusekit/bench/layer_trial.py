"""Checks and times a whole layer on random inputs: forward, inference and backward pass (`fusekit run`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.bench.compare import WHOLE_ELEMENTS
from fusekit.bench.layer_tensors import GIVEN, LOSS, Array, BlockTensor, definitions, given, random_tensor
from fusekit.bench.replay import Replay
from fusekit.bench.timing import Run, Timing, own_stream, time_launch
from fusekit.bench.trial import GUARD, Verdict, written_around
from fusekit.dtypes import DTYPES
from fusekit.errors import UsageError
from fusekit.layers import Layer
from fusekit.library import Library
from fusekit.plan.layer import Options, program
from fusekit.plan.layer.options import LOGITS, MLP, MXFP4, X
from fusekit.plan.layer.program import BACKWARD, FORWARD, INFERENCE, QUANTISE
from fusekit.plan.operations import OPERATIONS
from fusekit.plan.quant import MX_SIDE, NONE, SIDE
from fusekit.reference import POISON, decode, encode, held, poisoned
from fusekit.reference import layer as definition
from fusekit.runtime import DeviceArray

# Relative Frobenius errors. y is rounded three times on its way, each time by about 1.5e-3; gradients more often. What
# comes through the scores' derivative is a difference of numbers that were rounded.
LIMITS = {"y": 6e-3, "loss": 1e-4, "drouter": 3e-2, "drouter_bias": 3e-2, "dlogits": 3e-2, "dweights": 2e-2}
LIMIT = 1e-2
# With a recipe so many times as far: a number between two FP8 values, 1/16 to 1/8 apart, may become either.
CODED = 2.5
BOTH = "both"  # passes, in one graph
SAMPLED_ROWS = 64  # of each expert's weight gradients, where there are more than can be compared
CHECKED = (256, 32)  # tokens, and those of a layer with weights of more than MANY elements
MANY = 10**9


@dataclass(frozen=True, slots=True)
class Sums:
    """A gradient of weights that is made where it is asked for: of each expert left^T . right over its own rows."""

    left: Array
    right: Array
    groups: list[slice]

    def rows(self, expert: int, rows: NDArray[np.int64]) -> Array:
        """Some rows of one expert's."""
        group = self.groups[expert]
        product: Array = self.left[group][:, rows].T @ self.right[group]
        return product


def checked_tokens(options: Options) -> int:
    """The default number of tokens of a check: it takes seconds, or a minute for the largest layer."""
    sides = options.hidden * options.intermediate * (options.sides + 1)
    return min(options.tokens, CHECKED[sides * max(options.experts, 1) > MANY])


def flops(layer: Layer, which: str, tokens: int) -> int:
    """Floating-point operations of the GEMMs of a pass, or of `BOTH`, for all outputs."""
    passes = (FORWARD, BACKWARD) if which == BOTH else (which,)
    return sum(2 * m * n * k for pass_ in passes for m, n, k in gemms(layer, pass_, tokens))


def options_of(layer: Layer) -> Options:
    """The table of a layer, of which `fusekit.reference` has the definition."""
    return Options(**layer.options.canonical())


def parts_of(layer: Layer) -> Mapping[str, Mapping[str, Any]]:
    """The table of each kernel of a layer, by part."""
    return program(options_of(layer)).parts


def gemms(layer: Layer, which: str, tokens: int) -> list[tuple[int, int, int]]:
    """(M, N, K) of each GEMM that a pass launches, as of one dense product."""
    parts = parts_of(layer)
    dims, shapes = layer.dims(tokens), []
    for step in layer.record.launched(which, layer.outputs(which), tokens):
        keys = parts[step.part]
        operation = OPERATIONS[keys["op"]]
        if operation.gemm:
            rows = dims["M" if operation.ragged else "T"]
            n, k = keys["problem"]["N"], keys["problem"]["K"]
            shapes.append((n, k, rows) if operation.reduces_rows else (rows, n, k))
    return shapes


def weight_bytes(layer: Layer, tokens: int) -> int:
    """Bytes of the weights that an inference pass reads, of as many experts as `tokens` choose at random."""
    o, parts, total = layer.options, parts_of(layer), 0.0
    chosen = o.experts * (1 - (1 - o.topk / o.experts) ** tokens) if o.experts else 1.0
    for step in layer.record.launched(INFERENCE, layer.outputs(INFERENCE), tokens):
        keys = parts[step.part]
        if OPERATIONS[keys["op"]].gemm:
            matrices = chosen if OPERATIONS[keys["op"]].ragged else 1.0
            n, k = keys["problem"]["N"], keys["problem"]["K"]
            size = n * k * (DTYPES[keys.get("dtype", "bf16")].bytes if "quant" not in keys else 1)
            scales = 4 * -(-n // SIDE) * -(-k // SIDE) if "quant" in keys else 0
            if o.weights == MXFP4 and "quant" in keys:
                size, scales = n * k // 2, n * k // MX_SIDE
            total += matrices * (size + scales)
    return round(total)


class LayerTrial:
    """Tensors of `layer` for `tokens`, outputs and scratch memory poisoned, with guards around them."""

    def __init__(self, library: Library, layer: Layer, tokens: int, seed: int, device: int | None = None) -> None:
        if layer.options.ranks > 1:
            raise UsageError(
                f"{layer.name} is launched by {layer.options.ranks} ranks together and has no trial on one device;"
                f" library.layer(name, ranks=...) launches it, and fusekit bench '{layer.name}.*' times its kernels"
            )
        self.layer, self.tokens, self.options = layer, tokens, options_of(layer)
        self.devices = library.devices
        self.device = self.devices.get(self.devices.current() if device is None else device)
        self.arrays: dict[str, DeviceArray] = {}
        self.tensors: dict[str, BlockTensor] = {}
        self.outputs = layer.outputs(FORWARD) | layer.outputs(BACKWARD)
        self.sizes = layer.sizes(tokens)
        dims = layer.dims(tokens)
        self._dims = dims
        self.fp8 = layer.outputs(QUANTISE)
        inputs = layer.inputs(QUANTISE) | layer.inputs(FORWARD) | layer.inputs(BACKWARD)
        inputs = {name: buffer for name, buffer in inputs.items() if name not in self.fp8}
        added = layer.record.passes[BACKWARD].adds
        try:
            self._make(inputs, seed)
            for name, buffer in inputs.items():
                self._place(name, buffer.extents(dims), buffer.dtype, guard=0)
                self.tensors[name].place(self.arrays[name])
            for name, buffer in (self.fp8 | self.outputs).items():
                self._place(name, buffer.extents(dims), buffer.dtype)
                if name in added:
                    self.tensors[name] = random_tensor(name, buffer.extents(dims), buffer.dtype, self.options, seed)
                    self.tensors[name].place(self.arrays[name])
            self._place("kept", (max(self.sizes.kept, 1),), "u8")
            self._place("scratch", (max(self.sizes.scratch, 1),), "u8")
        except BaseException:
            self.close()
            raise

    def _place(self, name: str, shape: tuple[int, ...], dtype: str, guard: int = GUARD) -> None:
        ends = {"offset": guard, "tail": guard}
        self.arrays[name] = DeviceArray(self.devices, shape, dtype, self.device.ordinal, **ends)
        if guard:
            self.arrays[name].fill(POISON & 0xFF)

    # -- tensors

    def _make(self, inputs: Mapping[str, Any], seed: int) -> None:
        """The inputs; what a router would give, where the layer is given that."""
        o, dims = self.options, self._dims
        for name, buffer in inputs.items():
            if name not in GIVEN:
                self.tensors[name] = random_tensor(name, buffer.extents(dims), buffer.dtype, o, seed)
        for name, value in (("dloss", 0.5), ("aux_coefficient", LOSS * self.tokens), ("total_tokens", self.tokens)):
            if name in inputs:
                self.tensors[name] = given(inputs[name].dtype, [value])
        self._router = None
        if o.kind != MLP and o.router["input"] != X:
            self._router = random_tensor("router", (o.experts, o.hidden), o.dtype, o, seed).whole()
            logits = self.tensors["x"].whole() @ self._router.T
            if o.router["input"] == LOGITS:
                self.tensors["logits"] = given("f32", logits)
            else:
                best = np.argsort(-logits, axis=1, kind="stable")[:, : o.topk]
                chosen = np.exp(np.take_along_axis(logits, best, axis=1))
                self.tensors["indices"] = given("i32", best)
                self.tensors["weights"] = given("f32", chosen / chosen.sum(axis=1, keepdims=True))

    def _arguments(self, which: str) -> dict[str, Any]:
        names = [*self.layer.inputs(which), *self.layer.outputs(which)]
        return {name: self.arrays[name] for name in names}

    # -- launches

    def bind(self, which: str) -> Any:
        """A pass on the tensors; inference keeps nothing."""
        kept: dict[str, Any] = {} if which == INFERENCE else {"kept": self.arrays["kept"]}
        if which == QUANTISE:
            return self.layer.bind_quantise(**self._arguments(which))
        bind = self.layer.bind_backward if which == BACKWARD else self.layer.bind_forward
        return bind(**kept, scratch=self.arrays["scratch"], **self._arguments(which))

    def launch(self) -> None:
        """Inference, then forward and, if there is one, backward, and waits. What inference gave is kept apart."""
        inference, passes = self.bind(INFERENCE), [self.bind(which) for which in self.passes]
        self.quantise()
        with own_stream(self.devices, self.device) as stream:
            inference(stream)
            self._wait(stream)
            self._inferred = {name: self._download(name) for name in self.layer.outputs(INFERENCE)}
            for name in self._inferred:
                self.arrays[name].fill(POISON & 0xFF)
            self.devices.synchronize(self.device)
            for run in passes:
                run(stream)
            self._wait(stream)

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes of training in order; for a layer for inference its forward pass."""
        return (FORWARD, BACKWARD) if self.options.trained else (FORWARD,)

    def passes_of(self, parts: Sequence[str]) -> list[str]:
        """The passes that launch one of the parts; that of inference only where no other does."""

        def launches(which: str) -> bool:
            steps = self.layer.record.launched(which, self.layer.outputs(which), self.tokens)
            return any(step.part in parts for step in steps)

        return [which for which in self.passes if launches(which)] or [INFERENCE]

    def quantise(self) -> None:
        """Quantises the weights if the layer has a recipe, and waits."""
        if self.fp8:
            with own_stream(self.devices, self.device) as stream:
                self.bind(QUANTISE)(stream)
                self._wait(stream)

    @contextmanager
    def inference(self, stream: int) -> Iterator[Run]:
        """The inference pass as a CUDA graph."""
        self.quantise()
        graph = Replay(self.devices, [self.bind(INFERENCE)], 1, stream)
        try:
            yield graph
        finally:
            graph.close()

    @contextmanager
    def runs(self, stream: int) -> Iterator[dict[str, Run]]:
        """Each pass, bound, and all but the quantise pass as one CUDA graph (`BOTH`)."""
        self.quantise()
        bound: dict[str, Run] = {which: self.bind(which) for which in self.passes}
        graph = Replay(self.devices, [*bound.values()], len(bound), stream)
        fp8: dict[str, Run] = {QUANTISE: self.bind(QUANTISE)} if self.fp8 else {}
        try:
            yield {**bound, BOTH: graph, **fp8}
        finally:
            graph.close()

    def time(self) -> dict[str, Timing]:
        """Times each of `runs`."""
        with own_stream(self.devices, self.device) as stream, self.runs(stream) as runs:
            return {which: time_launch(self.devices, self.device, run, stream) for which, run in runs.items()}

    def _wait(self, stream: int) -> None:
        driver = self.devices.driver
        driver.check(driver.api.cuStreamSynchronize(stream), f"{self.layer.name}: cuStreamSynchronize")

    # -- the definition

    def check(self) -> tuple[Verdict, dict[str, float]]:
        """Compares what `launch` wrote with the definition; and the relative error of each output."""
        want = self._wanted()
        errors: dict[str, float] = {}
        problems: list[str] = []
        for name, value in want["inference"].items():
            errors[f"inference {name}"] = self._compare(name, self._inferred[name], value, problems, "inference: ")
        for name in self.outputs:
            problems += written_around(name, self.arrays[name])
            expected = want[name]
            if isinstance(expected, Sums):
                errors[name] = self._sums(name, expected, problems)
            else:
                errors[name] = self._compare(name, self._download(name), expected, problems)
        for name in ("kept", "scratch", *self.fp8):
            problems += written_around(name, self.arrays[name])
        worst = max((errors[name] / _limit(name, self.options) for name in errors), default=0.0)
        figures = {"fro": max(errors.values(), default=0.0), "max_scaled": worst}
        return Verdict(not problems, figures, problems), errors

    def _wanted(self) -> dict[str, Any]:
        """Every output by the definition, by its name in the layer; and those of inference ("inference")."""
        o, inputs = self.options, self.tensors
        tensors = definitions(o, {name: tensor for name, tensor in inputs.items() if name not in self.outputs})
        if self._router is not None:
            tensors["router"] = self._router
        coefficient = LOSS * self.tokens if o.router.get("aux_loss") else None
        layer = definition.Layer.of(o, coefficient, rounded=True)  # else a relu near 0 has the other slope
        y, loss, kept = definition.forward(layer, inputs["x"].whole(), tensors)
        back = self._gradients(layer, tensors, kept) if o.trained else {}
        wanted: dict[str, Any] = {"y": y, "loss": np.array([loss])}
        for name in self.outputs.keys() - wanted.keys():
            value = back[name.removeprefix("d")]
            wanted[name] = value if isinstance(value, Sums) else value.reshape(self.arrays[name].shape)
        wanted = {name: value for name, value in wanted.items() if name in self.outputs}
        return wanted | {"inference": {name: wanted[name] for name in self.layer.outputs(INFERENCE)}}

    def _gradients(self, layer: definition.Layer, tensors: dict[str, Any], kept: definition.Kept) -> dict[str, Any]:
        """The gradients by the definition."""
        o, turned = self.options, self.options.b_major == "n"
        # The backward pass reads z as it is kept; at a clamp's edge, the slope is another one.
        kept = replace(kept, z=decode(encode(kept.z, o.dtype), o.dtype).astype(np.float64))

        def sums(left: Array, right: Array, of: definition.Kept) -> Sums:
            return Sums(*((right, left) if turned else (left, right)), definition.groups(of))

        loss = 0.0 if layer.aux is None else 0.5
        back = definition.backward(layer, tensors, kept, self.tensors["dy"].whole(), loss, sums)
        if o.kind != MLP and o.router["input"] != X:  # what reaches x through the logits is the caller's
            back["x"] = back["x"] - back["logits"] @ tensors["router"]
        return back

    # -- comparison

    def _download(self, name: str, start: int = 0, count: int | None = None) -> NDArray[Any]:
        """Elements of a tensor, in bits."""
        array, kind = self.arrays[name], held(self.arrays[name].dtype)
        size = array.nbytes - start * kind.itemsize if count is None else count * kind.itemsize
        return np.frombuffer(array.download(start * kind.itemsize, size), kind)

    def _compare(self, name: str, got: NDArray[Any], want: Array, problems: list[str], where: str = "") -> float:
        distance = _Distance(name, self.arrays[name].dtype, _limit(name, self.options))
        if name not in self.tensors:
            distance.look(got)
        before = self.tensors[name].values() if name in self.tensors else None
        distance.add(got, want.reshape(-1), before)
        return distance.settle(problems, where)

    def _sums(self, name: str, want: Sums, problems: list[str]) -> float:
        """A gradient of weights, expert by expert: all that was written, of large ones some rows compared."""
        array = self.arrays[name]
        count, height, width = array.shape if len(array.shape) == 3 else (1, *array.shape)
        rng, distance = np.random.default_rng(0), _Distance(name, array.dtype, _limit(name, self.options))
        for expert in range(count):
            rows = np.arange(height)
            if count * height * width > WHOLE_ELEMENTS and height > SAMPLED_ROWS:
                rows = np.unique([0, height - 1, *rng.integers(0, height, SAMPLED_ROWS - 2)])
            start, size = expert * height * width, height * width
            got = self._download(name, start, size)
            before = None
            if name in self.tensors:
                before = self.tensors[name].values(start, size).reshape(height, width)[rows].reshape(-1)
            else:
                distance.look(got)
            distance.add(got.reshape(height, width)[rows].reshape(-1), want.rows(expert, rows).reshape(-1), before)
        return distance.settle(problems)

    def close(self) -> None:
        """Frees device memory."""
        while self.arrays:
            self.arrays.popitem()[1].free()


class _Distance:
    """The relative error of an output, a part at a time."""

    def __init__(self, name: str, dtype: str, limit: float) -> None:
        self.name, self.dtype, self.limit = name, dtype, limit
        self.apart = self.size = 0.0
        self.untouched = 0

    def look(self, got: NDArray[Any]) -> None:
        """Counts what was not written."""
        self.untouched += int(np.count_nonzero(poisoned(got)))

    def add(self, got: NDArray[Any], want: Array, before: Array | None) -> None:
        """got: in bits; before: what it was added to."""
        numbers = (decode(got, self.dtype) if got.dtype.kind == "u" else got).astype(np.float64)
        if before is not None:
            numbers = numbers - before
        self.apart += float(np.square(numbers - want).sum())
        self.size += float(np.square(want).sum())

    def settle(self, problems: list[str], where: str = "") -> float:
        """The error; adds to the problems what is wrong."""
        error = float(np.sqrt(self.apart / self.size)) if self.size else float(np.sqrt(self.apart))
        if self.untouched:
            problems.append(f"{where}{self.name}: {self.untouched} elements were not written")
        elif not error <= self.limit:
            problems.append(f"{where}{self.name}: WRONG, relative error {error:.2g}, at most {self.limit:g}")
        return error


def _limit(name: str, o: Options) -> float:
    usual = LIMITS.get(name.removeprefix("inference "), LIMIT)
    return usual if o.recipe == NONE or name.endswith("loss") else CODED * usual
