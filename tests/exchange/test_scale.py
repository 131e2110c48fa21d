"""The model of many ranks: what it is made of, and that the page shows what the command prints."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.scale import BANDWIDTH, COMBINE, DISPATCH, RANKS, SHAPES, remote, table, times

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "expert-parallelism.md"
# Two H200s, one choice of a token, rows of 4096 bytes: T, us of a dispatch, us of a combine.
MEASURED = [(128, 10.6, 13.4), (1024, 13.7, 17.3), (8192, 59.1, 64.9), (32768, 209.4, 214.9)]


def test_the_page_shows_what_the_command_prints():
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "benchmarks" / "run.py", "scale"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == table() + "\n"
    assert table() in PAGE.read_text()


@pytest.mark.parametrize(("tokens", "dispatch", "combine"), MEASURED)
def test_the_constants_are_those_of_the_measurements(tokens, dispatch, combine):
    sent = tokens / 2 * 4096 / BANDWIDTH
    assert DISPATCH + sent == pytest.approx(dispatch, rel=0.2)
    assert COMBINE + sent == pytest.approx(combine, rel=0.2)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_ranks_of_a_token_are_those_of_random_choices(shape, ranks):
    source = np.random.default_rng(0)
    chosen = np.argsort(source.random((4000, shape.experts)), axis=1)[:, : shape.topk] // (shape.experts // ranks)
    others = [len(set(ranks_of_tokens.tolist()) - {0}) for ranks_of_tokens in chosen]  # of tokens of rank 0
    assert np.mean(others) == pytest.approx(remote(shape, ranks), rel=0.03)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_overlap_helps_and_ranks_cost(shape):
    modelled = [times(shape, ranks) for ranks in RANKS]
    for one in modelled:
        assert one.forward_at_best < one.forward
        assert one.backward_at_best < one.backward
    assert [one.forward for one in modelled] == sorted(one.forward for one in modelled)
