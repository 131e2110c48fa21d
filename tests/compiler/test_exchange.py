"""Dispatch and combine, compiled and proved without a GPU, and what their machine code says of order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusekit.abi import LaunchRecord, evaluate
from fusekit.compiler.trace import compile_plan
from fusekit.compiler.worker import plan
from fusekit.errors import SpecError, ToolchainError
from fusekit.plan import exchange
from fusekit.plan.exchange import regions
from fusekit.spec import parse_text
from tests.compiler import sass
from tests.soak import sample

HEAD = 'schema = 1\n[[kernel]]\nname = "k"\narch = "sm_90a"\n'
KERNELS = {
    "dispatch": 'op = "moe-dispatch"\nranks = 2\nexperts = 16\ntopk = 4\nweighted = true\n',
    "dispatch-8": 'op = "moe-dispatch"\nranks = 8\nexperts = 128\ntopk = 8\nblocks = 20\nwarps = 8\n',
    "dispatch-fp8": 'op = "moe-dispatch"\nranks = 2\nexperts = 16\ntopk = 4\nweighted = true\ndtype = "e4m3"\n',
    "dispatch-32": 'op = "moe-dispatch"\nranks = 32\nexperts = 256\ntopk = 8\n',
    "choices": 'op = "moe-dispatch"\nranks = 2\nexperts = 16\ntopk = 4\nweighted = true\nsends = "choices"\n',
    "rows": 'op = "moe-dispatch"\nranks = 4\nexperts = 16\ntopk = 4\nweighted = true\nsends = "rows"\nblocks = 9\n',
    "combine": 'op = "moe-combine"\nranks = 2\nexperts = 16\ntopk = 4\nweighted = true\n',
    "combine-4": 'op = "moe-combine"\nranks = 4\nexperts = 16\ntopk = 2\ngradients = true\ndtype = "f32"\n',
    "combine-sums": 'op = "moe-combine"\nranks = 2\nexperts = 16\ntopk = 4\naddends = 2\n',
    "combine-gradients": 'op = "moe-combine"\nranks = 2\nexperts = 16\ntopk = 4\ngradients = true\nrows = false\n',
    "combine-overflow": 'op = "moe-combine"\nranks = 2\nexperts = 16\ntopk = 4\nweighted = true\noverflow = true\n',
    "combine-1": 'op = "moe-combine"\nranks = 1\nexperts = 16\ntopk = 1\n',
}


@pytest.fixture(
    scope="module", params=sample(KERNELS, "dispatch-fp8", "choices", "rows", "combine-4", "combine-overflow")
)
def built(request, tmp_path_factory):
    """(spec, what it compiled to); the proof has passed."""
    (spec,) = parse_text(HEAD + KERNELS[request.param], "s")
    return spec, compile_plan(plan(spec), Path(tmp_path_factory.mktemp("trace")))


def test_the_record(built):
    spec, compiled = built
    record = LaunchRecord.from_json(compiled.launch)
    assert record.schema == 3
    assert record.skip_if_zero == ()  # other ranks wait for one that has no tokens
    (window,) = record.peers
    assert (window.count, window.alignment) == (spec.ranks, 128)
    pointers = [item.argument for item in record.parameters if getattr(item, "argument", "").startswith("window.")]
    assert pointers == [f"window.{rank}" for rank in range(spec.ranks)]
    scalars = {scalar.name: (scalar.minimum, scalar.divisor) for scalar in record.scalars}
    assert scalars == {"rank": (0, 1), "capacity": (128, 128), "timeout": (1, 1)}
    assert next(scalar for scalar in record.scalars if scalar.name == "rank").maximum == spec.ranks - 1
    tokens = {"T": 33, "H": 64, "M": 5, "S": 128 * spec.ranks, "capacity": 128}
    grid = evaluate(record.grid[0], tokens)
    dispatch = {"all": 2 * spec.blocks + 1, "choices": spec.blocks + 1, "rows": spec.blocks + 64 + 1}
    assert grid == (dispatch[spec.sends] if spec.op == "moe-dispatch" else spec.blocks + 3)
    names = {argument.name for argument in record.arguments}
    assert ("x" in names) == (spec.rows and spec.sends != "choices")
    assert ("weights" in names) == (spec.weighted and spec.sends != "rows")
    assert evaluate(record.grid[0], {**tokens, "T": 0}) >= 1
    assert not any(evaluate(constraint.expr, tokens) for constraint in record.constraints)
    assert any(evaluate(constraint.expr, {**tokens, "T": 129}) for constraint in record.constraints)
    assert compiled.launch["parameters"]


def test_few_registers_are_spilled(built):
    """Bytes of a thread. Kernels of many ranks hold the address of each window."""
    spec, compiled = built
    few = {"moe-combine": 32, "moe-dispatch": 0}[spec.op]
    assert compiled.resources["spill_bytes"] <= (few if spec.ranks <= 8 else 320)


@pytest.mark.parametrize(("ranks", "most"), sample([(4, 64), (32, 160)], (32, 160)))
def test_combine_of_many_ranks_spills_little(ranks, most, tmp_path):
    text = f'{HEAD}op = "moe-combine"\nranks = {ranks}\nexperts = 256\ntopk = 8\nweighted = true\noverflow = true\n'
    (spec,) = parse_text(text, "s")
    assert compile_plan(plan(spec), tmp_path).resources["spill_bytes"] <= most


def test_flags_are_released_and_acquired_at_system_scope(built):
    """A weak flag would be right in most runs."""
    _, compiled = built
    try:
        code = sass.instructions(compiled.cubin, compiled.launch["symbol"])
    except ToolchainError as error:
        pytest.skip(str(error))
    text = "\n".join(map(str, code))
    assert re.search(r"LD\.E\.STRONG\.SYS|LDG\.E\.STRONG\.SYS", text), "no acquire at system scope"
    assert re.search(r"ST\.E\.STRONG\.SYS|STG\.E\.STRONG\.SYS", text), "no release at system scope"
    assert re.search(r"MEMBAR\.\w+\.SYS", text), "nothing orders rows before flags"


@pytest.mark.parametrize(("name", "ranks", "end"), [("dispatch", 2, "end"), ("rows", 4, "end"), ("choices", 2, "rows")])
def test_regions_of_the_record_are_those_of_the_kernel(name, ranks, end):
    (spec,) = parse_text(HEAD + KERNELS[name], "s")
    (window,) = plan(spec).signature.peers
    for capacity in (128, 384, 8192):
        wanted = getattr(regions(capacity, 5760, ranks, 16, 16), end)
        assert evaluate(window.bytes, {"capacity": capacity, "H": 2880}) == wanted


def test_the_window_of_fp8_values_has_their_scales():
    (spec,) = parse_text(HEAD + KERNELS["dispatch-fp8"], "s")
    (window,) = plan(spec).signature.peers
    result = regions(384, 2880, 2, 16, 16, 4 * 23)
    assert evaluate(window.bytes, {"capacity": 384, "H": 2880}) == result.end == result.scales + 4 * 23 * 2 * 384


def test_parts_of_a_window_overlap_nowhere():
    for capacity in (128, 384, 8192):
        result = regions(capacity, 5760, 4, 16, 16)
        sizes = [4 * capacity * 4 // 16, 4 * 64 * 4, 4 * capacity * 16, 4 * capacity * 16, 4 * capacity * 5760]
        starts = list(result)
        assert starts[0] == 512 and all(start % 128 == 0 for start in starts)
        assert all(start + size <= after for start, size, after in zip(starts, sizes, starts[1:], strict=False))
    words = {"EPOCH": 1, "TICKET": 1, "DONE": 1, "STATUS": 3, "CAME": 1, "LOCAL_TOKENS": 2, "WAIT": 1, "BEGUN": 1,
             "ROWS_TICKET": 1, "ROWS_DONE": 1, "DRAWN": 2, "NEXT": 2}  # fmt: skip
    taken = [getattr(exchange, name) // 4 + index for name, count in words.items() for index in range(count)]
    assert len(taken) == len(set(taken)) and max(taken) < exchange.OPEN // 4


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("ranks = 33\nexperts = 33\ntopk = 1", "ranks = 33: must be from 1 to 32"),
        ("ranks = 3\nexperts = 16\ntopk = 1", "experts = 16: must be a multiple of ranks, 3"),
        ("ranks = 2\nexperts = 16\ntopk = 65", "topk = 65: must be from 1 to 64"),
        ("ranks = 2\nexperts = 16\ntopk = 1\nwarps = 5", "warps = 5: must be 4 or 8 or 16 or 32"),
        ("ranks = 2\nexperts = 16\ntopk = 1\nblocks = 2000", "blocks = 2000: must be from 1 to 1024"),
        ("ranks = 2\nexperts = 16\ntopk = 1\nproblem = { T = 8, H = 9 }", "a row has 18 bytes"),
        ("experts = 16\ntopk = 1", "ranks"),
        ("ranks = 2\nexperts = 16\ntopk = 1\ngradients = true", "gradients"),
    ],
)
def test_a_wrong_spec_is_refused_in_words(keys, text):
    with pytest.raises(SpecError, match=re.escape(text)):
        parse_text(f'{HEAD}op = "moe-dispatch"\n{keys}\n', "s")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("rows = false", "rows = false: goes with gradients = true"),
        (
            "rows = false\ngradients = true\naddends = 1",
            "rows = false: goes with gradients = true, and without weights",
        ),
        ("addends = 3", "addends = 3: must be from 0 to 2"),
        ('dtype = "e4m3"', "dtype"),
    ],
)
def test_a_wrong_combine_is_refused_in_words(keys, text):
    with pytest.raises(SpecError, match=re.escape(text)):
        parse_text(f'{HEAD}op = "moe-combine"\nranks = 2\nexperts = 16\ntopk = 1\n{keys}\n', "s")
