"""A spec file that can be built, and what is wrong with others."""

import pytest

from fusekit.errors import SpecError
from fusekit.spec import parse_text

GOOD = """
schema = 1
[[kernel]]
name = "fc1"
op = "grouped-gemm"
arch = "sm_90a"
tile = [128, 128]
"""
WGRAD = GOOD.replace("grouped-gemm", "grouped-wgrad")
GATED = GOOD + 'activation = { kind = "swiglu" }\n'


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        parse_text(text, "model", "model.toml")
    assert str(caught.value).startswith("model.toml: ")
    assert all(line in str(caught.value) for line in caught.value.problems)
    return caught.value.problems or (str(caught.value),)


def problem(text: str) -> str:
    (only,) = problems(text)
    return only
