"""Specs as people write them have the same canonical form as when every word is said."""

from __future__ import annotations

import json

import jsonschema
import pytest

from fusekit.errors import SpecError, SpecWarning
from fusekit.plan.arch import DEFAULT
from fusekit.spec import parse_text
from fusekit.spec.document import parse
from fusekit.spec.json_schema import schema

GROUPED = """
schema = 1
[[kernel]]
name = "fc1"
op = "grouped-gemm"
arch = "sm_90a"
tile = [128, 128]
cluster = [1, 1]
activation = {activation}
problem = {problem}
"""
TOKENS = """
schema = 1
[[kernel]]
name = "permute"
op = "moe-permute"
arch = "sm_90a"
topk = 8
problem = {problem}
"""
LAYER = """
schema = 1
[[kernel]]
name = "mlp"
kind = "mlp"
arch = "sm_90a"
hidden = 256
intermediate = 512
activation = {activation}
problem = {problem}
"""


def forms(text: str) -> list[dict[str, object]]:
    jsonschema.validate(parse(text, "x.toml"), schema())
    specs = parse_text(text, "x")
    assert specs
    return [{**spec.canonical(), "problem": str(spec.problem)} for spec in specs]


def filled(text: str, **values: str) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


@pytest.mark.parametrize(
    ("text", "long", "short"),
    [
        (GROUPED, {"activation": '{ kind = "swiglu" }', "problem": "{ E = 8, M = 64, N = 256, K = 128 }"},
         {"activation": '"swiglu"', "problem": "{ experts = 8, tokens = 64, N = 256, K = 128 }"}),
        (GROUPED.replace("grouped", "dense"),
         {"activation": '{ kind = "gelu" }', "problem": "{ E = 1, M = 64, N = 256, K = 128 }"},
         {"activation": '"gelu"', "problem": "{ M = 64, N = 256, K = 128 }"}),
        (TOKENS, {"problem": "{ T = 64, H = 128 }"}, {"problem": "{ tokens = 64, hidden = 128 }"}),
        (LAYER, {"activation": '{ kind = "gelu" }', "problem": "{ T = 64 }"},
         {"activation": '"gelu"', "problem": "{ tokens = 64 }"}),
    ],
    ids=("grouped", "dense", "tokens", "layer"),
)  # fmt: skip
def test_a_short_form_is_the_same_spec(text, long, short):
    assert forms(filled(text, **short)) == forms(filled(text, **long))


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            "{ M = 64, N = 256, K = 128 }",
            "K = 128 }: has no E; grouped-gemm has groups: say",
        ),
        ("{ E = 8, experts = 8, M = 64, N = 256, K = 128 }", "problem.experts = 8: is another name of E; leave one"),
        ("{ experts = 0, M = 64, N = 256, K = 128 }", "problem.experts = 0: must be from 1 to"),
        ("{ experts = 8, N = 256, K = 128 }", "problem.M is missing"),
    ],
)
def test_what_is_wrong_is_said_by_the_name_that_was_given(problem, message):
    with pytest.raises(SpecError, match=message):
        parse_text(filled(GROUPED, activation='"swiglu"', problem=problem), "x")


@pytest.mark.parametrize(("name", "same"), [("relu2", "srelu"), ("drelu2", "dsrelu")])
def test_another_name_of_an_activation(name, same):
    problem = "{ E = 8, M = 64, N = 256, K = 128 }"
    by_name = [forms(filled(GROUPED, activation=f'"{word}"', problem=problem)) for word in (name, same)]
    assert by_name[0] == by_name[1]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SwiGLU", '; say "swiglu"'),
        ("swish", """; Hugging Face's "swish" is { kind = "silu" }, with a gate { kind = "swiglu" }"""),
        ("gelu_pytorch_tanh", """; Hugging Face's "gelu_pytorch_tanh" is { kind = "gelu", approximate = "tanh" }, """
         """with a gate { kind = "geglu", approximate = "tanh" }"""),
        ("quick_gelu", """; Hugging Face's "quick_gelu" is with a gate { kind = "swiglu", alpha = 1.702 }"""),
        ("relu6", ""),
        ("selu", ""),
        ("swigly", ""),
    ],
)  # fmt: skip
def test_no_other_function_is_suggested(name, hint):
    text = filled(GROUPED, activation=f'"{name}"', problem="{ E = 8, M = 64, N = 256, K = 128 }")
    with pytest.raises(SpecError) as error:
        parse_text(text, "x")
    assert str(error.value).partition(" or ")[2].partition('"')[2].partition('"')[2] == hint


def test_without_an_architecture():
    """The usual one, said once; a caller's where it names some."""
    text = filled(LAYER, activation='"gelu"', problem="{ T = 64 }").replace('arch = "sm_90a"\n', "")
    jsonschema.validate(parse(text, "x.toml"), schema())
    with pytest.warns(SpecWarning, match=f"mlp names no arch, and is for {DEFAULT.name}; ") as noted:
        specs = parse_text(text, "x")
    assert len(noted) == 1
    assert {spec.arch for spec in specs} == {DEFAULT.name}
    assert parse_text(text, "x", unsaid=[DEFAULT.name]) == specs
    assert parse_text(text, "x", arch=DEFAULT.name) == specs
    assert json.dumps([spec.canonical() for spec in specs])
