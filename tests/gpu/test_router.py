"""The router's kernels on the GPU against the float64 reference: random and adversarial logits, guards, repeatability.

fusekit --store STORE build tests/gpu/router-matrix.toml          on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_router.py
"""

from pathlib import Path

import numpy as np
import pytest

from fusekit.reference import encode, router_inputs
from fusekit.spec import parse_file

MATRIX = Path(__file__).with_name("router-matrix.toml")
SPECS = {spec.kernel: spec for spec in parse_file(MATRIX)}
FORWARD = [name for name, spec in SPECS.items() if spec.op in ("router-topk", "router-aux-score")]
BACKWARD = [name for name in SPECS if name not in FORWARD]
TOKENS = 203  # off every block


def all_equal(rng, shape):
    return np.full(shape, 0.75, np.float32)


def one_huge(rng, shape):
    logits = rng.standard_normal(shape, dtype=np.float32)
    logits[np.arange(shape[0]), rng.integers(0, shape[1], shape[0])] = 3e38
    return logits


def one_far_below(rng, shape):
    logits = rng.standard_normal(shape, dtype=np.float32)
    logits[np.arange(shape[0]), rng.integers(0, shape[1], shape[0])] = -3e38
    return logits


def denormals(rng, shape):
    return (rng.integers(-100, 100, shape) * np.float64(2.0**-149)).astype(np.float32)


def many_ties(rng, shape):
    return rng.integers(-2, 3, shape).astype(np.float32)


def signed_zeros(rng, shape):
    return np.where(rng.random(shape) < 0.5, np.float32(0.0), np.float32(-0.0))


def descending(rng, shape):
    return np.tile(-np.arange(shape[1], dtype=np.float32) / 16, (shape[0], 1))


def ascending(rng, shape):
    return np.tile(np.arange(shape[1], dtype=np.float32) / 16, (shape[0], 1))


def one_lane(rng, shape):
    """All large values in the columns of one lane, four apart by 128."""
    logits = rng.standard_normal(shape, dtype=np.float32)
    logits[:, np.arange(shape[1]) % 128 < 4] += 20.0
    return logits


def neighbours(rng, shape):
    """Values one unit in the last place apart."""
    bits = np.float32(1.0).view(np.int32) + rng.integers(0, 3 * shape[1], shape, dtype=np.int32)
    return bits.view(np.float32)


def wide(rng, shape):
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(40.0)


def negative_infinities(rng, shape):
    logits = rng.standard_normal(shape, dtype=np.float32)
    logits[rng.random(shape) < 0.5] = -np.inf
    return logits


def infinities(rng, shape):
    logits = rng.standard_normal(shape, dtype=np.float32)
    logits[rng.random(shape) < 0.05] = np.inf
    logits[rng.random(shape) < 0.05] = -np.inf
    return logits


def nans(rng, shape):
    logits = rng.standard_normal(shape, dtype=np.float32)
    odd = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    where = rng.random(shape) < 0.02
    logits[where] = rng.choice(odd, int(where.sum()))
    return logits


FINITE = (all_equal, one_huge, one_far_below, denormals, many_ties, signed_zeros, descending, ascending, one_lane,
          neighbours, wide)  # fmt: skip
ODD = (negative_infinities, infinities, nans)


@pytest.fixture(scope="module")
def trial(opened):
    """trial(kernel name, tokens, inputs) -> what is wrong; launched twice."""
    from fusekit.bench.token_trial import TokenTrial

    if not opened.store.names("router-matrix/*"):
        pytest.skip(f"no router kernels in {opened}; build tests/gpu/router-matrix.toml there and name the store")

    def run(name, tokens, inputs=None, seed=0):
        spec = SPECS[name]
        token_trial = TokenTrial(opened, opened.load(spec.full_name), tokens, seed, inputs)
        try:
            token_trial.launch(None)
            first, _ = token_trial.fetch()
            verdict = token_trial.check()
            for output in token_trial.outputs:
                token_trial.arrays[output].fill(0x7F)
            token_trial.launch(None)
            second, _ = token_trial.fetch()
            changed = [
                f"{output}: the same launch twice gave other bits"
                for output in first
                if first[output].tobytes() != second[output].tobytes()
            ]
            return verdict.problems + changed
        finally:
            token_trial.close()

    return run


def with_logits(spec, numbers, tokens, seed=3):
    inputs = router_inputs(spec, T=tokens, seed=seed)
    logits = numbers(np.random.default_rng(seed), (tokens, spec.experts))
    inputs["logits"] = encode(logits, "bf16") if spec.dtype == "bf16" else logits
    return inputs


@pytest.mark.parametrize("name", SPECS)
def test_random(trial, name):
    for tokens in (1, 4, TOKENS):
        assert trial(name, tokens, seed=tokens) == []


@pytest.mark.parametrize("name", SPECS)
def test_no_tokens(trial, name):
    assert trial(name, 0) == []


@pytest.mark.parametrize("name", FORWARD)
def test_adversarial_logits(trial, name):
    problems = {numbers.__name__: trial(name, 67, with_logits(SPECS[name], numbers, 67)) for numbers in (*FINITE, *ODD)}
    assert not {case: lines for case, lines in problems.items() if lines}


@pytest.mark.parametrize("name", [name for name in BACKWARD if SPECS[name].op == "router-topk-bwd"])
def test_backward_of_adversarial_logits(trial, name):
    cases = (all_equal, denormals, wide, one_far_below)
    problems = {numbers.__name__: trial(name, 67, with_logits(SPECS[name], numbers, 67)) for numbers in cases}
    assert not {case: lines for case, lines in problems.items() if lines}


def test_backward_of_a_map_with_fewer_choices(trial):
    """A map from which choices were dropped: the sums run over what is left."""
    for name in ("bwd-softmax", "bwd-sigmoid", "bwd-pre"):
        inputs = router_inputs(SPECS[name], T=50, seed=5)
        dropped = np.random.default_rng(0).random(inputs["routing_map"].shape) < 0.3
        inputs["routing_map"][dropped] = 0
        inputs["routing_map"][7] = 0
        assert trial(name, 50, inputs) == []


@pytest.mark.parametrize("name", [name for name in BACKWARD if name.startswith("bwd-addend")])
def test_a_second_gradient(trial, name):
    """A NaN in it reaches its own element; the rows of tokens that chose none are the second gradient alone."""
    for tokens in (1, 127):
        inputs = router_inputs(SPECS[name], T=tokens, seed=tokens)
        inputs["addend"].reshape(-1)[::97] = np.nan
        if "indices" in inputs:
            inputs["indices"][0] = -1
            inputs["indices"][1::3, 0] = SPECS[name].experts
        else:
            inputs["routing_map"][0] = 0
        assert trial(name, tokens, inputs) == []


@pytest.mark.parametrize(
    "name", ["topk-8x2", "bwd-softmax-1", "aux-softmax-1", "aux-bwd-softmax-1", "aux-loss-8", "aux-loss-bwd-8"]
)
def test_a_million_tokens(trial, name):
    assert trial(name, 10**6) == []
