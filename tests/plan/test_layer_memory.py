"""Memory of packaged layers: layouts that are decided once take what a search for each number of tokens takes."""

import json
import random

import pytest

from fusekit.plan.layer import program
from fusekit.plan.layer.program import BACKWARD
from fusekit.plan.layer.record import unproved
from tests.soak import sample

from .layer_memory import TABLE, TOKENS, apart_in_memory, packaged, sizes

SEARCHED = json.loads(TABLE.read_text())
ROUNDED = 16384  # where the search takes next to nothing


def test_the_table_has_every_packaged_layer():
    assert SEARCHED.keys() == packaged().keys() - {"layer/moe"}  # packaged since there is no search


@pytest.mark.parametrize("name", sample(SEARCHED))
def test_a_layer_takes_hardly_more_than_a_search_for_its_tokens(name):
    plan = program(packaged()[name])
    for column, tokens in enumerate(TOKENS):
        for label, size in sizes(plan, tokens).items():
            before = SEARCHED[name][label][column]
            assert size <= (before if label == "kept" else 1.03 * before + ROUNDED), (label, tokens)


@pytest.mark.parametrize("name", sample(SEARCHED))
def test_any_tokens_and_outputs_have_places_and_fit_into_what_sizes_gives(name):
    plan, rng = program(packaged()[name]), random.Random(name)
    record = unproved(packaged()[name], "sm_90a", lambda part, tokens: part, plan=plan)
    every = sorted(plan.arguments(BACKWARD)[1])
    for tokens in (0, 1, 17, 4097, rng.randrange(1 << 16), (1 << 31) // 8):
        for in_place in (False, True):
            given = {output for output in every if rng.random() < 0.6} or {every[0]}
            lent = rng.choice([None, (), set(rng.sample(sorted(given), len(given) // 2))])
            dims = plan.dims(tokens)
            apart_in_memory(plan, BACKWARD, given, dims, lent, in_place=in_place)
            most = record.most_scratch(BACKWARD, tokens, in_place=in_place)
            assert plan.scratch(BACKWARD, given, dims, lent, in_place=in_place)[1] <= most


@pytest.mark.parametrize("name", sample(SEARCHED))
def test_fewer_tokens_fit_into_what_sizes_gives_for_the_most(name):
    """Also for numbers that are not round, whose buffers fill no output to the last byte."""
    plan, rng = program(packaged()[name]), random.Random(name)
    record = unproved(packaged()[name], "sm_90a", lambda part, tokens: part, plan=plan)
    every = {*plan.arguments(BACKWARD)[1]}
    for tokens in (4096, 24576, 65536):
        for in_place in (False, True):
            most = record.most_scratch(BACKWARD, tokens, every, in_place=in_place)
            for count in (1411, 4073, 3785, *(rng.randrange(tokens) for _ in range(10))):
                dims = plan.dims(min(count, tokens))
                assert plan.scratch(BACKWARD, every, dims, in_place=in_place)[1] <= most, (tokens, count)


def test_layouts_change_where_the_next_one_fits():
    """Between two numbers of tokens that are looked at, and for one that is not round."""
    for name, tokens, megabytes in (("gpt-oss-120b/moe-fp8", 1408, 130), ("gpt-oss-20b/moe", 40772, 240)):
        plan = program(packaged()[name])
        dims = plan.dims(tokens)
        assert plan.scratch(BACKWARD, {*plan.arguments(BACKWARD)[1]}, dims, in_place=True)[1] <= megabytes * 10**6
