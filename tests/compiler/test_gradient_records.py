"""The launch records of backward activations and weight gradients, against the budget, the problem and the reference.

Needs no compiler: whether the kernel does what the record says is the proof's business (test_kernels.py).
"""

from importlib import import_module
from pathlib import Path

import pytest

from fusekit import reference
from fusekit.abi import ScalarArgument, TensorMapParameter, evaluate
from fusekit.compiler.families import family
from fusekit.compiler.samples import expected_map
from fusekit.spec import KernelSpec, find, parse_file
from fusekit.spec.budget import SM90A

MATRIX = parse_file(Path(__file__).parents[1] / "gpu" / "matrix_backward.toml")
PACKAGED = [
    spec for spec in find() if isinstance(spec, KernelSpec) and (spec.op == "grouped-wgrad" or spec.activation.backward)
]
DISTINCT = {str(spec.device_spec()): spec for spec in (*MATRIX, *PACKAGED)}
SPECS = pytest.mark.parametrize("spec", DISTINCT.values(), ids=lambda spec: spec.full_name)
SMS = 132  # of an H100 or H200


def record(spec):
    return import_module(family(spec)).record(spec)


def dims_of(spec):
    problem = spec.problem
    dims = {"E": 5, "M": 1000, "N": 2 * 192, "K": 136}
    if problem:
        dims = {name: getattr(problem, name) for name in dims}
    if spec.op == "dense-gemm":
        dims["E"] = 1
    return dims


def variables(spec, launch):
    """What the record's expressions read when compact tensors are passed."""
    dims = dims_of(spec)
    env = {**dims, "I": dims["N"], "sm_count": SMS, "cluster_margin": 0}
    env |= {"workspace.address": 1 << 39, "scratch.address": 1 << 38}
    for number, tensor in enumerate(launch.tensors, start=1):
        step = 1
        env[f"{tensor.name}.address"] = number << 40
        for index in reversed(range(tensor.rank)):
            env[f"{tensor.name}.stride{index}"] = step
            step *= evaluate(tensor.shape[index], env)
    return env


@SPECS
def test_the_record_stays_within_the_budget(spec):
    launch, budget = record(spec), spec.budget
    assert launch.block == (budget.threads, 1, 1)
    assert launch.cluster == (spec.cluster[0] * spec.cluster[1], 1, 1)
    tiles = budget.stages * budget.stage_bytes + budget.epilogue_bytes
    assert tiles < launch.dynamic_shared <= budget.shared_bytes <= SM90A.shared_bytes


@SPECS
def test_it_can_be_launched(spec):
    launch = record(spec)
    env = variables(spec, launch)
    for dim in launch.dims:
        assert dim.minimum <= env[dim.name] <= dim.maximum
        assert env[dim.name] % dim.divisor == 0
    assert not any(evaluate(constraint.expr, env) for constraint in launch.constraints)
    for each in launch.parameters:
        if isinstance(each, TensorMapParameter):
            expected_map(each, env).check()
    blocks = evaluate(launch.grid[0], env)
    size = launch.cluster[0]
    assert blocks % size == 0
    assert size <= blocks <= SMS


@SPECS
def test_arguments_are_those_of_the_reference(spec):
    launch = record(spec)
    dims = dims_of(spec) | {"M": 5, "N": 64, "K": 72}
    inputs = reference.make_inputs(spec, **dims)
    outputs = reference.output_shapes(spec, **dims)
    glu = {"act_alpha", "act_limit", "act_up_offset"} if spec.activation.gated else set()
    assert {argument.name for argument in launch.arguments} == set(inputs) | set(outputs) | glu
    env = {**dims, "I": dims["N"]}
    for argument in launch.arguments:
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
            kind = {"uint16": spec.dtype, "float32": "f32", "int32": "i32"}[inputs[name].dtype.name]
            assert argument.dtype == kind


@SPECS
def test_what_must_be_written_without_rows_is(spec):
    """Zeros of empty groups are results; a launch without rows is skipped only where there are none."""
    by_group = {name for name in reference.output_shapes(spec, M=1, N=64, K=64) if name in reference.BY_GROUP}
    assert record(spec).skip_if_zero == (() if by_group and not spec.accumulate else ("M",))
