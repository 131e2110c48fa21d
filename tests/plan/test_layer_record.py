"""The layer record: what a layer launches, as data, and the proof that it is what the layer's program launches."""

import json
import time
from dataclasses import replace

import pytest

from fusekit.abi.expr import RecordError
from fusekit.abi.layer_record import LayerRecord
from fusekit.errors import FusekitError
from fusekit.plan.layer import program
from fusekit.plan.layer.program import BACKWARD, FORWARD, INFERENCE, Program
from fusekit.plan.layer.record import MOST, layer_record, prove, unproved, words
from tests.soak import sample

from .layer_memory import packaged
from .test_layer_program import CASES, FEW, SERVED, options
from .test_layer_ranks import LAYERS, over

PACKAGED = packaged()


def choose(part, tokens):
    return f"{part}-{(tokens > 99) + (tokens > 5000)}"


def record(**changes):
    return layer_record(options(**CASES["gpt-oss"]), "sm_90a", choose).to_json() | changes


@pytest.mark.parametrize("name", PACKAGED)
def test_the_record_of_a_packaged_layer_launches_what_its_program_does(name):
    result = layer_record(PACKAGED[name], "sm_90a", choose)
    text = json.dumps(result.to_json())
    assert LayerRecord.from_json(json.loads(text)) == result and len(text) < 200_000
    begin = time.process_time()
    prove(result, program(PACKAGED[name]), PACKAGED[name])
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    "name",
    sample(CASES, "deepseek", "llama4-choices", "mlp-as-stored", "fp8-choices", "fp8-mlp-squares",
           "fp8-recompute-as-stored"),
)  # fmt: skip
def test_the_record_of_any_layer_launches_what_its_program_does(name):
    layer_record(options(**CASES[name]), "sm_90a", choose)


@pytest.mark.parametrize("name", [name for name in LAYERS if "overlap" in name or "choices" in name])
def test_the_record_of_a_layer_over_ranks_launches_what_its_program_does(name):
    layer_record(over(2, name), "sm_90a", choose)


@pytest.mark.parametrize("name", CASES)
def test_kept_memory_is_bounded_by_a_line(name, soak, monkeypatch):
    monkeypatch.setattr(Program, "layouts", lambda *_: iter(()))  # which take long, and have no part in this
    record = unproved(options(**CASES[name], dtype="f32"), "sm_90a", choose)
    slope, rest = record.kept_line(record.environment(1))
    for tokens in [*(range(40) if soak else (0, 1, 2, 31)), 127, 128, 129, 1000, 24576]:
        size = record.kept(record.environment(tokens))[1]
        assert size <= slope * tokens + rest
        assert slope * tokens + rest - size <= 2 * rest


def test_a_part_has_the_kernel_that_was_chosen_for_as_many_tokens():
    read = LayerRecord.from_json(record())
    assert [most for most, _ in read.parts["fc2"]] == [99, 5000, None]
    for tokens in (1, 99, 100, 5000, 5001, MOST, 1 << 30):
        assert read.kernel("fc2", tokens) == choose("fc2", tokens)


def test_a_rung_without_a_kernel_launches_nothing_and_is_named_to_older_readers():
    table = options(**SERVED)
    whole = layer_record(table, "sm_90a", choose)
    document = whole.to_json()
    assert document["must"] == ["gaps"] and record()["must"] == [] and LayerRecord.from_json(document) == whole
    assert document["parts"]["index"][0] == {"tokens": FEW} and document["parts"]["fc1-few"][1] == {}
    for tokens in (1, FEW, FEW + 1):
        launches = [each.part for each in whole.launches(INFERENCE, whole.environment(tokens), {"y"})]
        assert ("index" in launches, "fc1-few" in launches) == (tokens > FEW, tokens <= FEW)
        assert launches == [step.part for step in whole.launched(INFERENCE, {"y"}, tokens)]
    full = {part: tuple((most, key or "k") for most, key in ladder) for part, ladder in whole.parts.items()}
    with pytest.raises(FusekitError, match="the record gives"):
        prove(replace(whole, parts=full), program(table), table)


def test_equal_layers_have_one_key_and_another_kernel_gives_another():
    keys = {layer_record(options(**CASES["plain"]), "sm_90a", each).key for each in (choose, choose, lambda *_: "k")}
    assert len(keys) == 2


@pytest.mark.parametrize("change", [{"after": 1}, {"must": ["dims"], "colour": {"a": [1]}}])
def test_a_member_that_launching_does_not_need_is_ignored(change):
    document = record(**change)
    document["passes"]["forward"]["steps"][0]["note"] = document["buffers"][0]["note"] = "new"
    assert LayerRecord.from_json(document) == LayerRecord.from_json(record())


def test_a_member_that_launching_needs_is_named():
    with pytest.raises(RecordError, match="needs graphs, which this fusekit does not know; use the version that built"):
        LayerRecord.from_json(record(must=["dims", "graphs"]))


@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        ("part", "none", r"passes\.forward\.steps\[0\]: none: the record has nothing of that name"),
        ("arguments", {"x": "nothing"}, r"passes\.forward\.steps\[0\]: nothing"),
        ("needs", "dq", r"passes\.forward\.steps\[0\]: dq"),
    ],
)
def test_a_damaged_record_is_refused_in_words(where, value, text):
    document = record()
    document["passes"]["forward"]["steps"][0][where] = value
    with pytest.raises(RecordError, match=text):
        LayerRecord.from_json(document)


@pytest.mark.parametrize(
    "damage",
    [
        lambda each: replace(each, steps=each.steps[::-1]),
        lambda each: replace(each, steps=tuple(replace(step, outputs=None) for step in each.steps)),
        lambda each: replace(each, layouts=tuple(
            replace(layout, places=tuple(replace(place, above=()) for place in layout.places))
            for layout in each.layouts
        )),
        lambda each: replace(each, in_place=()),
    ],
)  # fmt: skip
def test_a_record_that_launches_something_else_is_not_built(damage):
    table = options(**CASES["gpt-oss"])
    whole = layer_record(table, "sm_90a", choose)
    assert whole.passes[FORWARD].in_place == ()
    broken = replace(whole, passes={**whole.passes, BACKWARD: damage(whole.passes[BACKWARD])})
    with pytest.raises(FusekitError, match=r"backward.*(the record gives|no layout)"):
        prove(broken, program(table), table)


def test_a_record_says_in_words_what_each_argument_holds():
    for name, table in PACKAGED.items():
        plan = program(table)
        for which in plan.steps:
            for buffer in {name for arguments in plan.arguments(which) for name in arguments}:
                assert words(buffer, "argument"), (name, buffer)
