"""Specs of foreign kernels: their keys, sweeps and names."""

import pytest

from fusekit.errors import SpecError
from fusekit.spec import ExternSpec, parse_text
from fusekit.spec.catalog import find

HEAD = """schema = 1
[[kernel]]
name = "k"
op = "extern"
source = "package.module:function"
arch = ["sm_90a", "sm_100a"]
"""


def test_every_combination_is_a_kernel():
    text = (
        HEAD
        + """params = { tile = [128, 256], note = "x" }
        sweep = { n = [4096, 8192], dtype = ["bf16"], wide = [true, false], cluster = [[2, 1]] }"""
    )
    specs = parse_text(text, "own")
    assert [spec.variant for spec in specs[:4]] == [
        "n4096-dtype-bf16-wide-cluster2x1", "n4096-dtype-bf16-nowide-cluster2x1",
        "n8192-dtype-bf16-wide-cluster2x1", "n8192-dtype-bf16-nowide-cluster2x1",
    ]  # fmt: skip
    assert [spec.arch for spec in specs] == 4 * ["sm_90a"] + 4 * ["sm_100a"]
    assert specs[0].params == {
        "tile": [128, 256], "note": "x", "n": 4096, "dtype": "bf16", "wide": True, "cluster": [2, 1],
    }  # fmt: skip
    assert parse_text(HEAD, "own")[0].full_name == "own/k@base"


def test_words_and_sweeps_are_in_no_key():
    one, other = (
        parse_text(HEAD + rest, "own")[0]
        for rest in (
            "summary = 'a'\nparams.n = 1\narguments.x = { doc = 'a' }",
            "sweep.n = [1]\nran_on = ['sm_90a']\narguments.x = {}",
        )
    )
    assert one.device_spec() == other.device_spec()
    assert (one.canonical()["status"], other.canonical()["status"]) == ("compiled and proved, not run", "run")


def test_tables_of_defaults_and_of_a_kernel_are_joined():
    text = (
        """schema = 1
        [defaults.arguments]
        x = { role = "input" }
        y = { role = "output" }
        """
        + HEAD.removeprefix("schema = 1\n")
        + 'arguments.x = { role = "inout" }'
    )
    assert parse_text(text, "own")[0].arguments == {"x": {"role": "inout"}, "y": {"role": "output"}}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("params.day = 2026-01-01", "params.day = 2026-01-01: must be a JSON value"),
        ("params = 3", "params = 3: must be a table of JSON values"),
        ("sweep.n = 3", "sweep.n = 3: must be a list of values, of which each makes a kernel"),
        ("sweep.n = [3, 3]", "sweep.n = [3, 3]: 3 appears twice"),
        ('sweep.n = ["a b", "c", "a-b"]', 'makes two variants "n-a-b": names have letters, digits and dots'),
        ("sweep.n = [[false], [false]]", "[false] appears twice"),
        (f"sweep = {{ a = [1, 2, 3, 4, 5], b = [0], n = {list(range(240))} }}", "makes 1200 kernels"),
        (f"sweep.n = {list(range(257))}", "257 values; a list has at most 256"),
        ("arguments.x = 3", "arguments.x = 3: must be a table"),
        ('arguments.x = { rule = "input" }', 'arguments.x.rule = "input": there is no such field; the fields are role'),
        ('arguments.x = { role = "in" }', 'arguments.x.role = "in": must be one of input, output, inout, workspace'),
        ("arguments.x = { shape = [1.5] }", "arguments.x.shape = [1.5]: must be a list of names, integers"),
        ('arguments.x = { role = "workspace" }', "a workspace needs its size; say bytes"),
        ('arguments.x = { role = "workspace", bytes = 0 }', "an expression: the size of a workspace, 1 or more"),
        ('arguments.x = { role = "workspace", bytes = 4, large = true }', "large = true: says nothing of a workspace"),
        ('arguments.x = { role = "input", value = 3 }', 'value = 3: says nothing of a tensor with role = "input"'),
        ("arguments.x = { value = 3, default = 4 }", "default = 4: says nothing of an integer that is computed"),
        ("arguments.x = { zeroed = true }", 'zeroed = true: is of a workspace; say role = "workspace"'),
        ("arguments.x = { divisor = 0 }", "arguments.x.divisor = 0: must be 1 or more"),
        ("arguments.x = { minimum = 2, maximum = 1 }", "minimum = 2: must be at most the maximum, which is 1"),
        ("arguments.x = { default = 5, maximum = 4 }", "default = 5: must be within the argument's own minimum"),
        ("arguments.x = { default = 5, divisor = 2 }", "default = 5: must be within the argument's own minimum"),
        ("dims.M = { divisor = 0 }", "dims.M.divisor = 0: must be 1 or more"),
        ("dims.M = { minimum = 2, maximum = 1 }", "dims.M.minimum = 2: must be at most the maximum, which is 1"),
        ("dims.M = { least = 1 }", "dims.M.least = 1: there is no such field"),
        ("dims.M = { minimum = -1 }", "dims.M.minimum = -1: must be an integer from 0"),
        ("lift.n = 1.5", "lift.n = 1.5: must be an expression"),
        ('ran_on = ["sm_9"]', 'ran_on = "sm_9": must be of sm_80'),
    ],
)  # fmt: skip
def test_refusals(line, words):
    with pytest.raises(SpecError) as error:
        parse_text(HEAD + line, "own")
    assert words in str(error.value)


def test_a_source_is_module_and_function():
    with pytest.raises(
        SpecError, match=r'source = "package\.module": must name a function as "package.module:function"'
    ):
        parse_text(HEAD.replace(":function", ""), "own")


def test_the_packaged_catalogue():
    specs = [spec for spec in find(["quack", "cudnn"]) if isinstance(spec, ExternSpec)]
    assert len({(spec.full_name, spec.arch) for spec in specs}) >= 60
    assert all(spec.summary and spec.distributions for spec in specs)


def test_values_that_python_takes_for_equal_are_several():
    specs = parse_text(HEAD + "sweep.n = [0, false, 1, 1.0]", "own")
    assert [spec.variant for spec in specs[:4]] == ["n0", "non", "n1", "n-1.0"]
