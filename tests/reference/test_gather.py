"""A gathered operand gives what a copy of its rows gives, and an index that chooses nothing gives zeros."""

import numpy as np
import pytest

from fusekit.reference import gemm, make_inputs
from fusekit.reference.meaning import meaning
from fusekit.reference.operands import gather as twin

from .specs import canonical

DIMS = {"E": 3, "M": 40, "N": 16, "K": 24}
SPECS = {
    "plain": ("x", canonical()),
    "dense": ("x", canonical(op="dense-gemm", bias=True)),
    "swiglu": ("x", canonical(activation={"kind": "swiglu"}, glu_layout="concat", save_preactivation=True)),
    "dswiglu": (
        "x",
        canonical(activation={"kind": "dswiglu"}, glu_layout="concat", row_scale=True, dprob=True, dbias=True),
    ),
    "wgrad-x": ("x", canonical(op="grouped-wgrad")),
    "wgrad-dy": ("dy", canonical(op="grouped-wgrad", dbias=True)),
}


@pytest.mark.parametrize("name", SPECS)
def test_it_is_the_product_of_the_copy(name):
    gather, plain = SPECS[name]
    inputs = make_inputs(plain | {"gather": gather}, **DIMS, seed=3, sizes=(20, 0, 17))
    assert inputs["index"].shape == (DIMS["M"],)
    assert inputs[gather].shape[0] == DIMS["M"] // 4
    index = inputs["index"]
    index[:6] = [-1, -5, len(inputs[gather]), 2**31 - 1, 0, 0]
    rows = np.stack([
        inputs[gather][at] if 0 <= at < len(inputs[gather]) else np.zeros_like(inputs[gather][0]) for at in index
    ])  # fmt: skip
    want = gemm(plain, {key: value for key, value in inputs.items() if key != "index"} | {gather: rows})
    got = gemm(plain | {"gather": gather}, inputs)
    assert want.keys() == got.keys()
    for output, value in want.items():
        assert np.array_equal(value, got[output], equal_nan=True), output


def test_no_token_at_all_gives_zeros():
    spec = canonical(gather="x")
    inputs = make_inputs(spec, **DIMS)
    inputs["x"] = inputs["x"][:0]
    assert not twin.factors(meaning(spec), inputs)["x"].any()
    assert not gemm(spec, inputs)["y"].any()


def test_a_missing_index_is_named():
    spec = canonical(gather="x")
    inputs = make_inputs(spec, **DIMS)
    del inputs["index"]
    with pytest.raises(ValueError, match="no 'index' among the inputs"):
        gemm(spec, inputs)
