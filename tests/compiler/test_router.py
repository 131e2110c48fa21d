"""The router's kernels, compiled and proved without a GPU, and what their machine code says."""

from pathlib import Path

import pytest

from fusekit.compiler.trace import compile_plan
from fusekit.compiler.worker import plan
from fusekit.errors import ToolchainError
from fusekit.spec import parse_text
from tests.compiler import sass
from tests.soak import sample

HEAD = """
schema = 1
[defaults]
arch = "sm_90a"
[[kernel]]
name = "k"
"""
GRAD_BIAS = "grad_y token row_scale offsets grad_bias"
# (lines of a spec, tensors of the record in order, dynamic shared memory)
KERNELS = {
    "dense": ('op = "router-topk"\nexperts = 2304\ntopk = 36', "logits probs routing_map", 4 * 64 * 8),
    "compact": (
        'op = "router-topk"\nexperts = 256\ntopk = 8\nscore_function = "sigmoid"\nexpert_bias = true\nnum_groups = 8\n'
        'group_topk = 4\noutputs = "compact"\ndtype = "bf16"',
        "logits expert_bias indices weights",
        8 * (8 * 36 + 8) * 4,
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
        8 * 32 * 8,
    ),
    "aux-softmax": ('op = "router-aux-score"\nexperts = 128\ntopk = 1', "logits scores routing_map", 8 * 32 * 8),
    "aux-one-choice": (
        'op = "router-aux-score"\nexperts = 61\ntopk = 1\nscore_function = "sigmoid"',
        "logits scores score_sum routing_map",
        8 * 32 * 8,
    ),
    "loss": ('op = "moe-aux-loss"\nexperts = 256\ntopk = 8', "scores counts loss", 256 * 4 + 40 * 8),
    "backward-addend": (
        'op = "router-topk-bwd"\nexperts = 2304\ntopk = 36\npre_softmax = true\noutputs = "compact"\naddend = true\n'
        'grad_dtype = "bf16"',
        "logits indices grad_weights addend grad_logits",
        0,
    ),
    "loss-device": (
        'op = "moe-aux-loss"\nexperts = 256\ntopk = 8\nscalars = "device"',
        "scores counts loss coefficient total_tokens",
        256 * 4 + 40 * 8,
    ),
    "loss-backward-device": (
        'op = "moe-aux-loss-bwd"\nexperts = 61\ntopk = 8\nscalars = "device"',
        "counts grad_loss grad_scores coefficient total_tokens",
        0,
    ),
    "loss-backward": ('op = "moe-aux-loss-bwd"\nexperts = 61\ntopk = 8', "counts grad_loss grad_scores", 0),
    "index": ('op = "moe-index"\nexperts = 61\ntopk = 3', "indices offsets order inverse", 4 * (4 * 41 + 32 + 8)),
    "index-counts": (
        'op = "moe-index"\nexperts = 61\ntopk = 3\ncounts = true',
        "indices offsets order inverse counts",
        4 * (4 * 41 + 32 + 8),
    ),
    "check": ('op = "moe-check"', "offsets report", 0),
    "permute": ('op = "moe-permute"\ntopk = 33\nweighted = true', "x inverse weights y row_scale", 0),
    "permute-fp8": ('op = "moe-permute"\ntopk = 8\ndtype = "e4m3"', "x x_s inverse y y_s", 0),
    "permute-scaled": ('op = "moe-permute"\ntopk = 64\nscaled = true', "x inverse weights y", 0),
    "permute-backward": (
        'op = "moe-permute-bwd"\ntopk = 64',
        "x grad_y inverse weights grad_x grad_weights",
        0,
    ),
    "unpermute": ('op = "moe-unpermute"\ntopk = 8\ndtype = "f32"', "x inverse y", 0),
    "unpermute-addends": (
        'op = "moe-unpermute"\ntopk = 4\nweighted = true\naddends = 2',
        "x inverse weights addend0 addend1 y",
        0,
    ),
    "unpermute-backward": (
        'op = "moe-unpermute-bwd"\ntopk = 4',
        "grad_y x inverse weights grad_x grad_weights",
        0,
    ),
    "weights-backward": (
        'op = "moe-weights-bwd"\nexperts = 61\ntopk = 3\naddend = true',
        "dprob inverse indices addend grad_weights",
        0,
    ),
    "bias-bwd": ('op = "moe-bias-bwd"\nexperts = 256\ntopk = 8', GRAD_BIAS, 8 * 64 * 4),
    "bias-bwd-f32": (
        'op = "moe-bias-bwd"\nexperts = 61\ntopk = 1\nwarps = 2\ndtype = "f32"',
        GRAD_BIAS,
        2 * 32 * 4,
    ),
    "gate": ('op = "moe-gate"', "x w y", 0),
    "gate-f32": ('op = "moe-gate"\ndtype = "f32"\nwarps = 1', "x w y", 0),
    "gate-bwd": ('op = "moe-gate-bwd"', "grad_y scale w addend grad_logits token offsets dx", 0),
    "norm": ('op = "rms-norm"\nresidual = true\nrounded = true', "x residual w y sum rstd", 0),
    "norm-f32": ('op = "rms-norm"\ndtype = "f32"\nwarps = 1', "x w y rstd", 0),
    "norm-bwd": ('op = "rms-norm-bwd"\naddend = true', "dy x w rstd addend dx partial", 32 * 8),
    "norm-wgrad": ('op = "rms-norm-wgrad"', "partial dw", 8 * 128 * 4),
    "zero": ('op = "moe-zero"', "offsets y", 0),
    "split": ('op = "router-split"', "w terms", 0),
    "split-one-warp": ('op = "router-split"\nterms = 1\nwarps = 1', "w terms", 0),
    "sum": ('op = "router-sum"\nexperts = 256', "x y", 0),
    "sum-bias": ('op = "router-sum"\nexperts = 61\nterms = 2\nbias = true\nwarps = 2', "x bias y", 0),
    "sum-widest": ('op = "router-sum"\nexperts = 4096\nbias = true', "x bias y", 0),
    "aux-backward": (
        'op = "router-aux-score-bwd"\nexperts = 4096\ntopk = 2\nscore_function = "sigmoid"',
        "scores score_sum grad_scores grad_logits",
        16,
    ),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """kernels(name) -> (spec, what it compiled to), once each; the proof has passed."""
    compiled = {}

    def kernel(name):
        if name not in compiled:
            (spec,) = parse_text(HEAD + KERNELS[name][0], "s")
            compiled[name] = spec, compile_plan(plan(spec), Path(tmp_path_factory.mktemp("trace")))
        return compiled[name]

    return kernel


def machine_code(compiled):
    try:
        return sass.instructions(compiled.cubin, compiled.launch["symbol"])
    except ToolchainError as error:
        pytest.skip(str(error))


# Of each way to lay out a row, and to add up what rows have.
CORE = ("dense", "backward", "loss", "index", "permute", "unpermute-backward", "bias-bwd", "gate-bwd", "norm-bwd")


@pytest.fixture(scope="module", params=sample(KERNELS, *CORE))
def built(request, kernels):
    """(spec, tensors of its record, shared memory, what it compiled to)."""
    _, tensors, shared = KERNELS[request.param]
    spec, compiled = kernels(request.param)
    return spec, tensors, shared, compiled


def test_the_record(built):
    spec, tensors, shared, compiled = built
    launch = compiled.launch
    named = [argument["name"] for argument in launch["arguments"] if argument["kind"] == "tensor"]
    assert named == tensors.split()
    assert launch["dynamic_shared"] == shared
    cluster = spec.op in ("moe-aux-loss", "moe-index")  # work of a fixed number of blocks, which write without tokens
    assert launch["block"] == [1024 if cluster else 32 * spec.warps, 1, 1]
    assert launch["cluster"] == [8 if cluster else 1, 1, 1]
    without_tokens = ("moe-check", "moe-bias-bwd", "moe-gate-bwd", "rms-norm-bwd", "rms-norm-wgrad")
    assert launch["skip_if_zero"] == ([] if cluster or spec.op in without_tokens else ["T"])
    assert compiled.proof["launches"] >= 64
    largest = "largest E" if spec.op == "moe-check" else "largest T"
    assert {"smallest", "next to smallest", largest} <= set(compiled.proof["edges"])


def test_the_row_stays_in_registers(built):
    _, _, _, compiled = built
    assert compiled.resources["spill_bytes"] == 0
    assert compiled.resources["registers"] <= 168  # three blocks of four warps on an SM
    counted = sass.counts(machine_code(compiled))
    assert not counted["LDL"] and not counted["STL"]
    assert not counted["ATOMG"] and not counted["RED"]  # nothing depends on the order of blocks


def test_rows_move_in_16_bytes(kernels):
    code = machine_code(kernels("dense")[1])
    loads = [item.opcode for item in code if item.base == "LDG"]
    assert len(loads) == 2304 * 4 // (16 * 32) and all(".128" in opcode for opcode in loads)
    # 18 stores clear the probabilities, 5 the map (the last for half a warp); two of each write what was chosen.
    stores = [item.opcode for item in code if item.base == "STG"]
    assert sum(".128" in opcode for opcode in stores) == 18 + 5
    assert len(stores) == 18 + 5 + 2 * 2


def test_a_sparse_backward_reads_no_row(kernels):
    code = machine_code(kernels("backward")[1])
    assert len([item for item in code if item.base == "LDG" and ".128" in item.opcode]) == 5  # the map


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_other_architectures_compile(arch, tmp_path, soak):
    """Nothing here is Hopper's own; two kernels are one cluster of blocks each, which came with it."""
    from cutlass import cute

    clusters = {"loss", "loss-device", "index", "index-counts"} if arch == "sm_80" else set()
    every = list(KERNELS)[arch == "sm_80" :: 2 if soak else 12]
    for lines, _, _ in (KERNELS[name] for name in every if name not in clusters):
        (spec,) = parse_text(HEAD + lines, "s")
        traced = plan(spec)
        options = f"--gpu-arch={arch} --keep-cubin --dump-dir={tmp_path}"
        assert cute.compile(traced.function, *traced.arguments, options=options).artifacts.CUBIN
