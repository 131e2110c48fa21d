"""The JSON Schema agrees with the parser, key by key."""

import tomllib

import jsonschema
import pytest

from fusekit.spec import packaged_files, schema

VALIDATOR = jsonschema.Draft202012Validator(schema())


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(schema())


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
        {"activation": "silu"},
        {"activation": {}},
        {"activation": {"kind": "silu", "beta": 1}},
        {"problem": {"E": 1, "M": 1, "N": 8}},
    ],
)
def test_it_refuses_what_the_parser_refuses(change):
    VALIDATOR.validate(GOOD)
    (kernel,) = GOOD["kernel"]
    assert not VALIDATOR.is_valid({**GOOD, "kernel": [{**kernel, **change}]})


def test_top_level():
    assert not VALIDATOR.is_valid({})
    assert not VALIDATOR.is_valid({**GOOD, "schema": 2})
    assert not VALIDATOR.is_valid({**GOOD, "kernels": []})
    assert not VALIDATOR.is_valid({**GOOD, "defaults": {"name": "a"}})
    assert VALIDATOR.is_valid({**GOOD, "defaults": {"bias": True, "schedule": ["static"]}})
