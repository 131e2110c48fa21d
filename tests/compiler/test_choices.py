"""The launch record of a GEMM that puts choices in order itself."""

import pytest

from fusekit.abi import evaluate
from fusekit.errors import SpecError
from fusekit.spec import parse_text
from tests.records import read_record

KERNEL = """schema = 1
[[kernel]]
name = "fc1"
op = "grouped-gemm"
arch = "sm_90a"
gather = "x"
tile = [16, 64]
choices = 8
"""


def test_the_order_of_rows_is_an_output():
    (spec,) = parse_text(KERNEL, "t")
    record = read_record(spec)
    roles = {tensor.name: tensor.role for tensor in record.tensors}
    assert {name for name, role in roles.items() if role == "output"} == {"y", "offsets", "index", "inverse"}
    assert len(record.launches) == 1

    def refused(tokens, rows):
        env = {"T": tokens, "M": rows, "x.stride0": 64}
        known = [each for each in record.constraints if each.reads <= env.keys()]
        return [each.message for each in known if evaluate(each.expr, env)]

    assert not refused(8, 64) and not refused(1, 11) and not refused(0, 0)
    assert refused(9, 72) == ["T is above 8; a launch has 64 choices at most"]
    assert refused(2, 15) == ["M is less than 8 T; each choice has a row"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (("choices = 8", "choices = 65"), "a launch has 64 choices at most"),
        (('gather = "x"\n', ""), 'rows are those of tokens; say gather = "x"'),
        (("[16, 64]", "[128, 64]"), "only tiles of 16 or 32 rows put choices in order; say tile = [16, 128]"),
        (('"grouped-gemm"', '"dense-gemm"'), "dense-gemm has no groups; leave it out"),
    ],
)
def test_what_does_not_go_with_it(change, rule):
    with pytest.raises(SpecError, match=rule.replace("[", r"\[").replace("]", r"\]")):
        parse_text(KERNEL.replace(*change), "t")
