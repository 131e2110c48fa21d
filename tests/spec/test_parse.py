"""A spec file's way to kernels: defaults, sweeps, names, canonical form."""

import json
import math

import pytest

from fusekit.plan.quant import Quant
from fusekit.spec import Activation, KernelSpec, Problem, parse_file, parse_text
from fusekit.store import canonical_json

FULL = """
schema = 1
summary = "all keys"
[defaults]
arch = "sm_90a"
dtype = "fp16"
cluster_margin = 2
[[kernel]]
name = "fc1"
summary = "its own"
op = "grouped-gemm"
out_dtype = "bf16"
b_major = "n"
alpha = "group"
bias = true
save_preactivation = true
activation = { kind = "swiglu", alpha = 1.702, limit = 7, up_offset = 1.0 }
glu_layout = "interleaved"
row_scale = true
quant = "none"
tile = [128, 128]
cluster = [2, 1]
mainloop = "cooperative"
schedule = "static"
problem = { E = 4, M = 100, N = 64, K = 72 }
"""

SHORT = """
schema = 1
[[kernel]]
name = "linear"
op = "dense-gemm"
arch = "sm_90a"
tile = [128, 128]
cluster = [1, 1]
schedule = "static"
"""


def test_every_key_arrives():
    (spec,) = parse_text(FULL, "model")
    assert spec == KernelSpec(
        file="model",
        kernel="fc1",
        op="grouped-gemm",
        arch="sm_90a",
        dtype="fp16",
        out_dtype="bf16",
        b_major="n",
        activation=Activation("swiglu", alpha=1.702, limit=7.0, up_offset=1.0),
        glu_layout="interleaved",
        quant=Quant(),
        tile=(128, 128),
        cluster=(2, 1),
        mainloop="cooperative",
        schedule="static",
        cluster_margin=2,
        problem=Problem(E=4, M=100, N=64, K=72),
        summary="its own",
        operands={
            "alpha": "group",
            "bias": True,
            "save_preactivation": True,
            "row_scale": True,
            "accumulate": False,
            "recompute": False,
            "dprob": False,
            "dbias": False,
            "split": False,
            "choices": 0,
            "pdl": False,
            "gather": "none",
            "awaits": False,
        },
    )
    assert spec.full_name == "model/fc1@128x128-c2x1-coop"
    assert isinstance(spec.activation.limit, float)


WGRAD = """
schema = 1
[[kernel]]
name = "fc1-wgrad"
op = "grouped-wgrad"
arch = "sm_90a"
tile = [128, 192]
cluster = [1, 2]
schedule = "static"
"""


def test_weight_gradients():
    (spec,) = parse_text(WGRAD + "problem = { E = 4, M = 100, N = 384, K = 576 }\n", "model")
    assert (spec.op, spec.dtype, spec.out_dtype, spec.operands["accumulate"]) == (
        "grouped-wgrad",
        "bf16",
        "bf16",
        False,
    )
    assert (spec.b_major, spec.operands["alpha"], spec.glu_layout, spec.activation) == (
        "k",
        "none",
        "none",
        Activation(),
    )
    assert spec.full_name == "model/fc1-wgrad@128x192-c1x2"
    assert spec.defaults() == {"cluster_margin": 0}
    (wide,) = parse_text(WGRAD + 'out_dtype = "f32"\n', "model")
    (adding,) = parse_text(WGRAD + 'out_dtype = "f32"\naccumulate = true\n', "model")
    (summing,) = parse_text(WGRAD + 'out_dtype = "f32"\naccumulate = true\ndbias = true\n', "model")
    assert adding.operands["accumulate"]
    assert (adding.operands["dbias"], summing.operands["dbias"]) == (False, True)
    assert len({str(each.device_spec()) for each in (spec, wide, adding, summing)}) == 4


BACKWARD = """
schema = 1
[[kernel]]
name = "fc2-dgrad"
op = "grouped-gemm"
arch = "sm_90a"
b_major = "n"
activation = { kind = "dswiglu", alpha = 1.702, limit = 7.0, up_offset = 1.0 }
row_scale = true
recompute = true
dprob = true
dbias = true
tile = [128, 128]
problem = { E = 4, M = 100, N = 136, K = 64 }
"""


def test_backward_activations():
    (spec,) = parse_text(BACKWARD, "model")
    assert spec.activation.backward
    assert spec.activation.gated
    assert (spec.operands["recompute"], spec.operands["dprob"], spec.operands["dbias"], spec.glu_layout) == (
        True,
        True,
        True,
        "concat",
    )
    assert spec.defaults() == {"act_alpha": 1.702, "act_limit": 7.0, "act_up_offset": 1.0, "cluster_margin": 0}
    (plain,) = parse_text(BACKWARD.replace("{ kind = \"dswiglu\", alpha = 1.702, limit = 7.0, up_offset = 1.0 }",
                                           "{ kind = \"dgelu\", approximate = \"tanh\" }"), "model")  # fmt: skip
    assert plain.activation.backward
    assert not plain.activation.gated
    assert plain.glu_layout == "none"
    fewer = [parse_text(BACKWARD.replace(f"{key} = true", ""), "model")[0] for key in ("recompute", "dprob", "dbias")]
    assert len({str(each.device_spec()) for each in (spec, plain, *fewer)}) == 5


def test_left_out_keys_have_defaults():
    (spec,) = parse_text(SHORT, "small")
    assert (spec.dtype, spec.out_dtype, spec.b_major, spec.operands["alpha"], spec.quant.canonical()) == (
        "bf16",
        "bf16",
        "k",
        "none",
        "none",
    )
    assert spec.activation == Activation()
    assert not spec.activation.gated
    assert (spec.glu_layout, spec.cluster, spec.mainloop, spec.schedule) == ("none", (1, 1), "pingpong", "static")
    assert (spec.operands["bias"], spec.operands["save_preactivation"], spec.operands["row_scale"], spec.problem) == (
        False,
        False,
        False,
        None,
    )
    assert not spec.operands["accumulate"]
    assert spec.name == "small/linear"
    assert spec.variant == "128x128-c1x1"


def test_out_dtype_follows_dtype():
    (spec,) = parse_text(SHORT + 'dtype = "fp16"\n', "small")
    assert spec.out_dtype == "fp16"


def test_gated_layout_defaults_to_concat():
    (spec,) = parse_text(SHORT + 'activation = { kind = "reglu" }\n', "small")
    assert spec.glu_layout == "concat"


def test_kernel_wins_over_defaults_key_by_key():
    text = SHORT.replace("schema = 1", 'schema = 1\n[defaults]\nbias = true\ndtype = "fp16"\ntile = [64, 64]')
    (spec,) = parse_text(text + "bias = false\n", "small")
    assert spec.operands["bias"] is False
    assert spec.dtype == "fp16"
    assert spec.tile == (128, 128)


def test_an_activation_is_replaced_whole():
    text = SHORT.replace("schema = 1", 'schema = 1\n[defaults]\nactivation = { kind = "swiglu", limit = 7.0 }')
    (spec,) = parse_text(text + 'activation = { kind = "swiglu" }\n', "small")
    assert spec.activation.limit is None


def test_file_summary_is_the_default():
    first, second = parse_text(FULL + '[[kernel]]\nname = "fc2"\nop = "grouped-gemm"\ntile = [64, 64]\n', "model")
    assert first.summary == "its own"
    assert second.summary == "all keys"


def test_sweep_is_every_combination_in_order():
    text = SHORT.replace("[128, 128]", "[[128, 160], [256, 128]]").replace("[1, 1]", "[[1, 1], [2, 1]]")
    assert [spec.variant for spec in parse_text(text, "s")] == [
        "128x160-c1x1",
        "128x160-c2x1",
        "256x128-c1x1",
        "256x128-c2x1",
    ]


def test_main_loop_follows_each_tile():
    text = SHORT.replace("[128, 128]", "[[64, 128], [128, 192], [128, 208], [256, 192]]")
    loops = [spec.mainloop for spec in parse_text(text, "s")]
    assert loops == ["pingpong", "pingpong", "cooperative", "cooperative"]
    assert all(not spec.variant.endswith("coop") for spec in parse_text(text, "s"))


def test_swept_main_loops_have_different_names():
    text = SHORT + 'mainloop = ["cooperative", "pingpong"]\n'
    assert [spec.variant for spec in parse_text(text, "s")] == ["128x128-c1x1-coop", "128x128-c1x1"]


def test_a_list_of_one_is_a_sweep_of_one():
    text = SHORT.replace("[128, 128]", "[[128, 128]]").replace('"sm_90a"', '["sm_90a"]')
    assert parse_text(text, "s") == parse_text(SHORT, "s")


def test_parse_file_names_kernels_after_the_stem(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SHORT)
    assert parse_file(path) == parse_file(str(path)) == parse_text(SHORT, "mine")


def test_canonical_is_sorted_json_and_comes_back():
    (spec,) = parse_text(FULL, "model")
    canonical = spec.canonical()
    assert list(canonical) == sorted(canonical)
    assert canonical["tile"] == [128, 128]
    assert canonical["activation"] == {
        "alpha": 1.702,
        "approximate": "none",
        "kind": "swiglu",
        "limit": 7.0,
        "up_offset": 1.0,
    }
    assert json.loads(canonical_json(canonical)) == canonical


def test_device_spec_leaves_out_what_does_not_decide_the_cubin():
    (first,) = parse_text(FULL, "model")
    changed = (
        FULL.replace('"fc1"', '"other"')
        .replace("its own", "x")
        .replace("1.702", "1.0")
        .replace("limit = 7, ", "")
        .replace("cluster_margin = 2", "cluster_margin = 0")
        .replace("M = 100", "M = 7")
    )
    (second,) = parse_text(changed, "else")
    assert first.device_spec() == second.device_spec()
    assert first.canonical() != second.canonical()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("grouped-gemm", "dense-gemm"),
        ('dtype = "fp16"', 'dtype = "bf16"'),
        ('out_dtype = "bf16"', 'out_dtype = "fp16"'),
        ('b_major = "n"', 'b_major = "k"'),
        ('alpha = "group"', 'alpha = "scalar"'),
        ("bias = true", "bias = false"),
        ("save_preactivation = true", "save_preactivation = false"),
        ('"swiglu", alpha = 1.702', '"geglu"'),
        ('"interleaved"', '"concat"'),
        ("row_scale = true", "row_scale = false"),
        ("tile = [128, 128]", "tile = [128, 256]"),
        ("cluster = [2, 1]", "cluster = [1, 2]"),
        ('"cooperative"', '"pingpong"'),
    ],
)
def test_device_spec_tells_apart_what_does(old, new):
    assert old in FULL
    text = FULL.replace(old, new).replace("E = 4", "E = 1")
    if new == "dense-gemm":
        text = text.replace('alpha = "group"', 'alpha = "scalar"')
    (first,), (second,) = parse_text(FULL, "model"), parse_text(text, "model")
    assert first.device_spec() != second.device_spec()


def test_run_time_scalars():
    (gated,) = parse_text(FULL, "model")
    assert gated.defaults() == {"act_alpha": 1.702, "act_limit": 7.0, "act_up_offset": 1.0, "cluster_margin": 2}
    (plain,) = parse_text(SHORT, "s")
    assert plain.defaults() == {"cluster_margin": 0}
    (open_ended,) = parse_text(SHORT + 'activation = { kind = "geglu" }\n', "s")
    assert open_ended.defaults()["act_limit"] == math.inf


def test_a_kernel_that_gathers_nothing_has_the_key_that_it_had_before_there_was_gather():
    (plain,) = parse_text(SHORT, "model")
    assert "gather" not in plain.device_spec()
    (gathering,) = parse_text(SHORT + 'gather = "x"\n', "model")
    assert gathering.device_spec() == plain.device_spec() | {"gather": "x"}
