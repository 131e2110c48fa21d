"""Configs of Hugging Face models: what is read of them, and what is refused."""

import json
import math

import pytest

from fusekit.errors import SpecError
from fusekit.spec.hf_config import read_model
from fusekit.spec.hf_families import FAMILIES
from tests.spec.configs import CONFIGS


def read(config, **changes):
    """The model of a config, by name or as it is, with fields changed; a field given as None is left out."""
    values = dict(CONFIGS[config] if isinstance(config, str) else config) | changes
    return read_model(json.dumps(values), "config.json")


def refusal(config, **changes):
    with pytest.raises(SpecError) as error:
        read(config, **changes)
    assert str(error.value).startswith("config.json: ")
    assert "\n" not in str(error.value)
    return str(error.value)


SIZES = {  # model: H, then (role, I) of each MLP; experts and experts a token
    "gpt-oss-20b": (2880, [("experts", 2880)], (32, 4)),
    "gpt-oss-120b": (2880, [("experts", 2880)], (128, 4)),
    "qwen3-30b-a3b": (2048, [("experts", 768)], (128, 8)),
    "qwen2-57b-a14b": (3584, [("experts", 2560), ("shared", 20480)], (64, 8)),
    "deepseek-v3": (7168, [("experts", 2048), ("shared", 2048), ("dense", 18432)], (256, 8)),
    "deepseek-v2": (5120, [("experts", 1536), ("shared", 3072), ("dense", 12288)], (160, 6)),
    "glm-4.5": (5120, [("experts", 1536), ("shared", 1536), ("dense", 12288)], (160, 8)),
    "mixtral-8x7b": (4096, [("experts", 14336)], (8, 2)),
    "llama-4-maverick": (5120, [("experts", 8192), ("shared", 8192), ("dense", 16384)], (128, 1)),
    "kimi-k2": (7168, [("experts", 2048), ("shared", 2048), ("dense", 18432)], (384, 8)),
    "qwen1.5-moe-a2.7b": (2048, [("experts", 1408), ("shared", 5632)], (60, 4)),
    "granite-4.0-h-tiny": (1536, [("experts", 512), ("shared", 1024)], (64, 6)),
    "jamba": (4096, [("experts", 14336), ("dense", 14336)], (16, 2)),
    "ernie-4.5-21b": (2560, [("experts", 1536), ("shared", 3072), ("dense", 12288)], (64, 6)),
    "phi-3.5-moe": (4096, [("experts", 6400)], (16, 2)),
    "minimax-text-01": (6144, [("experts", 9216)], (32, 2)),
    "minimax-m2": (3072, [("experts", 1536)], (256, 8)),
    "nemotron-3-nano-30b": (2688, [("experts", 1856), ("shared", 3712)], (128, 6)),
    "nemotron-h-8b": (4096, [("dense", 21504)], None),
    "llama-3-8b": (4096, [("dense", 14336)], None),
    "qwen3-8b": (4096, [("dense", 12288)], None),
    "gemma-2-9b": (3584, [("dense", 14336)], None),
    "starcoder2-3b": (3072, [("dense", 12288)], None),
    "qwen3.5-35b-a3b": (2048, [("experts", 512), ("shared", 512)], (256, 8)),
    "qwen3-omni-30b-a3b": (2048, [("experts", 768)], (128, 8)),
    "glm-4.7-flash": (2048, [("experts", 1536), ("shared", 1536), ("dense", 10240)], (64, 4)),
    "glm-5": (6144, [("experts", 2048), ("shared", 2048), ("dense", 12288)], (256, 8)),
    "deepseek-v4-flash": (4096, [("experts", 2048), ("shared", 2048)], (256, 6)),
    "mistral-small-4": (4096, [("experts", 2048), ("shared", 2048)], (128, 4)),
    "ling-mini-2.0": (2048, [("experts", 512), ("shared", 512), ("dense", 5120)], (256, 8)),
    "hunyuan-a13b": (4096, [("experts", 3072), ("shared", 3072)], (64, 8)),
    "dots.llm1": (4096, [("experts", 1408), ("shared", 2816), ("dense", 10944)], (128, 6)),
    "lfm2-8b-a1b": (2048, [("experts", 1792), ("dense", 7168)], (32, 4)),
    "kimi-linear-48b-a3b": (2304, [("experts", 1024), ("shared", 1024), ("dense", 9216)], (256, 8)),
    "mimo-v2-flash": (4096, [("experts", 2048), ("dense", 16384)], (256, 8)),
}
ROUTERS = {
    "gpt-oss-120b": {"score_function": "softmax"},
    "mixtral-8x7b": {"score_function": "softmax"},
    "qwen3-30b-a3b": {"score_function": "softmax"},
    "qwen2-57b-a14b": {"score_function": "softmax", "pre_softmax": True},
    "deepseek-v3": {
        "score_function": "sigmoid", "expert_bias": True, "num_groups": 8, "group_topk": 4, "scaling_factor": 2.5,
    },
    "glm-4.5": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "kimi-k2": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.827},
    "nemotron-3-nano-30b": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "minimax-m2": {"score_function": "sigmoid", "expert_bias": True},
    "llama-4-maverick": {"score_function": "sigmoid"},
    "granite-4.0-h-tiny": {"score_function": "softmax"},
    "jamba": {"score_function": "softmax", "pre_softmax": True},
    "minimax-text-01": {"score_function": "softmax"},
    "qwen3.5-35b-a3b": {"score_function": "softmax"},
    "qwen3-omni-30b-a3b": {"score_function": "softmax"},
    "glm-4.7-flash": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 1.8},
    "glm-5": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "deepseek-v4-flash": {"score_function": "sqrtsoftplus", "expert_bias": True, "scaling_factor": 1.5},
    "mistral-small-4": {"score_function": "softmax"},
    "ling-mini-2.0": {
        "score_function": "sigmoid", "expert_bias": True, "num_groups": 8, "group_topk": 4, "scaling_factor": 2.5,
    },
    "hunyuan-a13b": {"score_function": "softmax"},
    "dots.llm1": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "lfm2-8b-a1b": {"score_function": "sigmoid", "expert_bias": True},
    "kimi-linear-48b-a3b": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.446},
    "mimo-v2-flash": {"score_function": "sigmoid", "expert_bias": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_of_public_models(name):
    hidden, mlps, experts = SIZES[name]
    model = read(name)
    assert model.hidden == hidden
    assert [(mlp.role, mlp.intermediate) for mlp in model.mlps] == mlps
    assert (model.router and (model.router.experts, model.router.topk)) == experts


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_public_models(name):
    router = read(name).router
    assert (router.keys, router.why) == (ROUTERS[name], "")
    assert router.scales_input == (name == "llama-4-maverick")


@pytest.mark.parametrize(
    ("name", "activation", "layout", "bias"),
    [
        ("gpt-oss-20b", {"kind": "swiglu", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}, "interleaved", True),
        ("deepseek-v3", {"kind": "swiglu"}, "concat", False),
        ("gemma-2-9b", {"kind": "geglu", "approximate": "tanh"}, "concat", False),
        ("starcoder2-3b", {"kind": "gelu", "approximate": "tanh"}, "concat", True),
        ("nemotron-3-nano-30b", {"kind": "srelu"}, "concat", False),
        ("nemotron-h-8b", {"kind": "srelu"}, "concat", False),
        ("deepseek-v4-flash", {"kind": "swiglu", "limit": 10.0}, "concat", False),
    ],
)
def test_activations(name, activation, layout, bias):
    mlp = read(name).mlps[0]
    assert (mlp.activation, mlp.glu_layout, mlp.bias) == (activation, layout, bias)
    assert mlp.gated == (not name.startswith(("starcoder2", "nemotron")))


def test_layers_are_counted():
    assert [mlp.layers for mlp in read("deepseek-v3").mlps] == ["58 of 61 layers", "58 of 61 layers", "3 of 61 layers"]
    assert read("llama-4-maverick").mlps[0].layers == "24 of 48 layers"
    assert [mlp.layers for mlp in read("glm-5").mlps] == ["75 of 78 layers", "75 of 78 layers", "3 of 78 layers"]
    assert [mlp.layers for mlp in read("mimo-v2-flash").mlps] == ["47 of 48 layers", "1 of 48 layers"]
    assert [mlp.layers for mlp in read("lfm2-8b-a1b").mlps] == ["22 of 24 layers", "2 of 24 layers"]
    assert "moe_layer_freq has 2 items: there are 48 layers" in refusal("mimo-v2-flash", moe_layer_freq=[0, 1])
    assert [mlp.layers for mlp in read("jamba").mlps] == ["16 of 32 layers"] * 2
    assert [mlp.layers for mlp in read("jamba", expert_layer_period=4).mlps] == ["8 of 32 layers", "24 of 32 layers"]
    late = read("ernie-4.5-21b", moe_layer_interval=2, moe_layer_start_index=4, moe_layer_end_index=-1)
    assert [mlp.layers for mlp in late.mlps] == ["12 of 28 layers", "12 of 28 layers", "16 of 28 layers"]
    sparse = read("qwen3-30b-a3b", decoder_sparse_step=2, mlp_only_layers=[1, 3])
    assert [(mlp.role, mlp.intermediate, mlp.layers) for mlp in sparse.mlps] == [
        ("experts", 768, "22 of 48 layers"), ("dense", 6144, "26 of 48 layers"),
    ]  # fmt: skip


def test_noise_in_training_is_said():
    for name, noise in (("mixtral-8x7b", {"router_jitter_noise": 0.01}), ("phi-3.5-moe", {})):
        assert any("jitter_noise = 0.01: in training x is multiplied" in note for note in read(name, **noise).notes)
    assert not any("noise" in note for note in read("mixtral-8x7b").notes)


def test_a_model_type_of_experts_may_have_none():
    for name, none in (("jamba", {"num_experts": 1}), ("granite-4.0-h-tiny", {"num_local_experts": 0})):
        model = read(name, **none)
        assert model.router is None
        assert [mlp.role for mlp in model.mlps] == ["dense"]


def test_what_is_left_out_is_said():
    model = read("qwen3-30b-a3b", norm_topk_prob=None, hidden_act=None)
    assert model.router.keys == {"score_function": "softmax", "pre_softmax": True}
    assert any(note.startswith("norm_topk_prob is left out of the config: false") for note in model.notes)
    assert any(note.startswith('hidden_act is left out of the config: "silu"') for note in model.notes)


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        ("llama-3-8b", {"num_experts": 8}, "num_experts = 8"),
        ("deepseek-v3", {"swiglu_limit": 10.0}, "swiglu_limit = 10.0"),
        ("qwen3-8b", {"mlp_bias": True}, "mlp_bias = true"),
        ("mixtral-8x7b", {"n_shared_experts": 1}, "n_shared_experts = 1"),
    ],
)
def test_a_field_that_the_model_type_does_not_read_is_said(config, changes, said):
    assert not any("does not read it" in note for note in read(config).notes)
    notes = [note for note in read(config, **changes).notes if "does not read it" in note]
    assert len(notes) == 1
    assert said in notes[0]


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("glm-5", {"first_k_dense_replace": 3}),
        ("llama-4-maverick", {"moe_layers": [1, 3], "interleave_moe_layer_step": 2, "num_hidden_layers": 4}),
    ],
)
def test_a_field_that_a_list_of_layers_repeats_is_read(config, changes):
    """Transformers writes both."""
    assert not any("does not read it" in note for note in read(config, **changes).notes)


def test_the_talker_of_an_omni_model_is_a_config_of_its_own():
    assert any("give talker_config's text_config" in note for note in read("qwen3-omni-30b-a3b").notes)
    fields = {"model_type": "qwen3_omni_moe_talker_text", "norm_topk_prob": False}
    talker = read("qwen3.5-35b-a3b", text_config=None, **CONFIGS["qwen3.5-35b-a3b"]["text_config"] | fields)
    assert [(mlp.role, mlp.scaled) for mlp in talker.mlps] == [("experts", False), ("shared", True)]
    assert talker.router.keys == {"score_function": "softmax", "pre_softmax": True}


def test_quantised_checkpoints_and_dtypes_are_said():
    assert any('weights = "mxfp4" read them as they are' in note for note in read("gpt-oss-20b").notes)
    assert any('weights = "fp8-block" read them as they are' in note for note in read("deepseek-v3").notes)
    assert [read(name).weights for name in ("deepseek-v3", "kimi-k2", "gpt-oss-20b")] == ["fp8-block", "none", "mxfp4"]
    assert any('quantised ("fp8")' in note for note in read("kimi-k2").notes)  # it does not say in which blocks
    assert any('torch_dtype is "float32"' in note for note in read("gemma-2-9b").notes)
    assert read("starcoder2-3b").dtype == "fp16"
    assert read("mixtral-8x7b", torch_dtype=None, dtype="float16").dtype == "fp16"


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        ("deepseek-v2", {}, "6 / 3"),
        ("deepseek-v3", {"topk_group": 2}, "8 / 2"),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("deepseek-v3", {"scoring_func": "softmax"}, 'scoring_func = "softmax"'),
        ("deepseek-v3", {"topk_method": "aux"}, 'topk_method = "aux"'),
        ("llama-4-maverick", {"text_config": CONFIGS["llama-4-maverick"]["text_config"] | {"num_experts_per_tok": 2}},
         "several sigmoid scores"),
        ("minimax-m2", {"scoring_func": "softmax"}, 'scoring_func = "softmax"'),
        ("minimax-m2", {"model_type": "minimax"}, "give --family minimax_m2"),
        ("ernie-4.5-21b", {}, "a bias to softmax scores"),
        ("phi-3.5-moe", {}, "sparsemixer"),
    ],
)  # fmt: skip
def test_a_router_that_does_not_fit_says_why(config, changes, why):
    assert why in read(config, **changes).router.why


def test_an_activation_that_does_not_fit_says_why():
    mlp = read("llama-3-8b", hidden_act="xielu").mlps[0]
    assert mlp.activation is None
    assert 'hidden_act = "xielu"' in mlp.why


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        ("llama-3-8b", {"model_type": "bert"}, ['model_type = "bert"', "--family"]),
        ("nemotron-h-8b", {"hybrid_override_pattern": "M*"}, ["no layer of type moe or mlp"]),
        ("nemotron-h-8b", {"hybrid_override_pattern": None}, ["hybrid_override_pattern is missing"]),
        ("nemotron-h-8b", {"layers_block_type": "M-"}, ['layers_block_type = "M-"', "list"]),
        ("llama-3-8b", {"model_type": None}, ["model_type is missing"]),
        ("llama-3-8b", {"intermediate_size": None}, ["intermediate_size is missing"]),
        ("llama-3-8b", {"hidden_size": "4096"}, ['hidden_size = "4096"', "whole number"]),
        ("llama-3-8b", {"hidden_size": True}, ["hidden_size = true"]),
        ("llama-3-8b", {"hidden_size": 10**400}, ["hidden_size = ", "whole number from 1"]),
        ("deepseek-v3", {"num_hidden_layers": 2**31 - 1}, ["num_hidden_layers = 2147483647", "to 10000"]),
        ("llama-3-8b", {"hidden_act": 7}, ["hidden_act = 7", "string"]),
        ("llama-3-8b", {"mlp_bias": 1}, ["mlp_bias = 1", "true or false"]),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, ["num_experts_per_tok = 9", "8 experts"]),
        ("mixtral-8x7b", {"num_experts": 16}, ["num_local_experts = 8 and num_experts = 16", "contradict"]),
        ("gpt-oss-20b", {"experts_per_token": 8}, ["num_experts_per_tok = 4 and experts_per_token = 8"]),
        ("qwen3-30b-a3b", {"mlp_only_layers": "all"}, ['mlp_only_layers = "all"']),
        ("gpt-oss-20b", {"swiglu_limit": "7"}, ['swiglu_limit = "7"', "number"]),
        ("deepseek-v3", {"routed_scaling_factor": float("inf")}, ["routed_scaling_factor = inf"]),
    ],
)
def test_bad_fields_are_refused(config, changes, words):
    message = refusal(config, **changes)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", '{"a": 1' + "0" * 5000 + "}", "[" * 100000, '"x"', "\x00"])
def test_what_is_no_config_is_refused(text):
    with pytest.raises(SpecError, match=r"^config\.json: (not JSON|it holds)"):
        read_model(text, "config.json")


def test_null_is_no_config():
    with pytest.raises(SpecError, match=r"^config\.json: it holds null; a config\.json holds one object"):
        read_model("null", "config.json")


def test_a_family_can_be_named():
    config = json.dumps(CONFIGS["llama-3-8b"] | {"model_type": "mine"})
    model = read_model(config, "config.json", "llama")
    assert model.model_type == "mine"
    assert model.mlps == read("llama-3-8b").mlps
    assert "read as llama" in model.notes[0]


@pytest.mark.parametrize(
    ("config", "family", "changes"),
    [
        ("nemotron-3-nano-30b", "deepseek_v3", {}),
        ("nemotron-3-nano-30b", "deepseek_v3", {"hidden_act": "silu"}),
        ("nemotron-h-8b", "nemotron", {"mlp_hidden_act": "silu"}),
        ("llama-3-8b", "nemotron_h", {"hybrid_override_pattern": "M-"}),
    ],
)
def test_a_family_that_would_compute_another_activation_is_refused(config, family, changes):
    text = json.dumps(CONFIGS[config] | changes)
    with pytest.raises(SpecError, match=f'act = "(relu2|silu)": {family} reads [a-z_]+ instead, and would compute'):
        read_model(text, "config.json", family)


def test_the_same_activation_by_another_name():
    config = CONFIGS["gemma-2-9b"] | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    assert read_model(json.dumps(config), "config.json", "gemma3_text").mlps == read("gemma-2-9b").mlps


def test_experts_on_a_projection_are_not_covered():
    model = read("nemotron-3-nano-30b", moe_latent_size=1024)
    assert [bool(mlp.why) for mlp in model.mlps] == [True, False]
    assert "moe_latent_size = 1024" in model.mlps[0].why


def test_layers_that_choose_by_token_id_are_said():
    assert any("3 of 43 layers choose experts by a table" in note for note in read("deepseek-v4-flash").notes)
    kinds = ["hash_moe"] * 5 + ["moe"] * 38
    assert any("5 of 43 layers" in note for note in read("deepseek-v4-flash", mlp_layer_types=kinds).notes)
    assert not read("deepseek-v4-flash", num_hash_layers=0).notes


def test_numbers_of_each_layer():
    assert "moe_topk differs from layer to layer" in refusal("hunyuan-a13b", moe_topk=[8] * 31 + [4])
    assert "contradict each other" in refusal("hunyuan-a13b", moe_intermediate_size=[1024] * 32)


def test_softmax_scores_of_mistral_4():
    assert read("mistral-small-4").router.keys == {"score_function": "softmax"}
    config = CONFIGS["mistral-small-4"]
    given = config["text_config"] | {"norm_topk_prob": False, "routed_scaling_factor": 2.0}
    router = read(config, text_config=given).router
    assert (router.keys, router.why) == (
        {"score_function": "softmax", "pre_softmax": True, "scaling_factor": 2.0}, ""
    )  # fmt: skip
    grouped = read(config, text_config=config["text_config"] | {"n_group": 4, "topk_group": 1}).router
    assert "a group's score is the sum of its best 2" in grouped.why


def test_experts_of_gemma_4_have_a_router_of_their_own():
    dense = {"model_type": "gemma4_text", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30}
    assert [(mlp.role, mlp.activation["kind"]) for mlp in read(dense).mlps] == [("dense", "geglu")]
    sparse = {"enable_moe_block": True, "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8}
    model = read(dense, **sparse, use_double_wide_mlp=True, num_kv_shared_layers=10)
    assert [(mlp.role, mlp.intermediate) for mlp in model.mlps] == [("experts", 704), ("dense", 9216)]
    assert "it normalises and scales x" in model.router.why
    assert any("the MLP of the last 10 layers has twice" in note for note in model.notes)


def test_an_unknown_type_gets_the_nearest():
    message = refusal("qwen3-8b", model_type="qwen4_moe")
    assert "the nearest that are known are qwen3_moe, qwen2_moe" in message and message.count("_") < 20
    with pytest.raises(SpecError, match='--family "qwen4_moe" is not known; the nearest are qwen3_moe, qwen2_moe'):
        read_model(json.dumps(CONFIGS["qwen3-8b"]), "config.json", "qwen4_moe")


def test_layers_are_counted_by_their_types():
    assert [mlp.layers for mlp in read("nemotron-3-nano-30b").mlps] == ["23 of 52 layers"] * 2
    assert read("nemotron-h-8b").mlps[0].layers == "24 of 52 layers"
    kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    model = read("nemotron-3-nano-30b", hybrid_override_pattern=None, layers_block_type=kinds)
    assert [(mlp.role, mlp.layers) for mlp in model.mlps] == [
        (role, "1 of 4 layers") for role in ("experts", "shared", "dense")
    ]


def test_every_family_has_a_config_or_a_likeness():
    """Types that share their reading with one of CONFIGS."""
    alike = {
        "granite", "smollm3", "mistral", "qwen2", "olmo2", "gemma3_text", "glm4", "phi3", "nemotron", "gpt_neox",
        "olmoe", "qwen3_next", "deepseek_v32", "llama4_text", "granitemoe", "granitemoeshared", "qwen3_vl_moe_text",
        "olmo3", "qwen3_5", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_omni_moe_text",
        "qwen3_omni_moe_talker_text", "gemma4", "gemma4_text", "mistral4",
    }  # fmt: skip
    assert {config["model_type"] for config in CONFIGS.values()} - {"mistral3"} | alike == set(FAMILIES)


def test_a_byte_order_mark_is_read_over():
    text = json.dumps(CONFIGS["qwen3-8b"])
    assert read_model("\ufeff" + text, "config.json") == read_model(text, "config.json")


@pytest.mark.parametrize("field", ["swiglu_limit", "swiglu_alpha", "router_aux_loss_coef"])
@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf, math.nan])
def test_a_number_that_no_float64_holds(field, value):
    text = json.dumps(CONFIGS["gpt-oss-20b"] | {field: value})
    with pytest.raises(SpecError, match=f"{field} = .*: it must be a finite float64"):
        read_model(text, "config.json")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32", "kimi_k2"])
def test_what_a_config_of_deepseek_leaves_out_is_what_its_class_in_transformers_has(model_type):
    fields = ("routed_scaling_factor", "n_group", "topk_group", "first_k_dense_replace", "n_shared_experts")
    less = read("deepseek-v3", model_type=model_type, **dict.fromkeys(fields))
    given = read("deepseek-v3", model_type=model_type)
    assert less.router.keys == given.router.keys
    assert (less.router.keys["scaling_factor"], less.router.keys["num_groups"]) == (2.5, 8)
    assert less.mlps == given.mlps
    assert "routed_scaling_factor is left out of the config: 2.5, Transformers' default, is taken" in less.notes


def test_what_a_config_of_glm_leaves_out_is_what_its_class_in_transformers_has():
    less = read("glm-4.5", first_k_dense_replace=None, n_shared_experts=None)
    assert [mlp.role for mlp in less.mlps] == ["experts", "shared", "dense"]
    assert less.mlps[2].layers == "1 of 92 layers"
