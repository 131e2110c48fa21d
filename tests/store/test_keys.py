"""Keys: every input changes them, nothing else does."""

import enum
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.errors import FusekitError
from fusekit.store import canonical_json, key_fields, key_of
from fusekit.store.keys import is_digest

A, B = "a" * 64, "b" * 64
INPUTS: dict[str, Any] = {
    "device_spec": {"op": "dense-gemm", "tile": [128, 160], "bias": False, "stages": 4},
    "arch": "sm_90a",
    "toolchain": {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-base": "4.8.1"},
    "options": "--gpu-arch=sm_90a --keep-cubin",
    "sources": {"kernels/gemm_sm90.py": A, "kernels/epilogue.py": B},
}
KEY = key_of(key_fields(**INPUTS))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device_spec", INPUTS["device_spec"] | {"op": "grouped-gemm"}),
        ("device_spec", INPUTS["device_spec"] | {"tile": [160, 128]}),
        ("device_spec", INPUTS["device_spec"] | {"tile": [128, 160, 0]}),
        ("device_spec", INPUTS["device_spec"] | {"bias": True}),
        ("device_spec", INPUTS["device_spec"] | {"bias": 0}),
        ("device_spec", INPUTS["device_spec"] | {"bias": None}),
        ("device_spec", INPUTS["device_spec"] | {"bias": "false"}),
        ("device_spec", INPUTS["device_spec"] | {"new": None}),
        ("device_spec", {k: v for k, v in INPUTS["device_spec"].items() if k != "stages"}),
        ("arch", "sm_90"),
        ("toolchain", INPUTS["toolchain"] | {"nvidia-cutlass-dsl": "4.8.2"}),
        ("toolchain", INPUTS["toolchain"] | {"nvidia-cutlass-dsl-libs-cu13": "4.8.1"}),
        ("toolchain", {"nvidia-cutlass-dsl": "4.8.1"}),
        ("options", "--gpu-arch=sm_90a"),
        ("sources", INPUTS["sources"] | {"kernels/epilogue.py": A}),
        ("sources", {"kernels/gemm_sm90.py": A, "kernels/epilogues.py": B}),
        ("sources", {"kernels/gemm_sm90.py": B, "kernels/epilogue.py": A}),
    ],
)
def test_every_input_changes_the_key(field, value):
    assert key_of(key_fields(**INPUTS | {field: value})) != KEY


def test_the_schema_is_a_field():
    fields = key_fields(**INPUTS)
    assert fields["schema"] == "1"
    assert key_of(fields | {"schema": "2"}) != KEY


def test_order_does_not_change_the_key():
    turned = {
        name: dict(reversed(value.items())) if isinstance(value, dict) else value for name, value in INPUTS.items()
    }
    assert key_of(key_fields(**turned)) == KEY
    assert list(key_fields(**turned)) == list(key_fields(**INPUTS))
    assert key_of(dict(reversed(key_fields(**INPUTS).items()))) == KEY


def test_tuples_are_lists():
    assert key_of(key_fields(**INPUTS | {"device_spec": INPUTS["device_spec"] | {"tile": (128, 160)}})) == KEY


def test_the_key_is_the_same_everywhere(tmp_path):
    # Written down: if this line must change, so must SCHEMA, or stores of earlier versions are misread.
    known = "f343ee83aaa279ba06a36543c110593e4b675b27dd65a690cc2d751856059050"
    assert key_of({"schema": "1", "arch": "sm_90a"}) == known
    code = f"from fusekit.store import key_of, key_fields; print(key_of(key_fields(**{INPUTS!r})))"
    for seed in ("0", "77"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "LC_ALL": "C", "TZ": "Asia/Tokyo", "USER": "somebody"}
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == KEY


labelled = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=5)


@given(labelled, labelled)
def test_different_fields_have_different_keys(one, other):
    assert (key_of(one) == key_of(other)) == (one == other)


@given(st.text(), st.text(), st.integers(0, 20))
def test_label_and_payload_do_not_run_together(label, payload, cut):
    joined = label + payload
    fields = {joined[:cut]: joined[cut:]}
    assert (key_of(fields) == key_of({label: payload})) == (fields == {label: payload})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_canonical_json_is_json_and_has_one_form(value):
    import json

    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text
    assert text.isascii()


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), {1: 2}, {"a": {None: 1}}, object(), b"bytes", {1, 2}, [1, {"x": Colour.RED}], 1j],
    ids=["nan", "infinity", "key", "inner key", "object", "bytes", "set", "enumeration", "complex"],
)
def test_what_has_no_fixed_form_has_no_identity(value):
    with pytest.raises(FusekitError):
        canonical_json(value)
    with pytest.raises(FusekitError, match="device spec field 'odd'"):
        key_fields(**INPUTS | {"device_spec": {"odd": value}})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device_spec", {}, "device spec is empty"),
        ("toolchain", {}, "no toolchain distribution"),
        ("toolchain", {"nvidia-cutlass-dsl": ""}, "has no version"),
        ("sources", {}, "no source file"),
        ("sources", {"/usr/lib/gemm.py": A}, "relative"),
        ("sources", {"../gemm.py": A}, "relative"),
        ("sources", {"gemm.py": "1700000000"}, "SHA-256"),
    ],
)
def test_an_incomplete_identity_is_refused(field, value, message):
    with pytest.raises(FusekitError, match=message):
        key_fields(**INPUTS | {field: value})


def test_only_strings_are_hashed():
    with pytest.raises(FusekitError, match="strings"):
        key_of({"a": 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("text", ["", "A" * 64, "a" * 63, "a" * 65, "g" * 64, "a" * 64 + "\n", None, 7])
def test_a_digest_has_one_form(text):
    assert not is_digest(text)
