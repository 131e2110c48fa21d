"""Random inputs of the variants of a kernel, and what they must give: made once."""

from fusekit import reference
from fusekit.bench.compare import compare, inputs_of
from tests.plans import gemm_spec

PROBLEM = {"E": 3, "M": 90, "N": 64, "K": 32}


def test_variants_share_inputs_and_what_they_must_give(monkeypatch):
    first, second = (gemm_spec(tile=tile).canonical() for tile in ((128, 128), (128, 192)))
    inputs = inputs_of(first, PROBLEM, 1, 0)
    assert inputs_of(second, PROBLEM, 1, 0) is inputs
    outputs = {"y": reference.encode(reference.gemm(first, inputs)["y"], "bf16")}
    (right,) = compare(first, PROBLEM, inputs, outputs)
    monkeypatch.setattr("fusekit.bench.compare.expected", None)
    assert right.ok and compare(second, PROBLEM, inputs, outputs) == [right]
    outputs["y"][7, 5] ^= 0x4000
    (wrong,) = compare(second, PROBLEM, inputs, outputs)
    assert not wrong.ok and wrong.worst == (7, 5)


def test_anything_else_has_inputs_of_its_own():
    plain = gemm_spec().canonical()
    inputs = inputs_of(plain, PROBLEM, 1, 0)
    for spec, problem, seed, spare in (
        (gemm_spec(bias=True).canonical(), PROBLEM, 1, 0),
        (plain, PROBLEM | {"M": 91}, 1, 0),
        (plain, PROBLEM, 2, 0),
        (plain, PROBLEM, 1, 5),
    ):
        assert inputs_of(spec, problem, seed, spare) is not inputs
        inputs = inputs_of(plain, PROBLEM, 1, 0)
