"""Errors of a layer with FP8 values, next to those of Transformer Engine's recipe for the same numbers."""

import math

import ml_dtypes
import numpy as np
import pytest

from fusekit.layers.memory import Slice
from fusekit.reference import decode, encode, held
from fusekit.reference import layer as definition
from fusekit.reference.quantise import scale_of
from tests.layers import blocks_of_te
from tests.layers.host import host
from tests.plan.test_layer_program import defined
from tests.plan.test_layer_program import options as options_of
from tests.soak import sample

FACTOR = 1.03  # measured: .992 to 1.020
TENSORS = ("y", "dx", "dw1", "dw2")
GPT_OSS = {"kind": "swiglu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
LAYERS = {
    "qwen3": {"hidden": 512, "intermediate": 256, "experts": 16, "topk": 4},
    "gpt-oss": {"hidden": 720, "intermediate": 336, "experts": 8, "topk": 4, "activation": GPT_OSS,
                "glu_layout": "interleaved"},
    "mixtral": {"hidden": 384, "intermediate": 640, "experts": 8, "topk": 2},
}  # fmt: skip
TOKENS = 300


class Memory:
    """Tensors on the host, aligned as a device's are."""

    def __init__(self):
        self.held = []

    def tensor(self, shape, dtype, values=None):
        size = max(math.prod(shape), 1) * np.dtype(held(dtype)).itemsize
        raw = np.zeros(size + 256, np.uint8)
        self.held.append(raw)
        begin = -raw.ctypes.data % 256
        array = raw[begin : begin + size].view(held(dtype))[: math.prod(shape)].reshape(shape)
        if values is not None:
            array[...] = encode(np.asarray(values), dtype) if dtype in ("bf16", "f32") else values
        return Slice(array.ctypes.data, tuple(shape), dtype, 0), array


def numbers(rng, *shape, outliers=False):
    """bf16 numbers; with a few columns that are far larger, as activations of trained models have them."""
    values = rng.standard_normal(shape)
    if outliers:
        values *= np.where(rng.random(shape[-1]) < 0.01, 30.0, 1.0)
    return blocks_of_te.bf16(values)


def ours(options, given):
    """y, dx, dw1, dw2 of the layer, its kernels' formulas rounded to what they store."""
    layer, memory, arrays, turned = host(**options), Memory(), {}, options.get("b_major") == "n"
    given = given | {name: given[name].swapaxes(1, 2) for name in ("w1", "w2") if turned}
    tokens = len(given["x"])
    dims, sizes = layer.dims(tokens), layer.sizes(tokens)
    extra = {name: memory.tensor((max(size, 1),), "u8")[0] for name, size in
             (("kept", sizes.kept), ("scratch", sizes.scratch))}  # fmt: skip
    passes = ("quantise", "forward", "backward") if layer.outputs("quantise") else ("forward", "backward")
    for which in passes:
        for name, buffer in (layer.inputs(which) | layer.outputs(which)).items():
            if name not in arrays:
                arrays[name] = memory.tensor(buffer.extents(dims), buffer.dtype, given.get(name))
    for which in passes:
        expert_arrays = {name: arrays[name][0] for name in (*layer.inputs(which), *layer.outputs(which))}
        getattr(layer, which)(**expert_arrays, **({} if which == "quantise" else extra), stream=0)
    got = {name: arrays[name][1] for name in TENSORS}
    got = {name: decode(v, "bf16").astype(np.float64) if v.dtype == np.uint16 else v for name, v in got.items()}
    return got | {name: got[name].swapaxes(1, 2) for name in ("dw1", "dw2") if turned}


def errors(name, outliers=False, **more):
    """(ours, Transformer Engine's, those of bf16), each by tensor, against float64 of the same bf16 numbers."""
    rng, table = np.random.default_rng(7), LAYERS[name] | {"router": {"input": "choices"}, "dtype": "bf16"}
    table |= {"grad_dtype": "bf16"}
    options, h, i, experts = options_of(**table), table["hidden"], table["intermediate"], table["experts"]
    given = {"x": numbers(rng, TOKENS, h, outliers=outliers), "dy": numbers(rng, TOKENS, h, outliers=outliers)}
    given["w1"] = blocks_of_te.bf16(numbers(rng, experts, 2 * i, h) * h**-0.5)
    given["w2"] = blocks_of_te.bf16(numbers(rng, experts, h, i) * i**-0.5)
    given["indices"] = rng.random((TOKENS, experts)).argsort(1)[:, : table["topk"]]
    given["weights"] = rng.dirichlet(np.ones(table["topk"]), TOKENS).astype(np.float32).astype(np.float64)
    tensors = {"router": np.zeros((experts, h)), "w1": given["w1"], "w2": given["w2"]}
    meant, theirs = defined(options, tensors)
    y, _, kept = definition.forward(meant, given["x"], theirs, (given["indices"], given["weights"]))
    back = definition.backward(meant, theirs, kept, given["dy"])
    exact = {"y": y, "dx": back["x"] - back["logits"] @ theirs["router"], "dw1": back["w1"], "dw2": back["w2"]}
    arrays_ = (
        ours(table | {"recipe": "fp8-block"} | more, given),
        blocks_of_te.layer(meant.activation, meant.glu_layout, theirs, kept, given["dy"]),
        ours(table, given),
    )
    return tuple({each: blocks_of_te.error(one[each], exact[each]) for each in TENSORS} for one in arrays_)


@pytest.mark.parametrize(("name", "major"), [("qwen3", "k"), ("gpt-oss", "n")])
@pytest.mark.soak("an option of the recipe, whose scales tests/reference/test_quantise.py checks")
def test_squares_cost_nothing_that_shows(name, major):
    """Scales are powers of two, so FP8 values differ only where numbers are tiny next to the largest."""
    ours, yardstick, _ = errors(name, outliers=True, x_blocks="128x128", b_major=major)
    for each in TENSORS:
        assert ours[each] <= FACTOR * yardstick[each], (each, ours, yardstick)


@pytest.mark.parametrize(
    ("name", "outliers"),
    sample([(name, outliers) for name in LAYERS for outliers in (False, True)], ("gpt-oss", True), ("mixtral", False)),
)
def test_errors_are_not_above_those_of_transformer_engines_recipe(name, outliers):
    ours, yardstick, narrow = errors(name, outliers)
    for each in TENSORS:
        assert 2 * narrow[each] < yardstick[each] < 0.13  # the yardstick does read FP8 values
        assert ours[each] <= FACTOR * yardstick[each], (each, ours, yardstick)


def test_scales_are_transformer_engines():
    """For every largest number in bf16 that its formula takes."""
    a = (np.arange(1, 0x7F80, dtype=np.uint32) << 16).view(np.float32)
    a = a[a > 2.64e-36]
    assert np.array_equal(scale_of(a, "pow2")[1], blocks_of_te.scale_of(a))


def test_fp8_values_are_those_of_ml_dtypes():
    v = numbers(np.random.default_rng(1), 300, 200, outliers=True)
    for down, across in ((1, 128), (128, 1), (128, 128)):
        assert np.array_equal(definition.worth(v, down, across), blocks_of_te.quantised(v, down, across))
    assert ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max == blocks_of_te.LARGEST
