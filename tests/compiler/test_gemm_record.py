"""The launch record of every packaged spec and of the tests' matrix, against the budget, the problem and the reference.

Needs no compiler: whether the kernel does what the record says is the proof's business (test_kernels.py).
"""

from pathlib import Path

import pytest

from fusekit import reference
from fusekit.abi import ScalarArgument, TensorMapParameter, evaluate
from fusekit.compiler import gemm
from fusekit.compiler.families import family
from fusekit.compiler.gemm import GLU_SCALARS, record
from fusekit.compiler.samples import expected_map
from fusekit.spec import find, parse_file
from fusekit.spec.budget import SM90A

MATRIX = parse_file(Path(__file__).parents[1] / "gpu" / "matrix.toml")
# Those that fusekit.compiler.gemm makes a record for: the forward ones.
FORWARD = [spec for spec in (*MATRIX, *find()) if family(spec) == gemm.__name__]
DISTINCT = {str(spec.device_spec()): spec for spec in FORWARD}
SPECS = pytest.mark.parametrize("spec", DISTINCT.values(), ids=lambda spec: spec.full_name)
SMS = 132  # of an H100 or H200


def maps(launch):
    return {each.name: each for each in launch.parameters if isinstance(each, TensorMapParameter)}


def variables(spec, launch, margin=0):
    """What the record's expressions read when compact tensors of the spec's problem are passed."""
    problem = spec.problem
    m, n, k = (problem.M, problem.N, problem.K) if problem else (1000, 2 * 192, 136)
    env = {"M": m, "K": k, "E": problem.E if problem else 5, "sm_count": SMS, "cluster_margin": margin}
    env |= {"I": n // 2} if spec.activation.gated else {"N": n}
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
def test_boxes_fill_a_stage_and_fit_the_staging(spec):
    launch, budget = record(spec), spec.budget
    (tile_m, tile_n), found = spec.tile, maps(launch)
    x, w = found.pop("map_x").box, found.pop("map_w").box
    pair = spec.cluster[0] * spec.cluster[1]  # whose CTAs load either operand in halves
    assert (x[0], x[1] * pair) == (budget.tile_k, tile_m)
    columns, depth = (w[1], w[0]) if spec.b_major == "k" else (w[0], w[1])
    assert depth == budget.tile_k
    fetched = tile_n // 2 if pair > 1 or spec.glu_layout == "concat" else tile_n
    assert fetched % columns == 0 or tile_n % columns == 0
    assert (tile_m + tile_n) * budget.tile_k * 2 == budget.stage_bytes
    assert set(found) == {"map_y"} | ({"map_preactivation"} if spec.save_preactivation else set())
    for each in found.values():
        assert each.box[0] <= budget.epilogue_box
        assert 8 * 2 * each.box[0] * each.box[1] * 2 <= budget.epilogue_bytes


@SPECS
def test_the_problem_can_be_launched(spec):
    launch = record(spec)
    env = variables(spec, launch)
    for dim in launch.dims:
        assert dim.minimum <= env[dim.name] <= dim.maximum
        assert env[dim.name] % dim.divisor == 0
    assert not any(evaluate(constraint.expr, env) for constraint in launch.constraints)
    for each in maps(launch).values():
        expected_map(each, env).check()
    size = launch.cluster[0]
    x, y, z = (evaluate(extent, env) for extent in launch.grid)
    assert (y, z) == (1, 1)
    assert x % size == 0
    assert size <= x <= SMS
    assert evaluate(launch.grid[0], variables(spec, launch, margin=10)) == min(x, (SMS // size - 10) * size)
    assert evaluate(launch.grid[0], variables(spec, launch, margin=10**6)) == size


@SPECS
def test_arguments_are_those_of_the_reference(spec):
    launch = record(spec)
    dims = {"E": 3 if spec.op == "grouped-gemm" else 1, "M": 5, "N": 128, "K": 64}
    inputs = reference.make_inputs(spec, **dims)
    outputs = reference.output_shapes(spec, M=dims["M"], N=dims["N"])
    glu = set(GLU_SCALARS) if spec.activation.gated else set()
    assert {argument.name for argument in launch.arguments} == set(inputs) | set(outputs) | glu
    env = dims | {"I": dims["N"] // 2}
    for argument in launch.arguments:
        if isinstance(argument, ScalarArgument):
            assert argument.name in glu or isinstance(inputs[argument.name], float)
            assert argument.name not in glu or argument.name in spec.defaults()
            continue
        shape = tuple(evaluate(extent, env) for extent in argument.shape)
        assert argument.written is (argument.name in outputs)
        if argument.written:
            assert (shape, argument.dtype) == outputs[argument.name]
        else:
            assert shape == inputs[argument.name].shape
            kind = {"uint16": spec.dtype, "float32": "f32", "int32": "i32"}[inputs[argument.name].dtype.name]
            assert argument.dtype == kind
