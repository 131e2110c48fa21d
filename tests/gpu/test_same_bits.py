"""Every variant of a kernel gives the same bits: of training's tiles and of those for few tokens, for any groups.

fusekit --store STORE build tests/gpu/matrix.toml tests/gpu/matrix_fp8.toml          on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_same_bits.py
"""

import numpy as np
import pytest

from fusekit.spec import parse_file

from .cases import Case, multiple_of_n
from .conftest import FP8, MATRIX
from .harness import prepare

SPECS = [*parse_file(MATRIX), *(spec for spec in parse_file(FP8) if spec.quant.weights_alone)]
KERNELS = {spec.name: [each for each in SPECS if each.name == spec.name] for spec in SPECS}
TRIALS = 12


@pytest.mark.parametrize("name", [name for name, variants in KERNELS.items() if len(variants) > 1])
def test_random_groups(gpu, name):
    rng, variants = np.random.default_rng(11), KERNELS[name]
    for trial in range(TRIALS):
        case = random_case(rng, variants[0], trial)
        first, *others = (results(gpu, spec, case) for spec in variants)
        for spec, other in zip(variants[1:], others, strict=True):
            different = [output for output in first if not np.array_equal(first[output], other[output])]
            assert not different, f"{spec.full_name} and {variants[0].full_name} in {case}: {different}"


def random_case(rng, spec, trial: int) -> Case:
    """Few rows to many, of any groups, many of them empty; any N and K."""
    groups = int(rng.integers(1, 40)) if spec.grouped else 1
    rows = int(rng.choice([1, 3, 16, 17, 64, 200, 700]))
    sizes = np.bincount(rng.integers(0, max(1, groups * 2 // 3), rows), minlength=groups)
    n = multiple_of_n(spec) * int(rng.integers(1, 30))
    k = spec.plan.vector * int(rng.integers(1, 120))
    return Case(f"random-{trial}", tuple(map(int, sizes)), n, k, spare=int(rng.integers(0, 40)))


def results(gpu, spec, case: Case) -> dict[str, np.ndarray]:
    """The bytes of every output, with what lies around it."""
    launch = prepare(spec, case)
    placed = gpu.arguments(launch)
    gpu.kernel(spec)(**placed)
    gpu.finish(f"{spec.full_name} in case {case}")
    gpu.download(launch, placed)
    return {name: launch.arguments[name].image.copy() for name in launch.outputs}
