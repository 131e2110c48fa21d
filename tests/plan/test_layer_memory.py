"""Memory of packaged layers: layouts that are decided once take what a search for each number of tokens takes."""

import json
import random

import pytest

from fusekit.plan.layer import program
from fusekit.plan.layer.program import BACKWARD

from .layer_memory import TABLE, TOKENS, apart_in_memory, packaged, sizes

SEARCHED = json.loads(TABLE.read_text())
ROUNDED = 16384  # where the search takes next to nothing


def test_the_table_has_every_packaged_layer():
    assert SEARCHED.keys() == packaged().keys()


@pytest.mark.parametrize("name", SEARCHED)
def test_a_layer_takes_hardly_more_than_a_search_for_its_tokens(name):
    plan = program(packaged()[name])
    for column, tokens in enumerate(TOKENS):
        for label, size in sizes(plan, tokens).items():
            before = SEARCHED[name][label][column]
            assert size <= (before if label == "kept" else 1.03 * before + ROUNDED), (label, tokens)


@pytest.mark.parametrize("name", SEARCHED)
def test_any_tokens_and_outputs_have_places_and_fit_into_what_sizes_gives(name):
    plan, rng = program(packaged()[name]), random.Random(name)
    every = sorted(plan.arguments(BACKWARD)[1])
    for tokens in (0, 1, 17, 4097, rng.randrange(1 << 16), (1 << 31) // 8):
        for in_place in (False, True):
            given = {output for output in every if rng.random() < 0.6} or {every[0]}
            lent = rng.choice([None, (), set(rng.sample(sorted(given), len(given) // 2))])
            dims = plan.dims(tokens)
            apart_in_memory(plan, BACKWARD, given, dims, lent, in_place=in_place)
            most = plan.most_scratch(BACKWARD, tokens, in_place=in_place)
            assert plan.scratch(BACKWARD, given, dims, lent, in_place=in_place)[1] <= most
