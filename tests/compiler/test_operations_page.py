"""The page of the operations has every operation, every argument of its launches, and the words that `show` has."""

import re
from pathlib import Path

import pytest

from fusekit.abi import PeersArgument, TensorArgument
from fusekit.compiler.worker import plan
from fusekit.plan.operations import OPERATIONS
from fusekit.reference.layouts import gate_columns
from fusekit.spec import parse_text
from fusekit.spec.hf_families import FAMILIES
from fusekit.spec.operands import BACKWARD, operands

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
GEMM = "tile = [128, 128]\n"
GATED = 'activation = { kind = "swiglu" }\nsave_preactivation = true\nbias = true\nrow_scale = true\n'
SCORES = "experts = 16\ntopk = 2\nscore_function = 'sigmoid'\n"
DERIVATIVE = 'activation = { kind = "dswiglu" }\nrecompute = true\nrow_scale = true\ndprob = true\ndbias = true\n'
COMPACT, BITS = 'outputs = "compact"\n', 'routing_map = "bits"\n'
WGRAD = [GEMM + "dbias = true\n", GEMM + 'dbias = true\nout_dtype = "f32"\naccumulate = true\n']
QUANT = 'quant = { in = "fp8-row", accumulation = "fast" }\n'
BLOCK = 'quant = { in = "fp8-block" }\n'
DZ = 'quant = { out = "fp8-block", keep = true }\n'
TURNED = GEMM + 'quant = { out = "fp8-block", transpose = true }\nactivation = { kind = "dswiglu" }\nrecompute = true\n'
CODED = 'tile = [128, 256]\nquant = { out = "fp8-block", transpose = true }\nactivation = { kind = "swiglu" }\n'
LARGEST = 'quant = { out = "amax", rht_amax = true }\n'
COMING = 'gather = "x"\nawaits = true\n'
VARIANTS = {  # which kernels have all the arguments of an operation between them
    "dense-gemm": [GEMM + GATED + 'alpha = "scalar"\n' + QUANT, GEMM + 'gather = "x"\n', CODED, GEMM + LARGEST],
    "grouped-gemm": [
        GEMM + GATED + 'alpha = "group"\n' + QUANT,
        GEMM + 'alpha = "scalar"\n' + COMING,
        CODED,
        GEMM + LARGEST,
        'tile = [16, 128]\ngather = "x"\nchoices = 8\n',
    ],
    BACKWARD: [
        GEMM + DERIVATIVE + QUANT,
        GEMM + DERIVATIVE + COMING,
        GEMM + DERIVATIVE + DZ,
        TURNED,
        GEMM + DERIVATIVE + LARGEST,
    ],
    "dense-wgrad": [*WGRAD, GEMM + "split = true\n", GEMM + BLOCK],
    "grouped-wgrad": [*WGRAD, GEMM + "dbias = true\ngather = 'x'\n", GEMM + BLOCK],
    "router-topk": [
        SCORES + "expert_bias = true\n",
        SCORES + 'outputs = "compact"\n',
        SCORES + 'routing_map = "bits"\n',
    ],
    "router-topk-bwd": [
        SCORES + 'addend = true\ngrad_dtype = "bf16"\n',
        SCORES + 'outputs = "compact"\n',
        SCORES + 'routing_map = "bits"\n',
    ],
    "router-aux-score": [SCORES, SCORES + 'routing_map = "bits"\n'],
    "router-aux-score-bwd": [SCORES],
    "moe-aux-loss": ["experts = 16\ntopk = 2\n", 'experts = 16\ntopk = 2\nscalars = "device"\n'],
    "moe-aux-loss-bwd": ["experts = 16\ntopk = 2\n", 'experts = 16\ntopk = 2\nscalars = "device"\n'],
    "moe-index": ["experts = 16\ntopk = 2\ncounts = true\ntokens = true\nweighted = true\nbounded = true\n"],
    "moe-permute": ['topk = 2\nweighted = true\ndtype = "e4m3"\n', "topk = 2\nscaled = true\n"],
    "moe-permute-bwd": ["topk = 2\n"],
    "moe-unpermute": ["topk = 2\nweighted = true\naddends = 2\n"],
    "moe-unpermute-bwd": ["topk = 2\n"],
    "moe-weights-bwd": ["experts = 16\ntopk = 2\naddend = true\n"],
    "moe-bias-bwd": ["experts = 16\ntopk = 2\n"],
    "quantise": [
        'out = "fp8-block"\ntranspose = true\n',
        'out = "fp8-block"\ngather = true\n',
        'out = "fp8-block"\ntopk = 2\n',
        'out = "fp8-block"\nblocks = "128x128"\ntranspose = true\n',
        'out = "mxfp8"\ntranspose = true\n',
        'out = "amax"\nrht_amax = true\n',
    ],
    "moe-gate": [""],
    "moe-gate-bwd": [""],
    "rms-norm": ["residual = true\n"],
    "rms-norm-bwd": ["addend = true\n"],
    "rms-norm-wgrad": [""],
    "moe-zero": [""],
    "router-split": [""],
    "router-sum": ["experts = 16\nbias = true\n"],
    "moe-dispatch": ["dtype = 'e4m3'\nexperts = 16\ntopk = 2\nranks = 2\nweighted = true\n"],
    "moe-combine": [
        "experts = 16\ntopk = 2\nranks = 2\nweighted = true\ngradients = true\naddends = 2\noverflow = true\n"
    ],
    "moe-check": [""],
}


def section(op: str) -> str:
    """The page from the operation's heading to the next one."""
    heading = "## The backward epilogue" if op == BACKWARD else f"# `{op}`"
    return PAGE.partition(f"{heading}\n")[2].partition("\n##")[0]


def launched(op: str):
    """(spec, signature) of each variant."""
    for keys in VARIANTS[op]:
        name = "grouped-gemm" if op == BACKWARD else op
        text = f'schema = 1\n[[kernel]]\nname = "k"\nop = "{name}"\narch = "sm_90a"\n{keys}'
        (spec,) = parse_text(text, "page")
        yield spec, plan(spec).signature


def test_every_operation_is_there():
    own = {*OPERATIONS, BACKWARD} - {"extern"}  # a foreign kernel's arguments stand in its own spec
    assert set(VARIANTS) == own
    assert all(section(op).strip() for op in VARIANTS)


@pytest.mark.parametrize("op", VARIANTS)
def test_a_section_has_the_arguments_of_its_launches(op):
    rows = {}
    for line in section(op).splitlines():
        if line.startswith("| `"):
            name, role, dtype, _, what = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name.strip("`")] = role, dtype, what
    seen = set()
    for spec, signature in launched(op):
        words = operands(spec.canonical())
        for argument in signature.arguments:
            role, dtype, what = rows[argument.name]
            seen.add(argument.name)
            kind = "peers" if isinstance(argument, PeersArgument) else "scalar"
            assert (argument.role if isinstance(argument, TensorArgument) else kind) in role.split(" or ")
            if kind != "peers":
                types = dtype.split(" or ")
                assert {"dtype", "out_dtype"} & {*types} or argument.dtype in types, argument.name
            assert what == words[argument.name]
    assert set(rows) == seen, "a row for an argument that no launch has"
    assert seen <= set(words)


def test_the_picture_of_gate_and_up_is_that_of_the_reference():
    pictured = re.findall(r"^(concat|interleaved) +((?:[gu]\d ?)+)$", PAGE, re.MULTILINE)
    assert [layout for layout, _ in pictured] == ["concat", "interleaved"]
    for layout, picture in pictured:
        columns = picture.split()
        assert [columns[place] for place in gate_columns(layout, 4)] == ["g0", "g1", "g2", "g3"]


def test_the_picture_of_groups_is_what_offsets_mean():
    rows = re.search(r"^group +([\d -]+?) {3,}offsets = \[([\d, ]+)\], M = (\d+)$", PAGE, re.MULTILINE)
    groups, ends = rows[1].split(), [int(end) for end in rows[2].split(",")]
    owners = [next((str(e) for e, end in enumerate(ends) if row < end), "-") for row in range(int(rows[3]))]
    assert groups == owners


def test_every_model_type_is_named():
    table = PAGE.partition("## Which models fit")[2]
    assert set(re.findall(r"`([a-z0-9_]+)`", "".join(re.findall(r"^\|.*\|$", table, re.MULTILINE)))) == set(FAMILIES)
