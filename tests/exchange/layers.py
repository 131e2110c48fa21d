"""A layer over the ranks of this process: its tensors on every rank, its passes, and what one GPU would give.

Used by the tests and by the script for two GPUs; needs a GPU and a store that holds the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fusekit.bench.layer_tensors import LOSS, definitions, random_tensor
from fusekit.bench.layer_trial import _limit, options_of
from fusekit.errors import CapacityError
from fusekit.exchange import Ranks
from fusekit.library import Library
from fusekit.plan.layer import program
from fusekit.plan.layer.program import BACKWARD, FORWARD, QUANTISE
from fusekit.reference import decode, encode, held
from fusekit.reference import layer as definition
from fusekit.reference.layer import _router_keys
from fusekit.runtime import DeviceArray
from fusekit.spec import Activation

PARTS = ("w1", "w2", "b1", "b2")  # of which a rank has those of its own experts
ONE, OTHERS, ANY = "all to one rank", "none to one rank", "any"


def routing(options: Any, kind: str, count: int, source: np.random.Generator) -> np.ndarray:
    """int32 [T, K]: distinct experts of each token."""
    open_to = np.arange(options.experts)
    if kind == ONE:
        open_to = open_to[options.experts - options.local :]
    elif kind == OTHERS:
        open_to = open_to[options.local :]
    return open_to[np.argsort(source.random((count, len(open_to))), axis=1)[:, : options.topk]].astype(np.int32)


class LayerRanks:
    """devices: of each rank. tokens: the most of a rank. known: the host has all parameters, for `problems`."""

    def __init__(
        self, library: Library, name: str, devices: list[int], tokens: int, rows: int | None = None,
        timeout: int = 20_000, seed: int = 1,
        known: bool = True,
    ) -> None:  # fmt: skip
        self.library, self.devices = library, devices
        self.ranks = Ranks.in_process(library.devices, devices, timeout)
        self.layers = [library.layer(name, ranks=rank, tokens=tokens, rows=rows) for rank in self.ranks]
        self.options = options_of(self.layers[0])
        self.alone = replace(self.options, ranks=1)
        self.streams = [self._stream(device) for device in devices]
        sizes = self.layers[0].sizes()
        self.memory = [
            {name: DeviceArray(library.devices, (max(size, 1),), "u8", device)
             for name, size in (("kept", sizes.kept), ("scratch", sizes.scratch))}
            for device in devices
        ]  # fmt: skip
        self.random_parameters = self._parameters(seed)
        self.parameters = [self._place(rank, known) for rank in range(len(devices))]
        if self.layers[0].outputs(QUANTISE):
            self._quantise()
        self.tensors: list[dict[str, Any]] = []

    def _stream(self, device: int) -> int:
        driver = self.library.devices.driver
        with self.library.devices.active(self.library.devices.get(device)):
            return int(driver.check(driver.api.cuStreamCreate(1), "cuStreamCreate"))

    def _parameters(self, seed: int) -> dict[str, Any]:
        buffers = program(self.alone).buffers
        names = [name for name in buffers if f"d{name}" in buffers and name not in ("x", "logits", "weights", "y")]
        names = [name for name in names if buffers[name].place == "argument"]
        names += [name for name in ("expert_bias",) if name in buffers]
        parameters = {name: buffers[name] for name in names}
        return {
            name: random_tensor(name, buffer.extents({}), buffer.dtype, self.alone, seed)
            for name, buffer in parameters.items()
        }

    def _place(self, rank: int, known: bool) -> dict[str, DeviceArray]:
        local = slice(rank * self.options.local, (rank + 1) * self.options.local)
        arrays = {}
        for name, each in self.random_parameters.items():
            if known:
                arrays[name] = self.array(rank, each.whole()[local] if name in PARTS else each.whole(), each.dtype)
            else:
                extents = self.layers[rank].record.buffers[name].extents({})
                arrays[name] = DeviceArray(self.library.devices, extents, each.dtype, self.devices[rank])
                random_tensor(name, extents, each.dtype, self.alone, 1).place(arrays[name])
        return arrays

    def _quantise(self) -> None:
        """FP8 values of the weights."""
        for rank, layer in enumerate(self.layers):
            parameters = self.parameters[rank]
            for name, buffer in layer.outputs(QUANTISE).items():
                parameters[name] = DeviceArray(
                    self.library.devices, buffer.extents({}), buffer.dtype, self.devices[rank]
                )
            given = {name: parameters[name] for name in (*layer.inputs(QUANTISE), *layer.outputs(QUANTISE))}
            layer.quantise(**given, stream=self.streams[rank])
        self.wait()

    def array(self, rank: int, numbers: np.ndarray, dtype: str) -> DeviceArray:
        array = DeviceArray(self.library.devices, numbers.shape, dtype, self.devices[rank])
        whole = numbers if numbers.dtype.kind in "iu" else numbers.astype(np.float32)
        array.upload(np.ascontiguousarray(encode(whole, dtype) if held(dtype) == np.uint16 else whole))
        return array

    # -- passes

    def fill(self, tokens: list[int], seed: int, kind: str = ANY) -> None:
        """Other tokens, and outputs that hold NaN."""
        source = np.random.default_rng(seed)
        self.inputs, self.tensors = [], []
        for rank, count in enumerate(tokens):
            inputs: dict[str, Any] = {}
            for name in ("x", "dy"):
                rows = source.standard_normal((count, self.options.hidden)).astype(np.float32)
                inputs[name] = decode(encode(rows, "bf16"), "bf16").astype(np.float64)
            if self.options.router["input"] == "choices":
                inputs["indices"] = routing(self.options, kind, count, source)
                inputs["weights"] = source.random((count, self.options.topk)).astype(np.float32)
            if self.options.router["aux_loss"]:
                inputs |= {"dloss": np.float32([0.5]), "aux_coefficient": np.float32([LOSS * count])}
                inputs["total_tokens"] = np.int32([count])
            layer, dims = self.layers[rank], self.layers[rank].dims(count)
            placed = dict(self.parameters[rank])
            for which in (FORWARD, BACKWARD):
                for name, buffer in layer.inputs(which).items():
                    if name in inputs and name not in placed:
                        placed[name] = self.array(rank, inputs[name], buffer.dtype)
                for name, buffer in layer.outputs(which).items():
                    placed[name] = DeviceArray(
                        self.library.devices, buffer.extents(dims), buffer.dtype, self.devices[rank]
                    )
                    placed[name].fill(0xFF)
            self.inputs.append(inputs)
            self.tensors.append(placed)

    def bind(self, rank: int, which: str) -> Any:
        layer, tensors = self.layers[rank], self.tensors[rank]
        given = {name: tensors[name] for name in (*layer.inputs(which), *layer.outputs(which))}
        return (layer.bind_backward if which == BACKWARD else layer.bind_forward)(**given, **self.memory[rank])

    def launch(self, passes: tuple[str, ...] = (FORWARD, BACKWARD), check: bool = True) -> None:
        """Both passes on every rank, and waits."""
        bound = [[self.bind(rank, which) for which in passes] for rank in range(len(self.devices))]
        for number in range(len(passes)):
            for rank, stream in enumerate(self.streams):
                bound[rank][number](stream)
        self.wait()
        for layer in self.layers if check else ():
            layer.check()

    def overflows(self, layers: list[Any]) -> list[tuple[str, int]]:
        """What `check` of a layer raises on each rank, and the rows that it wants; ("", 0) where it raises nothing."""
        result = []
        for layer in layers:
            try:
                result.append(("", layer.check() or 0))
            except CapacityError as error:
                result.append((str(error), error.rows))
        return result

    def graphs(self, passes: tuple[str, ...] = (FORWARD, BACKWARD)) -> list[Any]:
        """The passes of each rank as one CUDA graph, for `replay`."""
        api, check, devices = self.library.devices.driver.api, self.library.devices.driver.check, self.library.devices
        outputs = []
        for rank, stream in enumerate(self.streams):
            bound = [self.bind(rank, which) for which in passes]
            with devices.active(devices.get(self.devices[rank])):
                mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
                check(api.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
                for each in bound:
                    each(stream)
                graph = check(api.cuStreamEndCapture(stream), "cuStreamEndCapture")
                outputs.append((check(api.cuGraphInstantiate(graph, 0), "cuGraphInstantiate"), bound))
        return outputs

    def replay(self, graphs: list[Any]) -> None:
        api, check, devices = self.library.devices.driver.api, self.library.devices.driver.check, self.library.devices
        for rank, stream in enumerate(self.streams):
            with devices.active(devices.get(self.devices[rank])):
                check(api.cuGraphLaunch(graphs[rank][0], stream), "cuGraphLaunch")

    def wait(self) -> None:
        for device, stream in zip(self.devices, self.streams, strict=True):
            with self.library.devices.active(self.library.devices.get(device)):
                driver = self.library.devices.driver
                driver.check(driver.api.cuStreamSynchronize(stream), "cuStreamSynchronize")

    def close(self) -> None:
        self.wait()
        for rank in self.ranks:
            rank.close()

    # -- what is right

    def found(self, rank: int, name: str) -> np.ndarray:
        array = self.tensors[rank][name]
        bits = np.frombuffer(array.download(), held(array.dtype)).reshape(array.shape)
        return (decode(bits, array.dtype) if bits.dtype.kind == "u" else bits).astype(np.float64)

    def bits(self) -> list[bytes]:
        """Every output of every rank."""
        names = {**self.layers[0].outputs(FORWARD), **self.layers[0].outputs(BACKWARD)}
        return [bytes(self.tensors[rank][name].download()) for rank in range(len(self.devices)) for name in names]

    def wanted(self) -> list[dict[str, np.ndarray]]:
        """Every output by the definition, of one GPU with all experts; each rank's own tokens have their own loss."""
        o = self.alone
        tensors = definitions(o, self.random_parameters)
        given = o.router["input"] == "choices"
        tensors.setdefault("router", np.zeros((o.experts, o.hidden)))
        wanted: list[dict[str, Any]] = []
        whole = {name: np.concatenate([rank_inputs[name] for rank_inputs in self.inputs]) for name in self.inputs[0]}
        for rank_inputs in [
            *self.inputs,
            *([whole] if o.recipe != "none" else []),
        ]:  # FP8 values along all tokens are of weights
            aux = LOSS * len(rank_inputs["x"]) if o.router["aux_loss"] else None
            layer = definition.Layer(
                _router_keys(o), Activation(**o.activation), o.glu_layout, o.router["scale"], aux, o.recipe
            )
            choices = (
                (rank_inputs["indices"].astype(np.int64), rank_inputs["weights"].astype(np.float64)) if given else None
            )
            y, loss, kept = definition.forward(layer, rank_inputs["x"], tensors, choices)
            kept = replace(kept, z=decode(encode(kept.z.astype(np.float32), o.dtype), o.dtype).astype(np.float64))
            back = definition.backward(layer, tensors, kept, rank_inputs["dy"], 0.5 if aux is not None else 0.0)
            back["x"] = back["x"] - back["logits"] @ tensors["router"] if given else back["x"]
            wanted.append({"y": y, "loss": np.array([loss])} | {f"d{name}": value for name, value in back.items()})
        summed = [wanted.pop()] if o.recipe != "none" else wanted
        for name in PARTS:
            if f"d{name}" in wanted[0]:
                total = sum(each[f"d{name}"] for each in summed)
                total = total.swapaxes(1, 2) if o.b_major == "n" and name in ("w1", "w2") else total
                for rank, each in enumerate(wanted):
                    each[f"d{name}"] = total[rank * self.options.local :][: self.options.local]
        return wanted

    def problems(self) -> list[str]:
        """What is beyond the bounds of a layer of one GPU."""
        result = []
        for rank, wants in enumerate(self.wanted()):
            for name in {**self.layers[rank].outputs(FORWARD), **self.layers[rank].outputs(BACKWARD)}:
                got, want = self.found(rank, name), wants[name].reshape(self.tensors[rank][name].shape)
                size = float(np.sqrt(np.square(want).sum())) or 1.0
                error = float(np.sqrt(np.square(got - want).sum())) / size
                limit = _limit(name, self.options) * (4 if len(self.inputs[rank]["x"]) < 2 else 1)
                if not error <= limit:
                    result.append(f"rank {rank}: {name}: relative error {error:.2g}, at most {limit:g}")
        return result
