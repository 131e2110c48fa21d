"""Spec files that are made to cost time, memory or a traceback: each is refused in a second, in words."""

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusekit.errors import SpecError
from fusekit.spec import layer, packaged_files, parse, parse_file, parse_text, rules
from fusekit.spec.document import MAX_BYTES

KERNEL = '[[kernel]]\nname = "k"\nop = "grouped-gemm"\narch = "sm_90a"\n'
HEAD = "schema = 1\n" + KERNEL
MILLION = 10**6
TABLES = ", ".join(f"{{ tile = [{m}, {n}], cluster = [1, 1] }}" for m in range(1, 17) for n in range(1, 17))
DEEP = 400
MOST_CALLS = 5 * 10**6  # of functions; nothing here makes half as many


@contextmanager
def soon() -> Iterator[None]:
    """Calls are counted, which a busy machine does not change; the seconds are for a single call that takes long."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before, start = sys.getprofile(), time.process_time()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
    assert calls < MOST_CALLS
    assert time.process_time() - start < 20


def refusal(text: str) -> str:
    """The message, which is short and comes soon."""
    with soon(), pytest.raises(SpecError) as caught:
        parse_text(text, "s")
    message = str(caught.value)
    assert len(message) < 30_000
    assert all(line.isprintable() for line in message.splitlines())
    return message


@pytest.mark.parametrize("digits", [400, 4299, 5000, 100_000])
@pytest.mark.parametrize(
    "key",
    ["tile = [128, {}]", "cluster_margin = {}", "bias = {}", "problem = {{ E = {}, M = 1, N = 8, K = 8 }}", "{} = 1",
     'activation = {{ kind = "swiglu", alpha = {} }}', "exclude = [{{ tile = [128, {}] }}]", "out_dtype = {}",
     'activation = {{ kind = "swiglu", limit = {}.0 }}', "summary = -{}", "tile = [[128, 128], [{}, 1]]"],
)  # fmt: skip
def test_long_numbers(key, digits):
    line = key.format("9" * digits)
    assert re.search(r"must be|thousands of digits|no such field|not TOML", refusal(HEAD + line + "\n"))
    if key[0] != "{" and ".0" not in key:
        assert "must be" in refusal(HEAD + key.format("0x" + "f" * digits).replace("-0x", "0x") + "\n")


def test_long_versions():
    for number in ("9" * 400, "9" * 5000, "0x" + "f" * 5000, f"1{'0' * 400}.0", "[" * 10 + "]" * 10):
        assert refusal(HEAD.replace("schema = 1", f"schema = {number}"))


@pytest.mark.parametrize("depth", [17, DEEP, 5000, 100_000])
@pytest.mark.parametrize(
    "text",
    ["tile = {opened}{closed}", "tile = {opened}", "x = {tables}", "[{opened}x{closed}]",
     "tile = [ # {{\n{opened}1{closed}"],
)  # fmt: skip
def test_deep_nesting(text, depth):
    line = text.format(opened="[" * depth, closed="]" * depth, tables="{ a = " * depth + "1" + " }" * depth)
    assert re.search("brackets in one another|a spec file has at most", refusal(HEAD + line + "\n"))


@pytest.mark.parametrize("parts", [17, DEEP, 100_000])
@pytest.mark.parametrize("text", ["{key} = 1", "[{key}]", "[[{key}]]", "x = {{ {key} = 1 }}", '"a" . {key} = 1'])
@pytest.mark.parametrize("part", ["a", "'.'", '"."', "1"])
def test_dotted_keys(text, parts, part):
    key = ".".join([part] * parts)
    message = refusal(HEAD + text.format(key=key) + "\n")
    assert "a key of more than 16 parts" in message or "bytes; a spec file has at most" in message


@pytest.mark.parametrize("quotes", ['"""', "'''"])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_nesting_after_a_string(quotes, more):
    """Up to two quotes more than three end a long string; what follows them in its line counts."""
    string = f"{quotes}a\n{quotes}" + quotes[0] * more
    message = refusal(f"schema = 1\nx = [{string}, {'[' * DEEP}{']' * DEEP}]\n")
    assert "line 3: more than 16 brackets" in message
    assert "line 3: a key of more than" in refusal(f"schema = 1\nx = {{ y = {string}, {'a.' * 20_000}a = 1 }}\n")


def test_what_strings_and_comments_hold_is_no_nesting():
    dots, brackets = "a." * 100, "[{" * 100
    text = f'''# {dots}{brackets}
schema = 1
summary = "{dots}\\"{brackets}"
[[kernel]]
name = "k"   # {brackets} '
summary = """
{dots}\\"{brackets} # " ""\\""""
op = 'grouped-gemm'
arch = "sm_90a" # {dots}
'''
    assert {spec.name for spec in parse_text(text, "s")} == {"s/k"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (KERNEL * MILLION, "bytes; a spec file has at most 262144"),
        (HEAD + "tile = [" + "[128, 128], " * MILLION + "]", "bytes; a spec file has at most 262144"),
        (HEAD + f"tile = [{'[128, 128], ' * 20_000}]", "20000 values; a list has at most 256"),
        (HEAD + f"exclude = [{'{}, ' * 60_000}]", "must be a list of tables"),
        (HEAD + f"exclude = [{'{tile=[1,1]},' * 15_000}]", "15000 tables; a list has at most 256"),
        (HEAD + f"tile = [{'1,' * 100_000}]", "must be a pair of integers"),
        (HEAD + f"tile = [{'[1,[]],' * 30_000}]", "30000 values"),
        ("schema = 1\n" + "[[kernel]]\n" * 20_000, "problems; there may be more: fix these first"),
        ("schema = 1\n" + "".join(f'[[kernel]]\nname="{i}"\n' for i in range(10_000)), "there may be more"),
        ("schema = 1\n" + '[[kernel]]\nname="a"\n' * 10_000, "has this name already"),
        (HEAD + "".join(f"k{i} = 1\n" for i in range(20_000)), "there is no such field"),
        ("".join(f"k{i} = 1\n" for i in range(20_000)) + HEAD, "there is no such field"),
        ('schema=1\n[defaults]\narch="sm_90a"\nop="grouped-gemm"\n'
         + "".join(f'[[kernel]]\nname="{i}"\n' for i in range(8000)), "a file makes at most 4096; sweep less"),
        (f'schema = 1\n[defaults]\narch = "sm_90a"\nop = "grouped-gemm"\nexclude = [{TABLES}]\n'
         + "".join(f'[[kernel]]\nname = "k{i}"\nproblem = {{ E = 8, M = {i}, N = 8, K = 8 }}\n' for i in range(1000))
         + "bias = 1\n", "bias = 1: must be true or false"),
        (HEAD + f"{'k' * 200_000} = 1\n", "there is no such field"),
        (HEAD + '"' + "\\u0001" * 30_000 + '" = 1\n', "there is no such field"),
        (HEAD + f'summary = "{"x" * 200_000}"\n', "200000 characters; at most 1000"),
        (HEAD + f'op2 = "{"x" * 200_000}"\n', "there is no such field"),
        (HEAD.replace('"k"', f'"{"k" * 200_000}"'), "a name is lower-case letters"),
        (HEAD.replace('"k"', '"\\u001b[31m\\u009b\\u202e"') + "bais = 1\n", "a name is lower-case letters"),
        (HEAD + 'dtype = "\\u001b[31m\\u009b\\u202e"\n', r"\u001b[31m\u009b\u202e"),
        ('schema = 1\nsummary = """' * 10_000, "not TOML"),
        ("'''\n" * 50_001, "not TOML"),
        ('"' * 200_001, "not TOML"),
        ('"""\\' + '"""\\' * 50_000, "not TOML"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)  # fmt: skip
def test_many_of_anything(text, said):
    assert said in refusal(text)


HEADS = 'schema = 1\n[defaults]\narch = "sm_90a"\nop = "grouped-gemm"\n'


def kernels(count: int) -> str:
    return HEADS + "".join(
        f'[[kernel]]\nname = "k{i}"\nproblem = {{ E = 8, M = {i}, N = 8, K = 8 }}\n' for i in range(count)
    )


def test_kernels_are_counted_before_any_is_made(monkeypatch):
    monkeypatch.setattr(parse, "expand", lambda *_: pytest.fail("made"))
    assert "[[kernel]] 1366 (k1365): one kernel more; a file makes at most 4096" in refusal(kernels(1366))


def test_the_kernels_of_layers_are_counted_before_any_is_made(monkeypatch):
    table = '[[kernel]]\nname = "m{}"\nkind = "moe"\narch = "sm_90a"\nhidden = 64\nintermediate = 64\n'
    table += "experts = 8\ntopk = 2\n"
    monkeypatch.setattr(layer, "program", lambda *_: pytest.fail("made"))
    message = refusal("schema = 1\n" + "".join(table.format(number) for number in range(2000)))
    assert "(m27): a layer of 150 kernels at most; a file makes at most 4096" in message


def test_no_layer_makes_more_kernels_than_it_counts_for():
    every = """[[kernel]]
        name = "m"
        kind = "moe"
        arch = "sm_90a"
        hidden = 512
        intermediate = 512
        experts = 16
        topk = 4
        bias = true
        shared = 512
        keep = "x"
        recipe = "fp8-block"
        router = { bias = true, aux_loss = true, score_function = "sigmoid", expert_bias = true, weight_dtype = "f32" }
        """
    assert len(parse_text("schema = 1\n" + every, "s")) <= 3 * layer.MOST_KERNELS
    tiles = "[128, 128], [128, 256]"  # those of FP8 output
    few = parse_text("schema = 1\n" + every + f"tile = [{tiles}]\ncluster = [[1, 1]]\n", "s")
    assert 30 < len({spec.kernel for spec in few}) <= layer.MOST_KERNELS and len(few) <= 2 * layer.MOST_KERNELS
    many = parse_text("schema = 1\n" + every + f"tile = [[128, 64], {tiles}]\ncluster = [[1, 1], [2, 1]]\n", "s")
    assert len(few) < len(many) <= 6 * layer.MOST_KERNELS


def test_kernels_that_differ_in_their_problem_are_checked_once(monkeypatch):
    """Each kernel has the same candidates: seven tiles with two clusters, and three for few rows alone."""
    checked = []
    monkeypatch.setattr(rules, "refusals", lambda plan, _: checked.append((plan.tile, plan.cluster)) or ())
    rules._of_kernel.cache_clear()
    try:
        assert len(parse_text(kernels(20), "s")) == 40  # of few rows: the best tile, alone, and the best other one
    finally:
        rules._of_kernel.cache_clear()
    assert len(checked) == len(set(checked)) == 17


def test_a_rule_of_one_kernel_is_not_that_of_another_with_the_same_name():
    """The result for a spec serves those that have all its values, the scalars included."""
    wide = HEADS + '[[kernel]]\nname = "k"\nactivation = {{ kind = "{}", {} = {} }}\n'
    assert len(parse_text(wide.format("swiglu", "alpha", 1.5), "s")) == 3
    assert "alpha = 1.5: only swiglu has it, not silu" in refusal(wide.format("silu", "alpha", 1.5))
    assert len(parse_text(wide.format("silu", "alpha", 1.0), "s")) == 3
    assert "limit = -1.0: must be above 0" in refusal(wide.format("swiglu", "limit", -1))
    assert len(parse_text(wide.format("swiglu", "limit", 1), "s")) == 3


def test_files_that_are_none(tmp_path):
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    with (tmp_path / "sparse.toml").open("wb") as file:
        file.truncate(8 << 30)
    (tmp_path / "large.toml").write_bytes(b"#" * (MAX_BYTES + 1))
    for name, said in (
        ("fifo.toml", "it is no regular file; write the spec into one first"),
        ("zero.toml", "it is no regular file"),
        ("sparse.toml", "8589934592 bytes; a spec file has at most 262144; split it"),
        ("large.toml", "262145 bytes"),
        ("x\0.toml", "cannot be a path"),
    ):
        with soon(), pytest.raises(SpecError, match=said):
            parse_file(tmp_path / name)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("fifo.toml", "zero.toml", "sparse.toml"):
        with pytest.raises(SpecError):
            parse_file(tmp_path / name)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_as_large_as_a_file_may_be(tmp_path):
    text = HEAD + "tile = [128, 128]\n"
    path = tmp_path / "full.toml"
    path.write_text(text + "#" * (MAX_BYTES - len(text)))
    assert len(parse_file(path)) == 1


TEXTS = [path.read_text() for path in packaged_files()]
ODD = st.sampled_from(
    ["[", "]", "[[", "{", "}", '"', '"""', "'", "'''", "=", ".", ",", "#", "\n", "\\", "\0", "\x1b", "\u202e", "\r\n",
     "9" * 400, "-", "0x", "nan", "inf", "1e999", "2020-01-01", "tile", "exclude", "op", "schema",
     "[defaults]\n", "true"]
)  # fmt: skip


@given(st.sampled_from(TEXTS), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30), ODD | st.text(max_size=3)),
                                        min_size=1, max_size=6))  # fmt: skip
@settings(deadline=1000)
def test_a_mutated_file_is_specs_or_a_spec_error(text, edits):
    for place, removed, added in edits:
        at = int(place * len(text))
        text = text[:at] + added + text[at + removed :]
    try:
        parse_text(text, "s")
    except SpecError as error:
        assert str(error).startswith("s.toml: ")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["tile", "cluster", "exclude", "schedule", "problem", "activation", "op", "name",
                                        "arch", "warps", "topk", "x"]), values, max_size=6))  # fmt: skip
def test_a_document_of_anything_is_specs_or_a_spec_error(table):
    """Past TOML: whatever values a table holds."""
    from fusekit.spec.values import TableReader, TooManyError

    kernel = {"name": "k", "op": "grouped-gemm", "arch": "sm_90a"} | table
    for document in ({"schema": 1, "kernel": [kernel]}, {"schema": 1, "defaults": table, "kernel": [{"name": "k"}]}):
        reader = TableReader()
        try:
            specs = parse._File(reader, document, "s").expand()
        except TooManyError:
            specs = ()
        assert reader.problems or specs
