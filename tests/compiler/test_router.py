"""The router's kernels, compiled and proved without a GPU, and what their machine code says."""

from pathlib import Path

import pytest

from fusekit.compiler import sass
from fusekit.compiler.families import plan
from fusekit.compiler.trace import compile_plan
from fusekit.errors import ToolchainError
from fusekit.spec import parse_text

HEAD = """
schema = 1
[defaults]
arch = "sm_90a"
[[kernel]]
name = "k"
"""
# (lines of a spec, tensors of the record in order, dynamic shared memory)
KERNELS = {
    "dense": ('op = "router-topk"\nexperts = 2304\ntopk = 36', "logits probs routing_map", 4 * 64 * 8),
    "compact": (
        'op = "router-topk"\nexperts = 256\ntopk = 8\nscore_function = "sigmoid"\nexpert_bias = true\nnum_groups = 8\n'
        'group_topk = 4\noutputs = "compact"\ndtype = "bf16"',
        "logits expert_bias indices weights",
        4 * (8 * 36 + 8) * 4,
    ),
    "odd": (
        'op = "router-topk"\nexperts = 61\ntopk = 61\nrouting_map = "bits"\nwarps = 8',
        "logits probs routing_map",
        8 * (128 * 8 + 8),
    ),
    "widest": ('op = "router-topk"\nexperts = 4096\ntopk = 64\npre_softmax = true', "logits probs routing_map", 4096),
    "backward": ('op = "router-topk-bwd"\nexperts = 2304\ntopk = 36', "logits routing_map grad_probs grad_logits", 576),
    "backward-compact": (
        'op = "router-topk-bwd"\nexperts = 256\ntopk = 8\npre_softmax = true\noutputs = "compact"',
        "logits indices grad_weights grad_logits",
        0,
    ),
    "aux": (
        'op = "router-aux-score"\nexperts = 127\ntopk = 8\nscore_function = "sqrtsoftplus"\ndtype = "bf16"',
        "logits scores score_sum routing_map",
        4 * 32 * 8,
    ),
    "aux-softmax": ('op = "router-aux-score"\nexperts = 128\ntopk = 1', "logits scores routing_map", 4 * 32 * 8),
    "aux-backward": (
        'op = "router-aux-score-bwd"\nexperts = 4096\ntopk = 2\nscore_function = "sigmoid"',
        "scores score_sum grad_scores grad_logits",
        16,
    ),
}


@pytest.fixture(scope="module", params=KERNELS)
def built(request, tmp_path_factory):
    """(what the kernel should be, what it compiled to); the proof has passed."""
    lines, tensors, shared = KERNELS[request.param]
    (spec,) = parse_text(HEAD + lines, "s")
    return spec, tensors, shared, compile_plan(plan(spec), Path(tmp_path_factory.mktemp("trace")))


def test_the_record(built):
    spec, tensors, shared, compiled = built
    launch = compiled.launch
    named = [argument["name"] for argument in launch["arguments"] if argument["kind"] == "tensor"]
    assert named == tensors.split()
    assert launch["dynamic_shared"] == shared
    assert launch["block"] == [32 * spec.warps, 1, 1]
    assert launch["skip_if_zero"] == ["T"]
    assert compiled.proof["launches"] >= 64
    assert {"smallest", "next to smallest", "largest T"} <= set(compiled.proof["edges"])


def test_the_row_stays_in_registers(built):
    _, _, _, compiled = built
    assert compiled.resources["spill_bytes"] == 0
    assert compiled.resources["registers"] <= 168  # three blocks of four warps on an SM
    try:
        counted = sass.counts(sass.instructions(compiled.cubin, compiled.launch["symbol"]))
    except ToolchainError as error:
        pytest.skip(str(error))
    assert not counted["LDL"] and not counted["STL"]
    assert not counted["ATOMG"] and not counted["RED"]  # nothing depends on the order of blocks


def test_rows_move_in_16_bytes():
    (spec,) = parse_text(HEAD + KERNELS["dense"][0], "s")
    compiled = _compiled(spec)
    try:
        code = sass.instructions(compiled.cubin, compiled.launch["symbol"])
    except ToolchainError as error:
        pytest.skip(str(error))
    loads = [each.opcode for each in code if each.base == "LDG"]
    assert len(loads) == 2304 * 4 // (16 * 32) and all(".128" in opcode for opcode in loads)
    # 18 stores clear the probabilities, 5 the map (the last for half a warp); two of each write what was chosen.
    stores = [each.opcode for each in code if each.base == "STG"]
    assert sum(".128" in opcode for opcode in stores) == 18 + 5
    assert len(stores) == 18 + 5 + 2 * 2


def test_a_sparse_backward_reads_no_row():
    (spec,) = parse_text(HEAD + KERNELS["backward"][0], "s")
    compiled = _compiled(spec)
    try:
        code = sass.instructions(compiled.cubin, compiled.launch["symbol"])
    except ToolchainError as error:
        pytest.skip(str(error))
    wide = [each for each in code if each.base == "LDG" and ".128" in each.opcode]
    assert len(wide) == 5  # the map


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_other_architectures_compile(arch, tmp_path, monkeypatch):
    """Nothing here is Hopper's own."""
    from cutlass import cute

    monkeypatch.chdir(tmp_path)
    for lines, _, _ in (KERNELS["odd"], KERNELS["backward"], KERNELS["aux"], KERNELS["aux-backward"]):
        (spec,) = parse_text(HEAD + lines, "s")
        traced = plan(spec)
        options = f"--gpu-arch={arch} --keep-cubin"
        assert cute.compile(traced.function, *traced.arguments, options=options).artifacts.CUBIN


def _compiled(spec):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return compile_plan(plan(spec), Path(folder))
