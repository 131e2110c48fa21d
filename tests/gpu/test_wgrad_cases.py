"""Every weight-gradient kernel in every case that breaks a ragged reduction; see ``cases`` and ``harness``."""

import numpy as np
import pytest

from fusekit.reference import formats
from fusekit.spec import parse_file

from .cases import Case, each_case
from .conftest import BACKWARD
from .harness import faults, prepare

WGRAD = [spec for spec in parse_file(BACKWARD) if spec.epilogue == "wgrad"]


@each_case(WGRAD)
def test_case(gpu, spec, case):
    result = gpu.trial(spec, case)
    assert not result, "\n".join(result)


@pytest.mark.parametrize(
    "name",
    [
        "wgrad-accumulate@128x192-c1x2",
        "wgrad-accumulate@128x192-c1x2-dynamic",
        "wgrad-dbias-accumulate@256x128-c2x1",
        "dense-wgrad-accumulate@256x128-c1x2-dynamic",
        "dense-wgrad-split-accumulate@256x128-c1x2",
    ],
)
def test_each_launch_adds_once(gpu, specs, name):
    spec = specs[name]
    launch = prepare(spec, Case("three-times", (70, 0, 333, 1) if spec.grouped else (1404,), 264, 200))
    placed = gpu.arguments(launch)
    added = gpu.kernel(spec).bind(**placed)
    for _ in range(3):
        before = {output: launch.inputs[output] for output in launch.outputs}
        added()
        gpu.finish(name)
        gpu.download(launch, placed)
        assert not faults(launch), "\n".join(faults(launch))
        for output, held in before.items():
            launch.inputs[output] = np.array(launch.arguments[output].array)
            assert not np.array_equal(held, launch.inputs[output])


@pytest.mark.parametrize("spec", [spec for spec in WGRAD if not spec.grouped], ids=lambda spec: spec.full_name)
@pytest.mark.parametrize(("name", "row", "column"), [("dy", 700, 5), ("x", 1403, 190)])
def test_a_nan_reaches_its_own_row_or_column(gpu, spec, name, row, column):
    launch = prepare(spec, Case("nan", (1404,), 264, 200))
    for array in (launch.inputs[name], launch.arguments[name].array):
        array[row, column] = 0x7FFF
    placed = gpu.arguments(launch)
    gpu.kernel(spec)(**placed)
    gpu.finish(spec.full_name)
    gpu.download(launch, placed)
    assert not faults(launch), "\n".join(faults(launch))
    dw = formats.values(launch.arguments["dw"].array, spec.out_dtype)
    expected = np.zeros(dw.shape, bool)
    expected[(column, slice(None)) if name == "dy" else (slice(None), column)] = True
    assert np.array_equal(np.isnan(dw), expected)


@pytest.mark.parametrize("sizes", [(24576, 128, 2880), (4097, 264, 1032), (700, 2048, 1024)])
def test_parts_give_the_same_bits_in_every_variant(gpu, specs, sizes):
    """And for any margin: how many parts there are follows from the problem."""
    rows, n, k = sizes
    result = []
    for name in ("dense-wgrad-split@128x192-c2x1-dynamic", "dense-wgrad-split@64x64-c2x1-dynamic"):
        launch = prepare(specs[name], Case("variants", (rows,), n, k))
        for margin in (0, 7, 50):
            launch = launch.fresh()
            placed = gpu.arguments(launch)
            gpu.kernel(specs[name])(**placed, cluster_margin=margin)
            gpu.finish(name)
            gpu.download(launch, placed)
            result.append(np.array(launch.arguments["dw"].array))
    assert not (result[0] == 0xFFFF).any()
    assert all(np.array_equal(result[0], item) for item in result[1:])


class Nothing:
    """A tensor of no elements, at address 0, as frameworks make them."""

    def __init__(self, columns, dtype):
        typestr = {"bf16": "<V2", "fp16": "<f2"}[dtype]
        self.__cuda_array_interface__ = {
            "version": 3, "typestr": typestr, "data": (0, False), "shape": (0, columns), "strides": None,
        }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "wgrad@128x128-c1x1",
        "wgrad-accumulate@128x192-c1x2",
        "wgrad-dbias@128x192-c1x2-dynamic",
        "dense-wgrad@128x128-c1x1",
        "dense-wgrad-accumulate@256x128-c1x2-dynamic",
        "dense-wgrad-split@128x192-c2x1-dynamic",
        "dense-wgrad-split-f32@128x128-c1x1",
    ],
)
def test_no_rows_at_no_address(gpu, specs, name):
    """Called, called again on other outputs, and a bound launch updated to such tensors from others like them."""
    spec = specs[name]
    nothing = {"dy": Nothing(136, spec.dtype), "x": Nothing(72, spec.dtype)}
    prepared = [prepare(spec, Case("nothing", (0, 0) if spec.grouped else (0,), 136, 72)) for _ in range(3)]
    placed = [gpu.arguments(launch) for launch in prepared]
    for arguments in placed[:2]:
        gpu.kernel(spec)(**arguments | nothing)
    bound = gpu.kernel(spec).bind(**placed[0] | nothing)
    bound.update(x=Nothing(72, spec.dtype))
    bound.update(**placed[2] | nothing)()
    gpu.finish(name)
    for launch, arguments in zip(prepared, placed, strict=True):
        gpu.download(launch, arguments)
        assert not faults(launch), "\n".join(faults(launch))
