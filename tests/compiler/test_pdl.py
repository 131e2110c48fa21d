"""Launches that begin early: the attribute in the record, and the wait before all memory in the machine code."""

import pytest

from fusekit.abi import LaunchRecord
from fusekit.errors import SpecError, ToolchainError
from fusekit.spec import parse_text
from tests.compiler import sass
from tests.records import read_record

HEAD = 'schema = 1\n[[kernel]]\nname = "k"\narch = "sm_90a"\n'
KERNELS = {
    "grouped-gemm": 'gather = "x"\ntile = [16, 64]\nchoices = 8\n',
    "moe-index": "experts = 16\ntopk = 8\ntokens = true\n",
    "moe-unpermute": "topk = 8\nweighted = true\n",
}
WAIT, LET, MEMORY = (
    "ACQBULK",
    "PREEXIT",
    ("LDG", "STG", "UTMALDG", "UTMASTG", "LDGSTS", "ATOMG", "REDG", "RED", "LD", "ST"),
)


@pytest.mark.parametrize("op", KERNELS)
def test_a_kernel_that_begins_early_waits_before_it_reads_or_writes_memory(op, tmp_path):
    pytest.importorskip("cutlass", reason="the CuTe DSL (extra `build`) is not installed")
    from fusekit.compiler.trace import compile_plan
    from fusekit.compiler.worker import plan

    (spec,) = parse_text(f'{HEAD}op = "{op}"\n{KERNELS[op]}pdl = true\n', "t")
    compiled = compile_plan(plan(spec), tmp_path)
    record = LaunchRecord.from_json(compiled.launch)
    assert record.attributes == {"programmatic_stream_serialization": 1}
    try:
        code = [each.base for each in sass.instructions(compiled.cubin, record.symbol)]
    except ToolchainError as error:
        pytest.skip(str(error))
    assert code.index(LET) < code.index(WAIT) < min(code.index(each) for each in MEMORY if each in code)


def test_others_begin_in_their_turn():
    (spec,) = parse_text(f'{HEAD}op = "grouped-gemm"\n{KERNELS["grouped-gemm"]}', "t")
    assert not read_record(spec).attributes


def test_a_backward_kernel_does_not_begin_early():
    with pytest.raises(SpecError, match="only a forward epilogue begins early; leave it out"):
        parse_text(f'{HEAD}op = "grouped-wgrad"\npdl = true\n', "t")
