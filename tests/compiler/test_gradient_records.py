"""The arguments of backward activations and weight gradients, against the reference.

Needs no compiler: what the kernels are launched with is read out of their host code (test_kernels.py).
"""

from importlib import import_module
from pathlib import Path

import pytest

from fusekit import reference
from fusekit.abi import ScalarArgument, evaluate
from fusekit.compiler.identity import roots_of
from fusekit.reference.operands.gather import tokens_of
from fusekit.spec import KernelSpec, find, parse_file
from tests.soak import sample

MATRIX = parse_file(Path(__file__).parents[1] / "gpu" / "matrix_backward.toml")
PACKAGED = [
    spec for spec in find() if isinstance(spec, KernelSpec) and (spec.op == "grouped-wgrad" or spec.activation.backward)
]
DISTINCT = {str(spec.device_spec()): spec for spec in (*MATRIX, *PACKAGED)}
SPECS = pytest.mark.parametrize("spec", sample(DISTINCT.values(), most=24), ids=lambda spec: spec.full_name)


def signature(spec):
    return import_module(roots_of(spec)[0]).signature(spec)


def dims_of(spec):
    problem = spec.problem
    dims = {"E": 5, "M": 1000, "N": 2 * 192, "K": 136}
    if problem:
        dims = {name: getattr(problem, name) for name in dims}
    if spec.op == "dense-gemm":
        dims["E"] = 1
    return dims


@SPECS
def test_the_problem_is_allowed(spec):
    dims = dims_of(spec)
    env = {**dims, "I": dims["N"], "T": tokens_of(dims["M"]), "P": 128 * dims["M"]}
    for dim in signature(spec).dims:
        assert dim.minimum <= env[dim.name] <= dim.maximum
        assert env[dim.name] % dim.divisor == 0


@SPECS
def test_arguments_are_those_of_the_reference(spec):
    interface = signature(spec)
    dims = dims_of(spec) | {"M": 5, "N": 64, "K": 72}
    inputs = reference.make_inputs(spec, **dims)
    outputs = reference.output_shapes(spec, **dims)
    glu = {"act_alpha", "act_limit", "act_up_offset"} if spec.activation.gated else set()
    assert {argument.name for argument in interface.arguments} == set(inputs) | set(outputs) | glu
    env = {**dims, "I": dims["N"], "T": tokens_of(dims["M"])}
    turned = inputs["x_t"].shape if "x_t" in inputs else outputs.get("dz_t", [()])[0]
    env |= {"P": turned[1]} if turned else {}
    for argument in interface.arguments:
        if isinstance(argument, ScalarArgument):
            assert argument.name in glu & spec.defaults().keys()
            continue
        name, shape = argument.name, tuple(evaluate(extent, env) for extent in argument.shape)
        role = {(True, False): "input", (False, True): "output", (True, True): "inout"}[name in inputs, name in outputs]
        assert argument.role == role
        if role != "input":
            assert (shape, argument.dtype) == outputs[name]
        else:
            assert shape == inputs[name].shape
            kind = {"uint16": spec.dtype, "float32": "f32", "int32": "i32", "uint8": "e4m3"}[inputs[name].dtype.name]
            assert argument.dtype == kind


@SPECS
def test_what_must_be_written_without_rows_is(spec):
    """Zeros of empty groups are results; a launch without rows is skipped only where there are none."""
    by_group = {name for name in reference.output_shapes(spec, M=1, N=64, K=64) if name in reference.BY_GROUP}
    assert signature(spec).skip_if_zero == (() if by_group and not spec.operands["accumulate"] else ("M",))


def test_a_launch_without_rows_is_allowed():
    """Its tensor maps are made over tensors of no rows, and it writes zeros for the groups."""
    from fusekit.runtime.binding import bind
    from fusekit.runtime.tensors import View, compact_strides
    from tests.records import read_record

    spec = next(spec for spec in MATRIX if spec.op == "grouped-gemm" and not signature(spec).skip_if_zero)
    record = read_record(spec)
    dims = {"E": 3, "M": 0, "N": 384, "K": 128, "I": 384, "T": 0, "P": 384}
    shapes = {tensor.name: tuple(evaluate(extent, dims) for extent in tensor.shape) for tensor in record.tensors}
    views = [
        View(tensor.dtype, shapes[tensor.name], compact_strides(shapes[tensor.name]), 0) for tensor in record.tensors
    ]
    assert bind(record, views).env["M"] == 0
