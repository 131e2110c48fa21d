"""What `layer.sizes` gives for at most so many tokens, against the need of each number of tokens."""

import random
from itertools import accumulate

import pytest

from fusekit.plan.layer.program import BACKWARD
from fusekit.plan.layer.ranks import room
from fusekit.plan.layer.record import unproved
from tests.plan.test_layer_program import CASES, options
from tests.plan.test_layer_ranks import CASES as RANKED
from tests.plan.test_layer_ranks import over
from tests.soak import sample

TOKENS = 300


def needs(record, most, asked, lent, in_place, limits):
    """By number of tokens."""
    return [
        record.scratch(BACKWARD, asked, record.environment(tokens, **limits), lent, in_place=in_place)[1]
        for tokens in range(most + 1)
    ]


def compare(record, most, rng, limits, rounds=2):
    outputs = sorted(record.passes[BACKWARD].outputs)
    for number in range(rounds):
        asked = {each for each in outputs if number and rng.random() < 0.6} or {*outputs}
        in_place = number % 2 == 0
        largest = [*accumulate(needs(record, most, asked, asked, in_place, limits), max)]
        for tokens in {most, *rng.sample(range(most), 6)}:
            enough = record.most_scratch(BACKWARD, tokens, asked, in_place=in_place, limits=limits)
            assert enough == largest[tokens], (asked, in_place, tokens)
        lent = {each for each in asked if rng.random() < 0.5}
        any_outputs = record.most_scratch(BACKWARD, most, in_place=in_place, limits=limits)
        assert max(needs(record, most, asked, lent, in_place, limits)[:: 1 + most // 50]) <= any_outputs


def of_layer(name):
    return unproved(options(**CASES[name]), "sm_90a", lambda part, tokens: part)


@pytest.mark.parametrize(
    "name, asked, in_place, tokens",
    [
        ("mlp", {"dx", "dw2", "db1", "db2"}, True, 68),
        ("llama4", {"dshared_w1", "dw1"}, False, 194),
        ("plain", {"dx", "dw2"}, True, 44),
        ("fp8-mlp", {"dx", "dw1", "dw2"}, True, 273),
    ],
)
def test_fewer_tokens_need_more_memory_than_the_most(name, asked, in_place, tokens):
    """Because of another layout's range, the first two; because fewer fill no output to the last byte, the others."""
    record = of_layer(name)
    largest = max(needs(record, tokens, asked, asked, in_place, {}))
    assert needs(record, tokens, asked, asked, in_place, {})[-1] < largest
    assert record.most_scratch(BACKWARD, tokens, asked, in_place=in_place) == largest


@pytest.mark.parametrize("name", sample(CASES, "gpt-oss"))
def test_what_is_enough_is_the_largest_need(name, soak):
    compare(of_layer(name), 3000 if soak else TOKENS, random.Random(name), {}, 4 if soak else 2)


@pytest.mark.parametrize("name", sample(RANKED, "plain"))
def test_a_rank_with_few_tokens_has_enough_too(name, soak):
    """Its outputs have no room for what those of a rank with more tokens lend memory to."""
    if "mlp" in name:
        pytest.skip("has no experts")
    o, rng = over(2, name), random.Random(name)
    record = unproved(o, "sm_90a", lambda part, tokens: part)
    for capacity in (128, 256, 1024) if soak else (256,):
        rows = room(o, capacity)["M"]
        for limits in ({"capacity": capacity, "rows": rows}, {"capacity": capacity, "rows": rows // 3}):
            compare(record, capacity, rng, limits)
