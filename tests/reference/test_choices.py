"""A GEMM that puts choices into the order of rows itself gives what one gives that is given the order."""

import numpy as np

from fusekit.reference import gemm, make_inputs, order_check, output_shapes
from fusekit.reference.permutation import index

from .specs import canonical

DIMS = {"E": 6, "M": 20, "N": 16, "K": 24}
GIVEN = canonical(gather="x", bias=True)
MADE = GIVEN | {"choices": 4}


def test_it_is_the_product_in_the_order_of_moe_index():
    inputs = make_inputs(MADE, **DIMS, seed=3)
    assert inputs["indices"].shape == (5, 4) and len(inputs["x"]) == 5
    assert not inputs.keys() & {"offsets", "index"}
    order = index(inputs["indices"], DIMS["E"])
    named = {name: array for name, array in inputs.items() if name != "indices"}
    named |= {"offsets": order["offsets"], "index": order["token"]}
    assert np.array_equal(gemm(MADE, inputs)["y"], gemm(GIVEN, named)["y"], equal_nan=True)


def test_the_order_is_compared_exactly():
    inputs = make_inputs(MADE, **DIMS)
    order = index(inputs["indices"], DIMS["E"])
    outputs = {"offsets": order["offsets"], "index": order["token"], "inverse": order["inverse"]}
    shapes = output_shapes(MADE, **DIMS)
    assert {name: (array.shape, "i32") for name, array in outputs.items()} == {name: shapes[name] for name in outputs}
    assert order_check(MADE, inputs, outputs) == []
    outputs["inverse"] = outputs["inverse"].copy()
    outputs["inverse"][2, 1] += 1
    (problem,) = order_check(MADE, inputs, outputs)
    assert problem.startswith("inverse: ") and "at (2, 1)" in problem
    assert order_check(GIVEN, inputs, {}) == []
