"""quantise on the GPU: every byte that it writes, and none that it does not, against the reference."""

from pathlib import Path

import numpy as np
import pytest

from fusekit import reference
from fusekit.runtime import DeviceArray
from fusekit.spec import parse_file

SPECS = {spec.kernel: spec for spec in parse_file(Path(__file__).with_name("quantise-matrix.toml"))}
SIZES = {
    "hard-groups": (0, 1, 31, 32, 127, 128, 129, 0, 400, 100),
    "one-row": (1,),
    "many-groups": (3,) * 233,
    "last-empty": (300, 0, 0),
    "no-rows": (0, 0),
}


def hard(bits):
    """Zeros, subnormals, limits, infinities, NaNs and any other bits into rows of bf16, uint16; of float32 as their
    upper halves, above lower halves that decide ties.
    """
    flat = bits.reshape(-1, bits.shape[-1])
    if bits.dtype == np.float32:
        halves = flat.view(np.uint16)
        lower = np.array([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint16)
        halves[:, ::2] = lower[np.random.default_rng(4).integers(0, len(lower), flat.shape)]
        upper = np.ascontiguousarray(halves[:, 1::2])
        hard(upper)
        halves[:, 1::2] = upper
        return
    odd = (0x0000, 0x8000, 0x0001, 0x43E0, 0x43E1, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0x0080)
    for row, number in zip(range(1, len(flat), 3), odd, strict=False):
        flat[row, row % flat.shape[1] :: 1 + row] = number
    if len(flat) > 40:
        flat[40] = 0x7FC0
        flat[33:35] = 0
        flat[36] = np.random.default_rng(3).integers(0, 2**16, flat.shape[1])


def trial(opened, name, inputs, shapes):
    if not opened.store.names("quantise-matrix/*"):
        pytest.skip(f"no kernels of quantise-matrix.toml in {opened}; build it there")
    kernel = opened.load(SPECS[name].full_name)
    arrays = {}
    for entry, value in inputs.items():
        dtype = {"uint16": "bf16", "float32": "f32", "int32": "i32"}[str(value.dtype)]
        arrays[entry] = DeviceArray(opened.devices, value.shape, dtype)
        arrays[entry].upload(np.ascontiguousarray(value))
    for item, (shape, dtype) in shapes.items():
        arrays[item] = DeviceArray(opened.devices, shape, dtype, offset=512, tail=512)
        arrays[item].fill(0xFF)
    kernel(**arrays)
    opened.devices.synchronize(opened.devices.get(0), name)
    outputs = {}
    for element, (shape, dtype) in shapes.items():
        around = arrays[element].download(-512, 512) + arrays[element].download(arrays[element].nbytes, 512)
        assert set(around) == {0xFF}, f"{element}: written outside"
        outputs[element] = np.frombuffer(arrays[element].download(), reference.held(dtype)).reshape(shape)
    return outputs


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.blocks == "1x128"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("columns", [16, 128, 528, 2880])
def test_rows(opened, name, sizes, columns):
    spec, groups = SPECS[name], SIZES[sizes]
    rows = (sum(groups) + 5) * max(spec.topk, 1)
    inputs = reference.quantise_inputs(spec, M=rows, K=columns, E=len(groups), seed=1, sizes=groups)
    hard(inputs["x"])
    outputs = trial(opened, name, inputs, shapes_of(spec, rows, columns, len(groups)))
    result = reference.quantise_check(spec, inputs, outputs)
    assert not result, "\n".join(result)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.blocks == "1x128" and not spec.groups])
def test_one_group_without_rows_is_a_block_of_zeros(opened, name):
    spec = SPECS[name]
    inputs = reference.quantise_inputs(spec, M=0, K=272)
    outputs = trial(opened, name, inputs, shapes_of(spec, 0, 272, 1))
    assert not reference.quantise_check(spec, inputs, outputs)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.blocks == "128x128"])
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 2880, 400), (2, 128, 128), (5, 144, 1040)])
def test_squares(opened, name, shape):
    spec, (groups, rows, columns) = SPECS[name], shape
    groups = groups if spec.groups else 1
    inputs = reference.quantise_inputs(spec, M=rows, K=columns, E=groups, seed=2)
    hard(inputs["w"])
    outputs = trial(opened, name, inputs, shapes_of(spec, rows, columns, groups))
    result = reference.quantise_check(spec, inputs, outputs)
    assert not result, "\n".join(result)


def shapes_of(spec, rows, columns, groups):
    return reference.quantise_output_shapes(spec, M=rows, K=columns, E=groups)
