"""A mixture-of-experts block of stored kernels, and the same by the references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fusekit.library import Library
from fusekit.reference import encode, gemm, route
from fusekit.reference.formats import decode
from fusekit.reference.permutation import index, unpermute
from fusekit.runtime import DeviceArray
from fusekit.spec import parse_file

SPECS = {spec.kernel: spec for spec in parse_file(Path(__file__).with_name("block.toml"))}
EXPERTS, TOPK = 32, 4


class Block:
    """Kernels and tensors of the block for T tokens of H elements and an intermediate size of I; M = T * K rows.

    inputs: logits float32 [T, X], and bf16 bits x [T, H], w1 [X, 2 I, H], w2 [X, H, I].
    """

    def __init__(self, library: Library, inputs: dict[str, Any]) -> None:
        tokens, hidden = inputs["x"].shape
        inter, rows = inputs["w2"].shape[2], tokens * TOPK
        self.shapes = {
            "indices": ((tokens, TOPK), "i32"), "weights": ((tokens, TOPK), "f32"), "offsets": ((EXPERTS,), "i32"),
            "order": ((rows,), "i32"), "inverse": ((tokens, TOPK), "i32"), "rows": ((rows, hidden), "bf16"),
            "row_scale": ((rows,), "f32"), "a": ((rows, inter), "bf16"), "b": ((rows, hidden), "bf16"),
            "y": ((tokens, hidden), "bf16"),
        }  # fmt: skip
        self.library = library
        self.kernels = {name: library.load(spec.full_name) for name, spec in SPECS.items()}
        self.arrays = {name: DeviceArray(library.devices, shape, dtype) for name, (shape, dtype) in self.shapes.items()}
        for name, value in inputs.items():
            dtype = "f32" if value.dtype == np.float32 else "bf16"
            self.arrays[name] = DeviceArray(library.devices, value.shape, dtype)
            self.arrays[name].upload(value)

    def poison(self) -> None:
        """All ones in every tensor that the block writes."""
        for name in self.shapes:
            self.arrays[name].fill(0xFF)

    def __call__(self, stream: int) -> None:
        """Queues the block; nothing waits for anything, and the host learns no count."""
        k, t = self.kernels, self.arrays
        k["topk"](logits=t["logits"], indices=t["indices"], weights=t["weights"], stream=stream)
        k["index"](
            indices=t["indices"], offsets=t["offsets"], order=t["order"], inverse=t["inverse"], stream=stream
        )  # fmt: skip
        k["permute"](
            x=t["x"], inverse=t["inverse"], weights=t["weights"], y=t["rows"], row_scale=t["row_scale"], stream=stream
        )  # fmt: skip
        k["fc1"](x=t["rows"], w=t["w1"], offsets=t["offsets"], y=t["a"], stream=stream)
        k["fc2"](
            x=t["a"], w=t["w2"], offsets=t["offsets"], row_scale=t["row_scale"], y=t["b"], stream=stream
        )  # fmt: skip
        k["unpermute"](x=t["b"], inverse=t["inverse"], y=t["y"], stream=stream)

    def result(self, name: str) -> np.ndarray[Any, Any]:
        """What a tensor holds; wait for the stream first."""
        shape, dtype = self.shapes[name]
        kind = {"i32": np.int32, "f32": np.float32}.get(dtype, np.uint16)
        return np.frombuffer(self.arrays[name].download(), kind).reshape(shape)

    def close(self) -> None:
        while self.arrays:
            self.arrays.popitem()[1].free()
        for kernel in self.kernels.values():
            kernel.unload()


def random_inputs(tokens: int, hidden: int, inter: int, seed: int) -> dict[str, Any]:
    """Random inputs; logits lean towards a few experts, and one expert is never chosen."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((tokens, EXPERTS), dtype=np.float32) + rng.standard_normal(EXPERTS, dtype=np.float32)
    logits[:, 5] = -30.0
    return {
        "logits": logits,
        "x": encode(rng.standard_normal((tokens, hidden)), "bf16"),
        "w1": encode(rng.standard_normal((EXPERTS, 2 * inter, hidden)) / hidden**0.5, "bf16"),
        "w2": encode(rng.standard_normal((EXPERTS, hidden, inter)) / inter**0.5, "bf16"),
    }


def wanted(inputs: dict[str, Any]) -> dict[str, Any]:
    """The block by the references, each result rounded as it is stored."""
    chosen = route(SPECS["topk"], {"logits": inputs["logits"]})
    rows = index(chosen["indices"], EXPERTS)
    token, choice = np.nonzero(rows["inverse"] >= 0)
    place = rows["inverse"][token, choice]
    permuted = np.zeros((rows["inverse"].size, inputs["x"].shape[1]), np.uint16)
    permuted[place] = inputs["x"][token]
    row_scale = np.zeros(rows["inverse"].size, np.float32)
    row_scale[place] = chosen["weights"][token, choice]
    given = {"offsets": rows["offsets"]}
    a = encode(gemm(SPECS["fc1"], given | {"x": permuted, "w": inputs["w1"]})["y"], "bf16")
    b = encode(gemm(SPECS["fc2"], given | {"x": a, "w": inputs["w2"], "row_scale": row_scale})["y"], "bf16")
    y = unpermute(decode(b, "bf16").astype(np.float64), rows["inverse"], None)[0]
    return {"indices": chosen["indices"], **rows, "y": y}


def wrong(block: Block, inputs: dict[str, Any]) -> list[str]:
    """What is wrong with the block's results: choices and rows bit for bit, y within what rounding thrice may do."""
    want = wanted(inputs)
    problems = [
        f"{name} differs"
        for name in ("indices", "offsets", "order", "inverse")
        if not np.array_equal(block.result(name), want[name])
    ]
    got = decode(block.result("y"), "bf16").astype(np.float64)
    apart = float(np.linalg.norm(got - want["y"]) / np.linalg.norm(want["y"]))
    return problems if apart <= 6e-3 else [*problems, f"y is {apart:.1e} off"]
