"""The same tokens in random batches: other neighbours, other places, other variants and margins of every kernel."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from fusekit.bench.layer_tensors import LOSS, random_tensor
from fusekit.layers import Layer
from fusekit.layers.kernels import pinned
from fusekit.layers.pass_plan import plan_pass
from fusekit.library import Library
from fusekit.plan.layer.program import BACKWARD, FORWARD
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

    def __init__(self, library: Library, name: str, rng: np.random.Generator) -> None:
        super().__init__(library, name)
        self._rng, self.taken = rng, dict[str, set[str]]()

    def _plan(
        self, which: str, tokens: int, asked: set[str], compact: set[str] | None = None, in_place: bool = False
    ) -> Any:
        compact = asked if compact is None else compact
        return plan_pass(self.program, which, tokens, asked, compact, in_place, self._kernel)

    def _call(self, *arguments: Any, **options: Any) -> None:
        self._moving.clear()  # else a pass keeps its kernels
        super()._call(*arguments, **options)

    def kernel_name(self, part: str, tokens: int) -> str:
        name = super().kernel_name(part, tokens)
        if not pinned(self.program.parts[part]):
            found = self._library.variants(name.partition("@")[0], self._library.find(name).arch)
            name = str(self._rng.choice([record.name for record in found]))
        self.taken.setdefault(part, set()).add(name)
        return name

    def _kernel(self, part: str, dims: Any) -> Any:
        kernel = super()._kernel(part, dims)
        if not OPERATIONS[self.program.parts[part]["op"]].gemm:
            return kernel
        margin = int(self._rng.choice(MARGINS))
        return SimpleNamespace(name=kernel.name, bind=partial(kernel.bind, cluster_margin=margin))


class Batches:
    """The tokens of a pool through the layer `name` of a store, in the whole pool and in other batches."""

    def __init__(self, library: Library, name: str, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.library, self.layer, self.loose = library, library.layer(name), Loose(library, name, self.rng)
        self.options, buffers = self.layer.options, self.layer.program.buffers
        inputs = self.layer.inputs(FORWARD) | self.layer.inputs(BACKWARD)
        self.outputs = self.layer.outputs(FORWARD) | self.layer.outputs(BACKWARD)
        self.fixed: Arrays = {"dloss": [0.5], "aux_coefficient": [LOSS], "total_tokens": [POOL]}
        self.fixed = {each: value for each, value in self.fixed.items() if each in inputs}
        for each, buffer in inputs.items():
            if each not in ROWS:
                known = self.fixed.get(each)
                known = known or random_tensor(each, buffer.extents({}), buffer.dtype, self.options, seed).block
                self.fixed[each] = np.resize(np.asarray(known, held(buffer.dtype)), buffer.extents({}))
        self.kinds = {each: buffers[each].dtype for each in (*inputs, *self.outputs)}
        self.given = [each for each in ROWS if each in inputs]
        self.pool = self.tokens(POOL, skewed=False)
        # What a token alone decides: of a loss of the whole batch, the gradient is not.
        rows = ("y",) if self.options.router.get("aux_loss") else ("y", "dx", "dlogits", "dweights")
        self.rows = [each for each in rows if each in self.outputs]

    def tokens(self, count: int, skewed: bool) -> Arrays:
        """Inputs of random tokens; skewed: all of them want the same experts."""
        o, rng = self.options, self.rng
        logits = rng.standard_normal((count, o.experts), np.float32)
        if skewed:
            logits += 50 * rng.permutation(o.experts)
        best = np.argsort(-logits, axis=1, kind="stable")[:, : o.topk].astype(np.int32)
        choices = {"logits": logits, "indices": best, "weights": rng.random((count, o.topk), np.float32)}
        for each in ("x", "dy"):
            choices[each] = bits((count, o.hidden), o.dtype, int(rng.integers(1 << 30)))
            choices[each] = (
                np.resize(choices[each][:1], choices[each].shape) if skewed and each == "x" else choices[each]
            )
        return {each: choices[each] for each in self.given}

    def run(self, layer: Layer, tokens: Arrays) -> Arrays:
        """Every output of both passes, in bits."""
        devices, count = self.library.devices, len(tokens["x"])
        dims, sizes = layer.program.dims(count), layer.sizes(count)
        arrays = {each: self.place(value, self.kinds[each]) for each, value in (self.fixed | tokens).items()}
        for each, buffer in self.outputs.items():
            arrays[each] = DeviceArray(devices, buffer.extents(dims), buffer.dtype)
            arrays[each].fill(0xFF)
        memory = {each: DeviceArray(devices, (getattr(sizes, each),), "u8") for each in ("kept", "scratch")}
        for each in memory.values():
            each.fill(0xFF)
        driver = devices.driver
        driver.check(driver.api.cuCtxSynchronize(), "tensors")
        try:
            for which, launch in ((FORWARD, layer.forward), (BACKWARD, layer.backward)):
                names = (*layer.inputs(which), *layer.outputs(which))
                launch(**memory, **{each: arrays[each] for each in names})
            driver.check(driver.api.cuCtxSynchronize(), layer.name)
            return {
                each: np.frombuffer(arrays[each].download(), held(arrays[each].dtype)).reshape(arrays[each].shape)
                for each in self.outputs
            }
        finally:
            for each in (*arrays.values(), *memory.values()):
                each.free()

    def place(self, values: Any, dtype: str) -> DeviceArray:
        array = DeviceArray(self.library.devices, values.shape, dtype)
        array.upload(np.ascontiguousarray(values))
        return array

    def problems(self, trials: int) -> list[str]:
        """What differs from the whole pool through the layer as it is, in as many other batches; and in a second run of
        the same batch.
        """
        want = self.run(self.layer, self.pool)
        found = [f"{each}: a second run differs" for each, bits in self.run(self.layer, self.pool).items()
                 if bits.tobytes() != want[each].tobytes()]  # fmt: skip
        for trial in range(trials):
            rows = self.rng.permutation(POOL)[: self.rng.integers(1, POOL + 1)]
            between = int(self.rng.integers(0, MOST - len(rows))) if trial else 0  # the first: a part of the pool alone
            others = self.tokens(between, skewed=bool(trial % 2))
            place = self.rng.permutation(len(rows) + between)
            batch = {each: np.concatenate([self.pool[each][rows], others[each]])[place] for each in self.pool}
            outputs = self.run(self.loose, batch)
            back = np.argsort(place)[: len(rows)]
            for each in self.rows:
                apart = (outputs[each][back].view(np.uint8) != want[each][rows].view(np.uint8)).reshape(len(rows), -1)
                if apart.any():
                    tokens = int(apart.any(axis=1).sum())
                    found.append(f"{each}: {tokens} of {len(rows)} tokens differ in a batch of {len(place)}")
        return found
