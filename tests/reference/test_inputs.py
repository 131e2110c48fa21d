"""Random inputs: repeatable, nonzero, of the right spread, uneven."""

import numpy as np
import pytest

from fusekit import reference
from fusekit.reference import formats, inputs

from .specs import GPT_OSS, canonical


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("exponent", [0, -6, 2])
def test_bits(dtype, exponent):
    numbers = formats.decode(inputs.bits((1001, 129), dtype, 3, exponent), dtype).astype(np.float64) / 2.0**exponent
    assert np.abs(numbers).min() >= 0.125
    assert np.abs(numbers).max() < 2
    assert np.sqrt(np.mean(numbers**2)) == pytest.approx(inputs.RMS, rel=0.02)
    assert abs(numbers.mean()) < 0.05
    assert len(np.unique(numbers)) == 2 * 4 * 2 ** (formats.format_of(dtype).significand - 1)


def test_bits_are_repeatable_and_differ_by_seed():
    assert np.array_equal(inputs.bits((5, 3), "bf16", 1), inputs.bits((5, 3), "bf16", 1))
    assert not np.array_equal(inputs.bits((5, 3), "bf16", 1), inputs.bits((5, 3), "bf16", 2))
    assert inputs.bits((0, 8), "bf16", 1).shape == (0, 8)
    with pytest.raises(ValueError, match="normal range"):
        inputs.bits((1,), "fp16", 1, -20)


@pytest.mark.parametrize(("rows", "groups"), [(98304, 32), (1000, 1), (7, 64), (0, 5)])
def test_group_sizes(rows, groups):
    sizes = inputs.group_sizes(rows, groups, 0)
    assert sizes.sum() == rows
    assert sizes.size == groups
    assert sizes.min() >= 0
    if rows >= 100 * groups and groups > 1:
        assert sizes.min() < 0.8 * rows / groups < 1.2 * rows / groups < sizes.max()
        assert sizes.max() <= 3.1 * sizes.min()


@pytest.mark.parametrize("b_major", ["k", "n"])
def test_make_inputs(b_major):
    spec = GPT_OSS | {"b_major": b_major}
    inputs = reference.make_inputs(spec, E=4, M=300, N=64, K=128, spare=20, seed=9)
    assert {name: (array.shape, array.dtype.name) for name, array in inputs.items()} == {
        "x": ((300, 128), "uint16"),
        "w": ((4, 64, 128) if b_major == "k" else (4, 128, 64), "uint16"),
        "offsets": ((4,), "int32"),
        "alpha": ((4,), "float32"),
        "bias": ((4, 64), "uint16"),
        "row_scale": ((300,), "float32"),
    }
    assert inputs["offsets"][-1] == 280
    again = reference.make_inputs(spec, E=4, M=300, N=64, K=128, spare=20, seed=9)
    assert all(np.array_equal(inputs[name], again[name]) for name in inputs)


@pytest.mark.parametrize("k", [64, 2880, 7168])
def test_the_product_has_a_spread_of_about_one(k):
    spec = canonical()
    inputs = reference.make_inputs(spec, E=1, M=64, N=64, K=k)
    assert 0.7 < np.std(reference.gemm(spec, inputs)["y"]) < 1.45


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="E = 2"):
        reference.make_inputs(GPT_OSS, E=2, M=10, N=64, K=64, sizes=[1, 2, 3])
    with pytest.raises(ValueError, match="M = 10"):
        reference.make_inputs(GPT_OSS, E=2, M=10, N=64, K=64, sizes=[6, 6])


def test_output_shapes():
    assert reference.output_shapes(GPT_OSS, M=5, N=64) == {"y": ((5, 32), "bf16"), "preactivation": ((5, 64), "bf16")}
    assert reference.output_shapes(canonical(out_dtype="fp16"), M=5, N=64) == {"y": ((5, 64), "fp16")}


def test_sample_rows():
    offsets = reference.offsets_of([0, 5, 1000, 1, 0, 300] + [50] * 40 + [0])
    rows = reference.sample_rows(offsets, 200, seed=1)
    assert {0, 4, 5, 1004, 1005, offsets[-1] - 1} <= set(rows.tolist())
    assert np.array_equal(rows, np.unique(rows))
    assert 50 < rows.size <= 220
    owners = np.searchsorted(offsets, rows, side="right")
    assert len(set(owners.tolist())) <= 12
    assert reference.sample_rows(reference.offsets_of([0, 0]), 10).size == 0
