"""The arguments of every packaged forward GEMM and of the tests' matrix, against the reference.

Needs no compiler: what the kernels are launched with is read out of their host code (test_kernels.py).
"""

from pathlib import Path

import pytest

from fusekit import reference
from fusekit.abi import ScalarArgument, evaluate
from fusekit.compiler.gemm import signature
from fusekit.plan.operands.activation import SCALARS
from fusekit.reference.operands.gather import tokens_of
from fusekit.spec import KernelSpec, find, parse_file
from tests.soak import sample

MATRIX = parse_file(Path(__file__).parents[1] / "gpu" / "matrix.toml")
FORWARD = [spec for spec in (*MATRIX, *find()) if isinstance(spec, KernelSpec) and spec.epilogue == "forward"]
DISTINCT = {str(spec.device_spec()): spec for spec in FORWARD}
SPECS = pytest.mark.parametrize("spec", sample(DISTINCT.values(), most=24), ids=lambda spec: spec.full_name)


@SPECS
def test_the_problem_is_allowed(spec):
    problem = spec.problem
    m, n, k = (problem.M, problem.N, problem.K) if problem else (1000, 2 * 192, 136)
    env = {"M": m, "K": k, "E": problem.E if problem else 5, "N": n, "I": n // 2, "T": m}
    for dim in signature(spec).dims:
        assert dim.minimum <= env[dim.name] <= dim.maximum
        assert env[dim.name] % dim.divisor == 0


@SPECS
def test_arguments_are_those_of_the_reference(spec):
    interface = signature(spec)
    dims = {"E": 3 if spec.op == "grouped-gemm" else 1, "M": 5, "N": 128, "K": 64}
    inputs = reference.make_inputs(spec, **dims)
    outputs = reference.output_shapes(spec, M=dims["M"], N=dims["N"])
    glu = set(SCALARS) if spec.activation.gated else set()
    assert {argument.name for argument in interface.arguments} == set(inputs) | set(outputs) | glu
    env = dims | {"I": dims["N"] // 2, "T": tokens_of(dims["M"])}
    for argument in interface.arguments:
        if isinstance(argument, ScalarArgument):
            assert argument.name in glu or isinstance(inputs[argument.name], float)
            assert argument.name not in glu or argument.name in spec.defaults()
            continue
        shape = tuple(evaluate(extent, env) for extent in argument.shape)
        flags = argument.role == "inout" and argument.name not in outputs  # what it writes there is no result
        assert argument.written is (argument.name in outputs or flags)
        if argument.name in outputs:
            assert (shape, argument.dtype) == outputs[argument.name]
        else:
            assert shape == inputs[argument.name].shape
            kinds = {"uint16": spec.dtype, "uint8": spec.plan.factors[0], "float32": "f32", "int32": "i32"}
            kind = kinds[inputs[argument.name].dtype.name]
            assert argument.dtype == kind
