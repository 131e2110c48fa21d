"""Every kernel that stores its result as FP8 values, in every case that breaks GEMMs; see ``cases`` and ``harness``."""

import numpy as np

from fusekit import reference
from fusekit.spec import parse_file

from .cases import Case, each_case
from .conftest import CODED
from .harness import prepare

SPECS = {spec.kernel: spec for spec in parse_file(CODED)}
SIZES = (0, 1, 31, 32, 127, 128, 129, 0, 300)
# bf16: zeros, subnormals, 448 2^e and the next number above, the smallest normal and the largest number, 1.
NUMBERS = (0x0000, 0x8000, 0x0001, 0x8003, 0x43E0, 0x43E1, 0x3BE0, 0xBBE1, 0x0080, 0x7F60, 0xFF61, 0x3F80)
ODD = (0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F7F)  # infinities, NaN


@each_case(SPECS.values())
def test_case(gpu, spec, case):
    result = gpu.trial(spec, case)
    assert not result, "\n".join(result)


def run(gpu, spec, launch):
    """The outputs, and what is wrong with the FP8 values."""
    placed = gpu.arguments(launch)
    gpu.kernel(spec)(**placed)
    gpu.finish(f"{spec.full_name} with hard numbers")
    gpu.download(launch, placed)
    outputs = {name: launch.arguments[name].array for name in launch.outputs}
    return outputs, reference.coded_check(spec, launch.inputs, outputs)


def put(launch, name, value):
    launch.inputs[name][...] = value
    launch.arguments[name].array[...] = value


def test_blocks_of_hard_numbers_in_rows_and_columns(gpu):
    """y = x . 1: whole rows and whole columns of one kind, so that each kind is a block's largest in both."""
    spec, side = SPECS["bias-turned-kept"], 256
    launch = prepare(spec, Case("hard", SIZES, side, side))
    rng, rows = np.random.default_rng(7), sum(SIZES)
    x = rng.choice(np.array(NUMBERS[:4], np.uint16), (rows, side))
    for number, kind in enumerate(NUMBERS * 8):
        x[number * 7 % rows, rng.integers(0, side, 3)] = kind
        x[rng.integers(0, rows, 3), number * 5 % side] = kind
    put(launch, "x", x)
    put(launch, "w", np.where(np.eye(side, dtype=bool), 0x3F80, 0).astype(np.uint16)[None])
    put(launch, "bias", np.uint16(0))
    outputs, result = run(gpu, spec, launch)
    assert not result, "\n".join(result)
    tiny = (x & 0x7F80) == 0  # tensor cores may make what they like of zeros' signs and of subnormals
    assert np.array_equal(np.where(tiny, 0, outputs["y"]), np.where(tiny, 0, x))


def test_infinities_and_nans_stay_for_themselves(gpu):
    """y = bias: columns of infinities, NaN and zeros next to ordinary ones."""
    spec, side = SPECS["bias-turned-kept"], 256
    launch = prepare(spec, Case("odd", SIZES, side, 64))
    put(launch, "x", np.uint16(0))
    bias = reference.make_inputs(spec, E=len(SIZES), M=1, N=side, K=64, sizes=(0,) * 8 + (1,))["bias"]
    for group in range(len(SIZES)):
        bias[group, group::11] = ODD[group % len(ODD)]
        bias[group, 128 : 128 + group] = 0
    put(launch, "bias", bias)
    outputs, result = run(gpu, spec, launch)
    assert not result, "\n".join(result)
    infinite = np.isinf(reference.decode(outputs["y"][:1], "bf16"))
    assert infinite.any()
    assert (outputs["y_s"][0, 0] == 1) == infinite[0, :128].any()


def test_more_fp8_values_than_32_bits_count(gpu):
    """I x P and M x I beyond 2^31."""
    spec = SPECS["turned"]
    launch = prepare(spec, Case("large", (65_537, 65_600), 2 * 16_384, 128))
    outputs = {name: launch.arguments[name] for name in launch.outputs}
    assert min(outputs[name].array.size for name in ("y_q", "y_t")) > 2**31
    placed = gpu.arguments(launch)
    gpu.kernel(spec)(**placed)
    gpu.finish(f"{spec.full_name} with more than 2^31 FP8 values")
    gpu.download(launch, placed)
    result = reference.coded_check(
        spec, launch.inputs, {name: buffer.array for name, buffer in outputs.items()}, most=5
    )
    assert not result, "\n".join(result)
