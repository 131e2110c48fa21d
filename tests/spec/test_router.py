"""Specs of router kernels: which keys an operation takes, defaults shared with GEMMs, rules, canonical form."""

import json

import pytest

from fusekit.errors import SpecError
from fusekit.spec import find, parse_text
from fusekit.spec.permutation import PERMUTATION_FIELDS
from fusekit.spec.router import ROUTER_FIELDS, ROUTER_OPS
from fusekit.store import canonical_json

HEAD = """
schema = 1
[defaults]
arch = "sm_90a"
experts = 256
topk = 8
"""


def specs(*kernels: str, head: str = HEAD) -> tuple:
    tables = [f'[[kernel]]\nname = "k{index}"\n{lines}\n' for index, lines in enumerate(kernels)]
    return parse_text(head + "".join(tables), "router")


def problem(lines: str, head: str = HEAD) -> str:
    with pytest.raises(SpecError) as caught:
        specs(lines, head=head)
    (only,) = caught.value.problems
    return only


def test_defaults_of_a_kernel():
    (spec,) = specs('op = "router-topk"')
    assert (spec.dtype, spec.out_dtype, spec.score_function, spec.warps) == ("f32", "f32", "softmax", 8)
    assert (spec.outputs, spec.routing_map, spec.num_groups, spec.group_topk) == ("dense", "bytes", 0, 0)
    assert spec.full_name == "router/k0@w8"
    assert spec.defaults() == {"scaling_factor": 1.0}
    assert spec.problem is None


def test_a_key_that_the_operation_lacks_is_neutral():
    compact, bwd, aux, aux_bwd = specs(
        'op = "router-topk"\noutputs = "compact"\ndtype = "bf16"',
        'op = "router-topk-bwd"',
        'op = "router-aux-score"',
        'op = "router-aux-score-bwd"',
    )
    assert (compact.routing_map, compact.out_dtype) == ("none", "f32")
    assert bwd.routing_map == aux.routing_map == "bytes"
    assert aux_bwd.routing_map == "none"
    assert aux.defaults() == aux_bwd.defaults() == {}
    index, permute, backward, loss = specs(
        'op = "moe-index"', 'op = "moe-permute"', 'op = "moe-unpermute-bwd"', 'op = "moe-aux-loss"\ncoefficient = 0.5'
    )
    assert (index.dtype, index.warps, permute.experts, permute.dtype) == ("none", 32, 0, "bf16")
    assert not permute.weighted and backward.weighted
    assert loss.defaults() == {"coefficient": 0.5}


def test_defaults_are_shared_with_another_family():
    """A key that one operation of the file knows is left aside by the others."""
    head = HEAD + 'bias = true\ntile = [128, 128]\nexpert_bias = true\nscore_function = "sigmoid"\n'
    gemm, topk, aux = specs('op = "grouped-gemm"', 'op = "router-topk"', 'op = "router-aux-score"', head=head)
    assert gemm.operands["bias"] and topk.expert_bias and not aux.expert_bias
    assert gemm.tile == (128, 128)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_dtype_of_gemms_is_not_that_of_logits(dtype):
    """Rounded logits choose other experts: a router has the types that its own table gives it."""
    head = f'{HEAD}dtype = "{dtype}"\nout_dtype = "{dtype}"\ntile = [128, 128]\n'
    ops = [f'op = "{op}"' for op in ROUTER_FIELDS]
    gemm, asked, *routers = specs('op = "grouped-gemm"', 'op = "router-topk"\ndtype = "bf16"', *ops, head=head)
    assert (gemm.dtype, gemm.out_dtype) == (dtype, dtype)
    assert (asked.dtype, asked.out_dtype) == ("bf16", "bf16")
    assert {(spec.dtype, spec.out_dtype) for spec in routers} == {("f32", "f32")}
    head = 'schema = 1\n[defaults]\narch = "sm_90a"\ndtype = "bf16"\ntopk = 4\ntile = [128, 128]\n'
    gemm, permute = specs('op = "grouped-gemm"', 'op = "moe-permute"', head=head)
    assert gemm.dtype == permute.dtype == "bf16"


def test_a_dtype_for_routers_alone_is_said_to_be_lost():
    message = problem('op = "router-topk"', HEAD + 'dtype = "bf16"\n')
    assert message == '[defaults]: dtype = "bf16": is said in the [[kernel]] table that it is for; move dtype there'


def test_the_check_of_group_ends_takes_no_shape():
    head = 'schema = 1\n[defaults]\narch = "sm_90a"\n'
    (spec,) = specs('op = "moe-check"', head=head)
    assert (spec.variant, spec.experts, spec.topk, spec.dtype) == ("w1", 0, 0, "none")
    assert "must be 1" in problem('op = "moe-check"\nwarps = 2', head)
    assert "there is no such field" in problem('op = "moe-check"\ntopk = 2', head)


def test_a_default_that_nothing_in_the_file_knows():
    assert "there is no such field" in problem('op = "router-topk"', HEAD + "tile = [128, 128]\n")


def test_the_operation_may_come_from_the_defaults():
    (spec,) = specs("", head=HEAD + 'op = "router-topk"\n')
    assert spec.op == "router-topk"


def test_long_rows_take_fewer_warps():
    assert [
        spec.warps for spec in specs('op = "router-topk"\nexperts = 1024', 'op = "router-topk"\nexperts = 1023')
    ] == [4, 8]


def test_warps_are_swept():
    assert [spec.variant for spec in specs('op = "router-topk"\nwarps = [1, 8]')] == ["w1", "w8"]


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ('op = "router-topk"\nexperts = 4097', "experts = 4097: a warp's registers hold 4096 experts at most"),
        ('op = "router-topk"\ntopk = 65', "topk = 65: must be from 1 to 64"),
        ('op = "router-topk"\nexperts = 7', "topk = 8: must be from 1 to 7"),
        ('op = "router-topk"\nwarps = 3', "warps = 3: must be 1, 2, 4 or 8"),
        ('op = "router-topk"\npre_softmax = true\nscore_function = "sigmoid"', "only softmax has it, not sigmoid"),
        ('op = "router-topk"\nexpert_bias = true', "only sigmoid and sqrtsoftplus have it"),
        ('op = "router-topk"\noutputs = "compact"\nrouting_map = "bits"', 'outputs = "compact" has no map'),
        ('op = "router-topk"\noutputs = "compact"\nout_dtype = "bf16"', "weights are float32"),
        ('op = "router-topk"\nnum_groups = 8', "group_topk is missing; give both, or neither"),
        ('op = "router-topk"\ngroup_topk = 8', "num_groups is missing; give both, or neither"),
        ('op = "router-topk"\nnum_groups = 3\ngroup_topk = 1', "divide the 256 experts; 1, 2, 4, 8, 16, 32, 64 do"),
        ('op = "router-topk"\nnum_groups = 8\ngroup_topk = 3', "divide topk = 8: every group's best"),
        ('op = "router-topk"\nnum_groups = 64\ngroup_topk = 1', "8 / 1 = 8 experts of a group are summed, and a group"),
        ('op = "router-topk"\nscaling_factor = inf', "must be finite"),
        ('op = "router-topk"\ndtype = "fp16"', 'must be "f32" or "bf16"'),
        ('op = "router-topk"\ntile = [128, 128]', "there is no such field"),
        ('op = "router-aux-score"\nscaling_factor = 2.0', "there is no such field"),
        ('op = "router-topk-bwd"\nexpert_bias = true', "there is no such field"),
        ('op = "router-aux-score-bwd"\nrouting_map = "bits"', "there is no such field"),
        ('op = "router-topk"\nproblem = { T = -4 }', "must be from 0"),
        ('op = "moe-aux-loss"\nscore_function = "sigmoid"', "there is no such field"),
        ('op = "moe-aux-loss"\nscalars = "device"\ncoefficient = 0.5', "reads it from a tensor; leave it out"),
        ('op = "moe-aux-loss"\nscalars = "host"', 'must be "launch" or "device"'),
        ('op = "router-topk-bwd"\ngrad_dtype = "fp16"', 'must be "f32" or "bf16"'),
        ('op = "router-topk"\naddend = true', "there is no such field"),
        ('op = "moe-index"\nwarps = 8', "warps = 8: must be 32"),
        ('op = "moe-index"\nexperts = 5000', "at most 4096 experts are ordered"),
    ],
)
def test_refusals(lines, rule):
    assert rule in problem(lines)


ROWS = """
schema = 1
[defaults]
arch = "sm_90a"
topk = 8
"""


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ('op = "moe-permute"\ntopk = 65', "topk = 65: must be from 1 to 64"),
        ('op = "moe-permute"\nproblem = { T = 1, H = 12 }', "a row has 24 bytes, which must be a multiple of 16"),
        ('op = "moe-permute"\nproblem = { T = 1 }', "H is missing"),
        ('op = "moe-permute"\nexperts = 8', "there is no such field"),
        ('op = "moe-unpermute-bwd"\nweighted = true', "there is no such field"),
        ('op = "moe-permute-bwd"\nscaled = true', "there is no such field"),
        ('op = "moe-unpermute"\nscaled = true', "there is no such field"),
        (
            'op = "moe-permute"\nscaled = true\nweighted = true',
            "scaled = true: rows that are scaled have their weights",
        ),
        ('op = "moe-index"', "experts is missing"),
        ('op = "moe-unpermute"\naddends = 3', "addends = 3: must be from 0 to 2; add the others up before"),
        ('op = "moe-unpermute"\naddends = -1', "addends = -1"),
        ('op = "moe-permute"\naddends = 1', "there is no such field"),
        ('op = "moe-weights-bwd"', "experts is missing"),
        ('op = "moe-bias-bwd"\nexperts = 8\ndtype = "fp16"', 'must be "f32" or "bf16"'),
        ('op = "moe-bias-bwd"\nexperts = 8\nproblem = { T = 1, H = 12 }', "a row has 24 bytes"),
        ('op = "moe-bias-bwd"', "experts is missing"),
    ],
)
def test_refusals_between_router_and_gemm(lines, rule):
    assert rule in problem(lines, ROWS)


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ("terms = 4", "terms = 4: must be from 1 to 3"),
        ("terms = 0", "terms = 0: must be from 1 to 3"),
        ("problem = { T = 1, H = 12 }", "a row has 24 bytes, which must be a multiple of 16"),
        ("topk = 2", "there is no such field"),
    ],
)
def test_refusals_of_a_split(lines, rule):
    assert rule in problem(f'op = "router-split"\n{lines}', 'schema = 1\n[defaults]\narch = "sm_90a"\n')


@pytest.mark.parametrize("op", ROUTER_OPS)
def test_required_keys(op):
    with pytest.raises(SpecError) as caught:
        specs(f'op = "{op}"', head="schema = 1\n")
    assert {line.partition(" is missing")[0].split()[-1] for line in caught.value.problems} == {"experts", "topk"}


def test_canonical_form_round_trips():
    for spec in find(["router", "permutation"]):
        data = json.loads(canonical_json(spec.canonical()))
        assert data == spec.canonical()
        assert list(data) == sorted(data)


def test_names_and_scalars_are_not_part_of_the_device_spec():
    first, second = specs('op = "router-topk"\nscaling_factor = 2.0\nproblem = { T = 5 }', 'op = "router-topk"')
    assert first.device_spec() == second.device_spec()
    assert not {"file", "kernel", "summary", "problem", "scaling_factor"} & first.device_spec().keys()


def test_every_key_is_documented():
    for keys in (ROUTER_FIELDS | PERMUTATION_FIELDS).values():
        assert all(key.doc.endswith(".") for key in keys)
