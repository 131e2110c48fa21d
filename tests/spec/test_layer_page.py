"""The page of layers says what the source says: its keys, its example, and the memory that a layer needs."""

import json
import re
from pathlib import Path

import pytest

from fusekit.plan.layer import layer_fields, program
from fusekit.plan.layer.options import ROUTER_FIELDS
from fusekit.plan.layer.ranks import room, stores, window_sizes
from fusekit.spec import parse_file
from fusekit.spec.fields import ACTIVATION_FIELDS
from fusekit.spec.model import DTYPES
from tests.plan.test_layer_program import CASES, options
from tests.plan.test_layer_ranks import LAYERS, over

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "layers.md").read_text()


@pytest.mark.parametrize("keys", [layer_fields(ACTIVATION_FIELDS, DTYPES), ROUTER_FIELDS], ids=["layer", "router"])
def test_every_key_stands_on_the_page(keys):
    rows = []
    for key in keys:
        default = "required" if key.required else "" if key.default is None else f"`{json.dumps(key.default)}`"
        rows.append(f"| `{key.name}` | {default} | {key.doc} |")
    assert "\n".join(["| field | default | meaning |", "|---|---|---|", *rows]) + "\n\n" in PAGE


def test_the_example_is_the_program():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert (ROOT / "examples" / "layer.py").read_text() in blocks


def test_the_declaration_can_be_read(tmp_path):
    table, *_ = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "model.toml").write_text(table)
    layer = parse_file(tmp_path / "model.toml")[0].layer
    assert {**layer.canonical(), "file": ""} == {
        **parse_file(ROOT / "kernel_specs" / "gpt-oss-20b.toml")[0].layer.canonical(), "file": "",
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_memory_is_what_the_page_says(name):
    o, tokens = options(**CASES[name]), 1000
    layer_program = program(o)
    rows, width = tokens * o.topk, o.sides * o.intermediate
    stays = o.keep == "z"
    if o.kind == "mlp":
        want = 2 * tokens * width * stays
    else:
        given = o.router["input"]
        want = 2 * rows * width * stays + 4 * tokens * o.experts * (given == "x") + 4 * tokens * o.topk + 4 * o.experts
        want += 8 * tokens * o.topk * (given != "choices") + 4 * rows + 4 * rows * (o.router["scale"] != "input")
        want += 2 * tokens * o.sides * o.shared * stays + 4 * o.experts * o.router["aux_loss"]
        want += 4 * tokens * o.shared_gate
    kept = [buffer for buffer in layer_program.buffers.values() if buffer.place == "kept"]
    assert sum(buffer.bytes(layer_program.dims(tokens)) for buffer in kept) == want


@pytest.mark.parametrize("name", LAYERS)
def test_the_memory_of_a_rank_is_what_the_page_says(name):
    o, tokens = over(2, name, dtype="bf16"), 1000
    layer_program = program(o).within(room(o, tokens, 5000))
    rows, slots, given = 5000, 2048, o.router["input"]
    want = 2 * rows * o.sides * o.intermediate * (o.keep == "z") + 4 * rows + 4 * rows * (o.router["scale"] != "input")
    want += 4 * slots * o.topk + 4 * o.local + 4 * tokens * o.experts * (given == "x")
    want += 8 * tokens * o.topk * (given != "choices") + 4 * o.experts * o.router["aux_loss"]
    want += 2 * tokens * o.sides * o.shared * (o.keep == "z") + 4 * tokens * o.shared_gate
    kept = [buffer for buffer in layer_program.buffers.values() if buffer.place == "kept"]
    assert sum(buffer.bytes(layer_program.dims(tokens)) for buffer in kept) == want
    sizes, row, choices = window_sizes(layer_program, o), 2 * slots * o.hidden, 4 * slots * o.topk
    parts = {"sent": 2, "grads": 2, "sums": int(given == "choices"), "returned": 1}
    assert [*sizes] == [*parts]
    others = {each: sizes[each] - (row * (each != "returned") + choices * count) for each, count in parts.items()}
    assert all(0 < each < 2048 for each in others.values())  # the header and the flags


def test_the_window_of_fp8_values_is_what_the_page_says():
    o = over(2, "fp8", dtype="bf16")
    layer_program = program(o).within(room(o, 1000))
    slots = 2048
    want = slots * o.hidden + 4 * slots * -(-o.hidden // 128) + 8 * slots * o.topk
    sizes = window_sizes(layer_program, o)
    assert 0 < sizes["fp8"] - want < 2048  # the header and the flags
    assert 0 < sizes["sent"] - 2 * slots * o.hidden - 8 * slots * o.topk < 2048
    assert list(stores(layer_program)) == ["fp8", "sent", "grads", "sums", "returned"]
    assert list(stores(layer_program, "inference")) == ["fp8", "sums"]
    assert list(stores(program(over(2, "fp8", keep="none")))) == ["fp8", "sums"]
