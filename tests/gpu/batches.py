"""The same tokens in random batches: other neighbours, other places, other variants and margins of every kernel."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from fusekit.bench.layer_tensors import LOSS, random_tensor
from fusekit.bench.layer_trial import parts_of
from fusekit.layers import Layer, record_of
from fusekit.layers.pass_plan import pass_plan
from fusekit.library import Library
from fusekit.plan.layer.program import BACKWARD, FORWARD
from fusekit.plan.layer.record import pinned
from fusekit.plan.operations import OPERATIONS
from fusekit.reference import held
from fusekit.reference.inputs import bits
from fusekit.runtime import DeviceArray

POOL = 160  # tokens whose bits are compared
MOST = 700  # of a batch, with those in between
MARGINS = (0, 3, 20)
ROWS = ("x", "dy", "logits", "indices", "weights")  # of tokens, among the inputs
Arrays = dict[str, Any]


class Loose(Layer):
    """A layer that takes any variant and margin of a kernel that is not pinned, another one for each pass."""

    _compiles = False

    def __init__(self, library: Library, name: str, rng: np.random.Generator) -> None:
        super().__init__(library, record_of(library.store, name))
        self._tables = parts_of(self)
        self._rng, self.taken, self._held = rng, dict[str, set[str]](), dict[str, Any]()

    def _plan(
        self, which: str, tokens: int, asked: set[str], compact: set[str] | None = None, in_place: bool = False
    ) -> Any:
        compact = asked if compact is None else compact
        return pass_plan(self.record, which, self.dims(tokens), asked, compact, in_place, self._kernel)

    def _call(self, *arguments: Any, **options: Any) -> None:
        self._moving.clear()  # else a pass keeps its kernels
        super()._call(*arguments, **options)

    def kernel_name(self, part: str, tokens: int) -> str:
        name = super().kernel_name(part, tokens)
        if not name:  # not launched for so many tokens
            return name
        if not pinned(self._tables[part]):
            result = self._library.variants(name.partition("@")[0], self._library.find(name).arch)
            name = str(self._rng.choice([record.name for record in result]))
        self.taken.setdefault(part, set()).add(name)
        return name

    def _kernel(self, part: str, dims: Any) -> Any:
        name = self.kernel_name(part, dims["T"])
        if not name:
            return None
        kernel = self._library.load(name) if name not in self._held else self._held[name]
        self._held[name] = kernel
        if not OPERATIONS[self._tables[part]["op"]].gemm:
            return kernel
        margin = int(self._rng.choice(MARGINS))
        return SimpleNamespace(name=kernel.name, bind=partial(kernel.bind, cluster_margin=margin))


class Batches:
    """The tokens of a pool through the layer `name` of a store, in the whole pool and in other batches."""

    def __init__(self, library: Library, name: str, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.library, self.layer, self.loose = library, library.layer(name), Loose(library, name, self.rng)
        self.options, buffers = self.layer.options, self.layer.record.buffers
        inputs = self.layer.inputs(FORWARD) | self.layer.inputs(BACKWARD)
        self.outputs = self.layer.outputs(FORWARD) | self.layer.outputs(BACKWARD)
        self.fixed: Arrays = {"dloss": [0.5], "aux_coefficient": [LOSS], "total_tokens": [POOL]}
        self.fixed = {item: value for item, value in self.fixed.items() if item in inputs}
        for entry, buffer in inputs.items():
            if entry not in ROWS:
                known = self.fixed.get(entry)
                known = known or random_tensor(entry, buffer.extents({}), buffer.dtype, self.options, seed).block
                self.fixed[entry] = np.resize(np.asarray(known, held(buffer.dtype)), buffer.extents({}))
        self.kinds = {item: buffers[item].dtype for item in (*inputs, *self.outputs)}
        self.given = [item for item in ROWS if item in inputs]
        self.pool = self.tokens(POOL, skewed=False)
        # What a token alone decides: of a loss of the whole batch, the gradient is not.
        rows = ("y",) if self.options.router.get("aux_loss") else ("y", "dx", "dlogits", "dweights")
        self.rows = [row for row in rows if row in self.outputs]

    def tokens(self, count: int, skewed: bool) -> Arrays:
        """Inputs of random tokens; skewed: all of them want the same experts."""
        o, rng = self.options, self.rng
        logits = rng.standard_normal((count, o.experts), np.float32)
        if skewed:
            logits += 50 * rng.permutation(o.experts)
        best = np.argsort(-logits, axis=1, kind="stable")[:, : o.topk].astype(np.int32)
        choices = {"logits": logits, "indices": best, "weights": rng.random((count, o.topk), np.float32)}
        for entry in ("x", "dy"):
            choices[entry] = bits((count, o.hidden), o.dtype, int(rng.integers(1 << 30)))
            choices[entry] = (
                np.resize(choices[entry][:1], choices[entry].shape) if skewed and entry == "x" else choices[entry]
            )
        return {item: choices[item] for item in self.given}

    def run(self, layer: Layer, tokens: Arrays) -> Arrays:
        """Every output of both passes, in bits."""
        devices, count = self.library.devices, len(tokens["x"])
        dims, sizes = layer.dims(count), layer.sizes(count)
        arrays = {item: self.place(value, self.kinds[item]) for item, value in (self.fixed | tokens).items()}
        for each, buffer in self.outputs.items():
            arrays[each] = DeviceArray(devices, buffer.extents(dims), buffer.dtype)
            arrays[each].fill(0xFF)
        memory = {item: DeviceArray(devices, (max(getattr(sizes, item), 1),), "u8") for item in ("kept", "scratch")}
        for entry in memory.values():
            entry.fill(0xFF)
        driver = devices.driver
        driver.check(driver.api.cuCtxSynchronize(), "tensors")
        try:
            passes = ((FORWARD, layer.forward), (BACKWARD, layer.backward))
            for which, launch in passes if self.options.trained else passes[:1]:
                names = (*layer.inputs(which), *layer.outputs(which))
                launch(**memory, **{name: arrays[name] for name in names})
            driver.check(driver.api.cuCtxSynchronize(), layer.name)
            return {
                output: np.frombuffer(arrays[output].download(), held(arrays[output].dtype)).reshape(
                    arrays[output].shape
                )
                for output in self.outputs
            }
        finally:
            for element in (*arrays.values(), *memory.values()):
                element.free()

    def place(self, values: Any, dtype: str) -> DeviceArray:
        array = DeviceArray(self.library.devices, values.shape, dtype)
        array.upload(np.ascontiguousarray(values))
        return array

    def problems(self, trials: int) -> list[str]:
        """What differs from the whole pool through the layer as it is, in as many other batches; and in a second run of
        the same batch.
        """
        want = self.run(self.layer, self.pool)
        actual = [f"{item}: a second run differs" for item, bits in self.run(self.layer, self.pool).items()
                 if bits.tobytes() != want[item].tobytes()]  # fmt: skip
        for trial in range(trials):
            rows = self.rng.permutation(POOL)[: self.rng.integers(1, POOL + 1)]
            between = int(self.rng.integers(0, MOST - len(rows))) if trial else 0  # the first: a part of the pool alone
            others = self.tokens(between, skewed=bool(trial % 2))
            place = self.rng.permutation(len(rows) + between)
            batch = {item: np.concatenate([self.pool[item][rows], others[item]])[place] for item in self.pool}
            outputs = self.run(self.loose, batch)
            back = np.argsort(place)[: len(rows)]
            for row in self.rows:
                apart = (outputs[row][back].view(np.uint8) != want[row][rows].view(np.uint8)).reshape(len(rows), -1)
                if apart.any():
                    tokens = int(apart.any(axis=1).sum())
                    actual.append(f"{row}: {tokens} of {len(rows)} tokens differ in a batch of {len(place)}")
        return actual
