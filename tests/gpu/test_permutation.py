"""Row order, permutation and its inverse on the GPU against the reference: empty and full experts, dropped choices.

fusekit --store STORE build tests/gpu/permutation-matrix.toml          on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_permutation.py
"""

from pathlib import Path

import numpy as np
import pytest

from fusekit.dtypes import DTYPES
from fusekit.reference import permutation_inputs
from fusekit.spec import parse_file

SPECS = {spec.kernel: spec for spec in parse_file(Path(__file__).with_name("permutation-matrix.toml"))}
INDEX = [name for name, spec in SPECS.items() if spec.op == "moe-index"]
CHOICES = [name for name, spec in SPECS.items() if spec.op == "moe-weights-bwd"]
TERMS = [name for name, spec in SPECS.items() if spec.op.startswith("router-")]
ROWS = [name for name in SPECS if name not in (*INDEX, *CHOICES, *TERMS)]
HIDDEN = (8, 256, 2880, 7168)  # one access, a line, off every piece, many pieces; of bf16, others have as many bytes


@pytest.fixture(scope="module")
def trial(opened):
    """trial(kernel name, inputs, problem) -> what is wrong; launched twice."""
    from fusekit.bench.token_trial import TokenTrial

    if not opened.store.names("permutation-matrix/*"):
        pytest.skip(
            f"no permutation kernels in {opened}; build tests/gpu/permutation-matrix.toml there and name the store"
        )

    def run(name, tokens, hidden=8, harm=lambda inputs: None, **options):
        spec = SPECS[name]
        inputs = permutation_inputs(spec, T=tokens, H=hidden, **options)
        harm(inputs)
        kernel = opened.load(spec.full_name)
        kernel.spec["problem"] = {"T": tokens, "H": hidden}
        one = TokenTrial(opened, kernel, tokens, 0, inputs)
        try:
            one.launch(None)
            verdict = one.check()
            first, _ = one.fetch()
            for output in one.outputs:
                one.arrays[output].fill(0x7F if output == "token" else 0xFF)  # its rows of nobody hold -1
            one.launch(None)
            second, _ = one.fetch()
            return verdict.problems + [
                f"{output}: the same launch twice gave other bits"
                for output in first
                if first[output].tobytes() != second[output].tobytes()
            ]
        finally:
            one.close()

    return run


@pytest.mark.parametrize("name", INDEX)
def test_random_choices(trial, name):
    for tokens in (0, 1, 5, 257, 3001):
        assert trial(name, tokens) == [], tokens


@pytest.mark.parametrize("name", INDEX)
def test_uneven_choices(trial, name):
    experts, topk = SPECS[name].experts, SPECS[name].topk
    shape = (1021, topk)
    cases = {
        "first expert": np.zeros(shape, np.int32),
        "last expert": np.full(shape, experts - 1, np.int32),
        "nobody": np.full(shape, -1, np.int32),
        "beyond": np.full(shape, experts, np.int32),
        "least": np.full(shape, np.iinfo(np.int32).min, np.int32),
        "greatest": np.full(shape, np.iinfo(np.int32).max, np.int32),
        "every other": (np.arange(1021 * topk, dtype=np.int32) * 2 % experts).reshape(shape),
        "descending": (experts - 1 - np.arange(1021 * topk, dtype=np.int32) % experts).reshape(shape),
        "blocks": np.repeat(np.arange(1021, dtype=np.int32) * 7 % experts, topk).reshape(shape),
    }
    problems = {case: trial(name, 1021, indices=indices) for case, indices in cases.items()}
    assert not {case: lines for case, lines in problems.items() if lines}


def test_many_choices(trial):
    assert trial("index-256x8", 400_000) == []


@pytest.mark.parametrize("name", ROWS)
def test_rows(trial, name):
    for hidden in HIDDEN:
        for tokens in (0, 1, 131):
            assert trial(name, tokens, hidden * 2 // DTYPES[SPECS[name].dtype].bytes) == [], (hidden, tokens)


def nan_everywhere(inputs):
    """In one row's, one token's, one expert's place of each float32 tensor."""
    for tensor in inputs.values():
        if tensor.dtype == np.float32:
            tensor.reshape(-1)[::7] = np.nan


@pytest.mark.parametrize("name", CHOICES)
def test_choices(trial, name):
    for tokens in (0, 1, 127, 3001):
        assert trial(name, tokens) == [], tokens
    assert trial(name, 127, harm=nan_everywhere) == []
    assert trial(name, 2, indices=np.full((2, SPECS[name].topk), -1, np.int32)) == []
    beyond = np.array([SPECS[name].experts, np.iinfo(np.int32).max, np.iinfo(np.int32).min], np.int32)
    assert trial(name, 5, indices=np.full((5, SPECS[name].topk), SPECS[name].experts - 1, np.int32)) == []  # the last
    assert trial(name, 9, indices=np.resize(beyond, (9, SPECS[name].topk))) == []


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.op == "moe-bias-bwd"])
def test_biases(trial, name):
    """Every row with one expert, one named by all choices of a token; spare rows and NaN reach nobody else."""
    experts, topk = SPECS[name].experts, SPECS[name].topk

    def harm(inputs):
        rows = int(inputs["offsets"][-1])
        inputs["row_scale"][rows:] = np.nan
        inputs["row_scale"][: rows // 9] = np.nan  # of the first experts
        inputs["grad_y"][0] = 0x7FC0 if inputs["grad_y"].dtype == np.uint16 else np.nan

    for tokens in (1, 127, 3001):
        assert trial(name, tokens, 264, harm=harm) == [], tokens
    for expert in (0, experts - 1, experts):
        assert trial(name, 1021, 264, indices=np.full((1021, topk), expert, np.int32)) == [], expert


@pytest.mark.parametrize("name", TERMS)
def test_terms_of_float32_numbers(trial, name):
    """H off every block; a NaN, infinities and numbers that bf16 has no exponent for."""
    for hidden in (8, 2048, 2880, 7168) if "split" in name else (8,):
        for rows in (0, 1, 127, 3001):
            assert trial(name, rows, hidden) == [], (hidden, rows)
    assert trial(name, 127, 256, harm=nan_everywhere) == []

    def wild(inputs):
        numbers = next(iter(inputs.values())).reshape(-1)
        numbers[:8] = np.inf, -np.inf, 2.0**-126, 2.0**127, -0.0, 1 + 2.0**-23, 2.0**-110 * (2 - 2.0**-23), -(2.0**-149)

    assert trial(name, 19, 64, harm=wild) == []


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_no_expert(trial, name):
    assert trial(name, 19, 64, indices=np.full((19, SPECS[name].topk), -1, np.int32)) == []
