"""What the ELF reader says of a cubin, against CUDA's own tools."""

import re

import pytest

from fusekit.abi.elf import check_cubin
from fusekit.compiler import cubin as cubins
from fusekit.compiler.trace import compile_plan
from fusekit.compiler.worker import plan
from fusekit.errors import BuildError, ToolchainError
from fusekit.spec import find
from tests.compiler import sass


@pytest.fixture(scope="module")
def symbol(compiled):
    return compiled.launch["symbol"]


def tool(name, option, cubin):
    try:
        return sass.run_tool(name, option, cubin)
    except ToolchainError as error:
        pytest.skip(str(error))


def test_resources_are_those_of_cuobjdump(compiled, symbol):
    text = tool("cuobjdump", "-res-usage", compiled.cubin)
    result = dict(re.findall(r"(\w+):(\d+)", text.rpartition(symbol)[2]))
    facts = cubins.read(compiled.cubin, symbol)
    assert facts.registers == int(result["REG"])
    assert facts.frame_bytes == int(result["STACK"]) == int(result["LOCAL"])
    assert facts.static_shared == int(result["SHARED"]) == 0
    assert compiled.resources["registers"] == facts.registers
    assert compiled.resources["dynamic_shared"] == 2048


def test_parameters_are_those_of_cuobjdump(compiled, symbol):
    text = tool("cuobjdump", "-elf", compiled.cubin)
    rows = re.findall(r"Ordinal : 0x([0-9a-f]+)\s+Offset  : 0x([0-9a-f]+)\s+Size    : 0x([0-9a-f]+)", text)
    theirs = sorted(tuple(int(value, 16) for value in row) for row in rows)
    facts = cubins.read(compiled.cubin, symbol)
    assert [(index, parameter.offset, parameter.size) for index, parameter in enumerate(facts.parameters)] == theirs
    assert [parameter.size for parameter in facts.parameters] == [128, 128, 8, 4, 4, 8]
    assert check_cubin(compiled.cubin, [symbol], "demo") == {symbol: len(theirs)}
    assert facts.parameter_bytes == facts.parameters[-1].offset + facts.parameters[-1].size
    assert facts.max_threads == 128


def test_machine_code_is_read(compiled, symbol):
    try:
        code = sass.instructions(compiled.cubin, symbol)
    except ToolchainError as error:
        pytest.skip(str(error))
    counted = sass.counts(code)
    assert counted["UTMACCTL"] == 2  # the two prefetched descriptors
    assert counted["EXIT"] >= 1
    assert counted["STL"] == 0
    assert any(item.predicate for item in code)
    with pytest.raises(BuildError, match="no kernel 'other'"):
        sass.instructions(compiled.cubin, "other")


def test_an_unknown_symbol_is_named(compiled, symbol):
    assert cubins.kernels(compiled.cubin) == (symbol,)
    with pytest.raises(BuildError, match="no kernel 'other'; it has kernel_cutlass"):
        cubins.read(compiled.cubin, "other")


@pytest.mark.parametrize("length", [0, 3, 16, 63, 100, 1000, 3000])
def test_a_cubin_cut_short_is_refused(compiled, symbol, length):
    with pytest.raises(BuildError, match="cubin"):
        cubins.read(compiled.cubin[:length], symbol)


def test_a_gemm_has_the_reserved_shared_memory_and_no_more(tmp_path):
    """As cuobjdump counts it is 1024 bytes, as the driver counts (CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) none."""
    compiled = compile_plan(plan(find(["quickstart/moe-fc2"])[0]), tmp_path)
    text = tool("cuobjdump", "-res-usage", compiled.cubin)
    result = dict(re.findall(r"(\w+):(\d+)", text))
    assert int(result["SHARED"]) == cubins.RESERVED_SHARED
    assert compiled.resources["static_shared"] == 0
    assert compiled.resources["registers"] == int(result["REG"])
    assert compiled.resources["spill_bytes"] == int(result["STACK"])
    code = sass.counts(sass.instructions(compiled.cubin, compiled.launch["symbol"]))
    assert code["HGMMA"] > 0
    assert code["UTMALDG"] > 0
    assert code["UTMASTG"] > 0
