"""The JSON Schema agrees with the parser, key by key."""

import tomllib

import jsonschema
import pytest

from fusekit.spec import packaged_files, schema

VALIDATOR = jsonschema.Draft7Validator(schema())


def test_it_is_a_schema():
    jsonschema.Draft7Validator.check_schema(schema())


@pytest.mark.parametrize("path", packaged_files(), ids=lambda path: path.stem)
def test_packaged_files_are_valid(path):
    VALIDATOR.validate(tomllib.loads(path.read_text()))


GOOD = {"schema": 1, "kernel": [{"name": "a", "op": "dense-gemm", "arch": "sm_90a", "tile": [128, 128]}]}


@pytest.mark.parametrize(
    "change",
    [
        {"bais": True},
        {"bias": "yes"},
        {"tile": [128]},
        {"tile": []},
        {"tile": [[128, 0]]},
        {"cluster": [3, 1]},
        {"arch": ["sm_90a", "sm_90a"]},
        {"dtype": ["bf16"]},
        {"name": "A"},
        {"cluster_margin": -1},
        {"activation": "siluh"},
        {"activation": {}},
        {"activation": {"kind": "silu", "beta": 1}},
        {"problem": {"E": 1, "M": 1, "N": 8}},
        {"exclude": [{}]},
        {"exclude": {"tile": [1, 1]}},
        {"exclude": [{"tiles": [1, 1]}]},
        {"experts": 8},
        {"op": "gemm"},
    ],
)
def test_it_refuses_what_the_parser_refuses(change):
    VALIDATOR.validate(GOOD)
    (kernel,) = GOOD["kernel"]
    assert not VALIDATOR.is_valid({**GOOD, "kernel": [{**kernel, **change}]})


@pytest.mark.parametrize(("terms", "valid"), [(0, False), (1, True), (3, True), (4, False)])
def test_it_knows_the_bounds_of_numbers(terms, valid):
    kernel = {"name": "a", "op": "router-sum", "arch": "sm_90a", "experts": 8, "terms": terms}
    assert VALIDATOR.is_valid({"schema": 1, "kernel": [kernel]}) == valid


def test_top_level():
    assert not VALIDATOR.is_valid({})
    assert not VALIDATOR.is_valid({**GOOD, "schema": 2})
    assert not VALIDATOR.is_valid({**GOOD, "kernels": []})
    assert not VALIDATOR.is_valid({**GOOD, "defaults": {"name": "a"}})
    assert VALIDATOR.is_valid({**GOOD, "defaults": {"bias": True, "schedule": ["static"]}})
    assert VALIDATOR.is_valid({**GOOD, "$schema": "./fusekit.schema.json"})
    assert not VALIDATOR.is_valid({**GOOD, "$schema": 1})
    assert not VALIDATOR.is_valid({**GOOD, "$scheme": ""})


def marked(document):
    """What an editor marks: paths, each once; of a choice of schemas, those that matter are inside."""
    return {tuple(error.absolute_path) for error in VALIDATOR.iter_errors(document)}


ROUTER = {"name": "r", "op": "router-topk", "experts": 8, "topk": 2, "arch": "sm_90a"}


@pytest.mark.parametrize(
    ("defaults", "kernel", "wrong"),
    [
        ({}, {**GOOD["kernel"][0], "bais": True}, "bais"),
        ({}, {**GOOD["kernel"][0], "bias": "yes"}, "bias"),
        ({}, {**GOOD["kernel"][0], "dtype": "f32"}, "dtype"),
        ({}, {**GOOD["kernel"][0], "op": "dense-gem", "bais": 1}, "op"),
        ({}, {**ROUTER, "tile": [128, 128]}, "tile"),
        ({}, {**ROUTER, "dtype": "fp16"}, "dtype"),
        ({"op": "grouped-gemm"}, {"name": "a", "bais": True}, "bais"),
        ({"op": "grouped-gemm"}, {"name": "a", "experts": 8}, "experts"),
        ({"op": "router-topk"}, {"name": "a", "tile": [128, 128]}, "tile"),
        ({"op": "router-topk", "bias": True}, {**GOOD["kernel"][0], "experts": 8}, "experts"),
    ],
)
def test_an_editor_marks_the_wrong_key_alone(defaults, kernel, wrong):
    document = {"schema": 1, "defaults": defaults, "kernel": [ROUTER, kernel, GOOD["kernel"][0]]}
    assert marked(document) == {("kernel", 1, wrong)}
    (table,) = [{**kernel, wrong: None}]
    del table[wrong]
    assert marked({**document, "kernel": [ROUTER, table]}) <= {("kernel", 1)}


def test_editors_know_it_by_its_name():
    assert schema()["$id"] == "urn:fusekit:spec:1"
    assert schema()["$schema"].startswith("http://json-schema.org/draft-07/")


def test_a_kernel_is_completed_with_any_key():
    """An editor that does not follow `if` finds keys and values in the table's own properties."""
    properties = schema()["properties"]["kernel"]["items"]["properties"]
    assert {"tile", "exclude", "experts", "weighted", "warps"} <= set(properties)
    assert "router-topk" in properties["op"]["enum"]
    assert all(key["description"] for key in properties.values() if "anyOf" not in key)
