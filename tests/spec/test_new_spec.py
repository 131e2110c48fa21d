"""Spec files for models: what they hold, against the packaged ones, and that they can be read."""

import json
import re
import tomllib

import pytest

from fusekit.errors import SpecError
from fusekit.spec import parse_file, parse_text
from fusekit.spec.catalog import packaged_folder
from fusekit.spec.exchange import EXCHANGE_FIELDS
from fusekit.spec.hf_config import read_model
from fusekit.spec.model_kernels import Request
from fusekit.spec.new_spec import SCHEMA_FILE, WIDTH, new_spec
from fusekit.spec.schemas import schemas
from tests.soak import sample
from tests.spec.configs import CONFIGS
from tests.spec.kernel_lists import kernel_list

FORWARD = ["router-topk", "index", "permute", "unpermute", "fc1-infer", "fc2-fwd"]
MLP = ["fc1-fwd", "fc1-infer", "fc2-fwd", "fc2-dgrad", "fc1-dgrad", "fc1-wgrad", "fc2-wgrad"]
ROUTER = ["router-topk", "router-topk-bwd"]
LOSS = ["router-aux-score", "router-aux-score-bwd", "aux-loss", "aux-loss-bwd"]
PERMUTATION = ["index", "permute", "unpermute", "unpermute-bwd", "permute-bwd"]
OTHER_ROUTERS = ("deepseek-v2", "ernie-4.5-21b", "phi-3.5-moe")  # router-topk does not compute them
CHOSEN = ("tile", "cluster", "mainloop", "schedule", "file", "summary")  # what a spec for a model leaves to the library


def text_of(config, name="model", family=None, kernels=True, **request):
    values = CONFIGS[config] if isinstance(config, str) else config
    model, wanted = read_model(json.dumps(values), "config.json", family), Request(name, **request)
    return kernel_list(model, wanted) if kernels else new_spec(model, wanted).text


def kernels_of(text, name="model"):
    """Each kernel's name and one of its variants."""
    return {spec.kernel: spec for spec in parse_text(text, name)}


def meaning(spec):
    return {name: value for name, value in spec.canonical().items() if name not in CHOSEN}


@pytest.mark.parametrize("name", sample(CONFIGS, most=12))
def test_every_model_gives_a_file_that_can_be_read(name):
    text = text_of(name, name)
    assert text.startswith(f"#:schema ./{SCHEMA_FILE}\n")
    assert max(map(len, text.splitlines())) <= WIDTH + 2
    kernels = kernels_of(text, name)
    model = read_model(json.dumps(CONFIGS[name]), "")
    roles = [mlp.role for mlp in model.mlps]
    prefixes = {"experts": "", "shared": "shared-", "dense": "" if roles == ["dense"] else "dense-"}
    wanted = {prefixes[role] + kernel for role in roles for kernel in MLP}
    if "experts" in roles:
        router = [] if name in OTHER_ROUTERS else ROUTER
        loss = LOSS if model.router.aux_loss and name not in OTHER_ROUTERS else []
        wanted |= {*router, *loss, *PERMUTATION}
    assert set(kernels) == wanted
    assert ("Left out" in text) == (name in OTHER_ROUTERS)


@pytest.mark.parametrize(
    ("model", "request_"),
    [
        ("gpt-oss-20b", {"tokens": 24576}),
        ("gpt-oss-120b", {"tokens": 24576}),
        ("mixtral-8x7b", {"tokens": 8192}),
        ("deepseek-v3", {"tokens": 8192, "ranks": 32}),
        ("qwen3-30b-a3b", {}),
    ],
)
def test_the_packaged_kernels_mean_the_same(model, request_):
    packaged = {spec.kernel: spec for spec in parse_file(packaged_folder() / f"{model}.toml") if spec.layer is None}
    if not request_:
        request_ = {"tokens": packaged["fc1-fwd"].problem.M // 8}
    kernels = kernels_of(text_of(model, model, **request_), model)
    assert set(packaged) == set(MLP)
    for name, spec in packaged.items():
        assert meaning(kernels[name]) == meaning(spec), name


def test_the_packaged_routers_mean_the_same():
    packaged = {spec.kernel: spec for spec in parse_file(packaged_folder() / "router.toml")}
    for name, model in {"deepseek-v3": "deepseek-v3", "gpt-oss-120b": "gpt-oss-120b", "kimi-k2": "kimi-k2"}.items():
        topk = kernels_of(text_of(model))["router-topk"]
        same = {**meaning(packaged[f"{name}-topk"]), "kernel": "router-topk"}
        assert meaning(topk) == same


def test_what_a_file_is_for():
    assert list(kernels_of(text_of("mixtral-8x7b", training=False))) == FORWARD
    assert list(kernels_of(text_of("mixtral-8x7b"))) == [*ROUTER, *LOSS, *PERMUTATION, *MLP]
    assert list(kernels_of(text_of("llama-3-8b"))) == MLP


def test_dense_layers_have_dense_weight_gradients():
    kernels = kernels_of(text_of("llama-3-8b"))
    assert {kernels[name].op for name in ("fc1-wgrad", "fc2-wgrad")} == {"dense-wgrad"}
    assert not kernels["fc1-wgrad"].operands["split"]  # its tiles are many
    small = CONFIGS["llama-3-8b"] | {"hidden_size": 512, "intermediate_size": 1024}
    kernels = kernels_of(text_of(small))
    assert kernels["fc1-wgrad"].operands["split"]
    assert kernels["fc2-wgrad"].operands["split"]
    kernels = kernels_of(text_of("llama-4-maverick"))
    assert {kernels[f"{prefix}fc1-wgrad"].op for prefix in ("shared-", "dense-")} == {"dense-wgrad"}
    assert kernels["fc1-wgrad"].op == "grouped-wgrad"


def test_ranks_share_the_experts():
    kernels = kernels_of(text_of("qwen3-30b-a3b", tokens=1000, ranks=8))
    assert (kernels["fc1-fwd"].problem.E, kernels["fc1-fwd"].problem.M) == (16, 8000)
    assert (kernels["index"].experts, kernels["router-topk"].experts) == (16, 128)
    with pytest.raises(SpecError, match=r"--expert-parallel 3: 128 experts .* 1, 2, 4, 8, 16, 32, 64, 128 do"):
        text_of("qwen3-30b-a3b", ranks=3)
    with pytest.raises(SpecError, match="no experts"):
        text_of("llama-3-8b", ranks=2)


def test_the_weights_of_llama_4_scale_the_input():
    kernels = kernels_of(text_of("llama-4-maverick"))
    assert kernels["permute"].scaled
    assert not kernels["permute"].weighted
    assert not kernels["unpermute"].weighted
    assert (kernels["unpermute-bwd"].op, kernels["unpermute-bwd"].scaled) == ("moe-permute", False)
    assert kernels["permute-bwd"].op == "moe-permute-bwd"


def test_what_does_not_fit_is_left_out_with_the_reason():
    odd = text_of(CONFIGS["mixtral-8x7b"] | {"intermediate_size": 1001})
    left = set(re.findall(r"^# Left out: ([\w-]+)", odd, re.MULTILINE))
    assert left == {*MLP}
    assert "1001 elements of 2 bytes = 2002 bytes, which must be a multiple of 16" in odd.replace("\n#  ", "")
    strange = text_of(CONFIGS["mixtral-8x7b"] | {"hidden_act": "xielu"})
    left = set(re.findall(r"^# Left out: ([\w-]+)", strange, re.MULTILINE))
    assert left == {"fc1-fwd", "fc1-infer", "fc2-dgrad"}
    half = text_of(CONFIGS["mixtral-8x7b"] | {"torch_dtype": "float16"})
    assert set(re.findall(r"^# Left out: ([\w-]+)", half, re.MULTILINE)) == set(PERMUTATION) - {"index"}
    assert {spec.dtype for name, spec in kernels_of(half).items() if name.startswith("fc")} == {"fp16"}
    assert kernels_of(half)["router-topk"].dtype == "f32"


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_a_model_that_fits_nowhere_is_refused(model, kernels):
    with pytest.raises(
        SpecError, match=r"config\.json: no kernel fits this model: .* = 1001: .* a multiple of 16"
    ) as error:
        text_of(CONFIGS[model] | {"hidden_size": 1001, "intermediate_size": 1003}, kernels=kernels)
    assert ("problem." in str(error.value)) == kernels  # of a layer, not of its kernels once more


def test_a_dense_mlp_in_every_layer_is_next_to_the_experts():
    text = {"model_type": "gemma4_text", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30}
    sparse = {"enable_moe_block": True, "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8}
    assert "The dense MLP next to the experts (every layer)" in text_of(text | sparse)
    assert "The dense MLP of the layers without experts (16 of 32 layers)" in text_of("jamba")


def test_each_key_is_explained_once():
    text = text_of("deepseek-v3")
    joined = re.sub(r"\n# +", " ", text)
    local_schemas = [schema for schema in schemas() if not set(schema.ops) & set(EXCHANGE_FIELDS)]  # of one GPU
    docs = {key.name: key.doc for schema in local_schemas for key in schema.fields if key.type != "table"}
    for name in ("arch", "b_major", "glu_layout", "save_preactivation", "recompute", "weighted", "num_groups", "warps"):
        used = re.search(rf"^{name} = ", text, re.MULTILINE) is not None
        assert joined.count(docs[name]) == used, name


def test_hostile_words_stay_in_comments():
    config = CONFIGS["llama-3-8b"] | {"model_type": 'x"\n[evil]\nkey = 1\x1b[2J\x7f', "swiglu_limit": "\n[worse]\n"}
    text = text_of(config, family="llama", origin="a\nb.json")
    assert set(tomllib.loads(text)) == {"schema", "summary", "defaults", "kernel"}
    assert all(line.isprintable() for line in text.splitlines())


SHARED = {"deepseek-v3": 2048, "deepseek-v2": 3072, "glm-4.5": 1536, "kimi-k2": 2048, "llama-4-maverick": 8192,
          "granite-4.0-h-tiny": 1024, "ernie-4.5-21b": 3072, "nemotron-3-nano-30b": 3712, "glm-4.7-flash": 1536,
          "glm-5": 2048, "deepseek-v4-flash": 2048, "mistral-small-4": 2048, "ling-mini-2.0": 512, "hunyuan-a13b": 3072,
          "dots.llm1": 2816, "kimi-linear-48b-a3b": 1024, "qwen2-57b-a14b": 20480, "qwen1.5-moe-a2.7b": 5632,
          "qwen3.5-35b-a3b": 512}  # fmt: skip
LAYERS = {
    "nemotron-3-nano-30b": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "gpt-oss-20b": {"bias": True, "aux_loss": True},
    "gpt-oss-120b": {"bias": True, "aux_loss": True},
    "qwen3-30b-a3b": {"aux_loss": True},
    "mixtral-8x7b": {"aux_loss": True},
    "qwen2-57b-a14b": {"pre_softmax": True, "aux_loss": True},
    "deepseek-v3": {"score_function": "sigmoid", "expert_bias": True, "num_groups": 8, "group_topk": 4,
                    "scaling_factor": 2.5},
    "qwen1.5-moe-a2.7b": {"input": "logits", "pre_softmax": True, "aux_loss": True},
    "granite-4.0-h-tiny": {"aux_loss": True},
    "jamba": {"pre_softmax": True, "aux_loss": True},
    "minimax-text-01": {"aux_loss": True},
    "deepseek-v2": {"input": "choices"},
    "ernie-4.5-21b": {"input": "choices"},
    "phi-3.5-moe": {"input": "choices"},
    "glm-4.5": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "kimi-k2": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.827},
    "minimax-m2": {"score_function": "sigmoid", "expert_bias": True},
    "llama-4-maverick": {"score_function": "sigmoid", "scale": "input"},
    "qwen3.5-35b-a3b": {"aux_loss": True},
    "qwen3-omni-30b-a3b": {"aux_loss": True},
    "glm-4.7-flash": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 1.8},
    "glm-5": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "deepseek-v4-flash": {"score_function": "sqrtsoftplus", "expert_bias": True, "scaling_factor": 1.5},
    "mistral-small-4": {"score_function": "softmax", "aux_loss": False},
    "ling-mini-2.0": {"score_function": "sigmoid", "expert_bias": True, "num_groups": 8, "group_topk": 4,
                      "scaling_factor": 2.5},
    "hunyuan-a13b": {"score_function": "softmax"},
    "dots.llm1": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "lfm2-8b-a1b": {"score_function": "sigmoid", "expert_bias": True},
    "kimi-linear-48b-a3b": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.446},
    "mimo-v2-flash": {"score_function": "sigmoid", "expert_bias": True},
}  # fmt: skip


def layers_of(text, name="model"):
    """The options of each layer, by its name in the file."""
    return {spec.layer.name: spec.layer for spec in parse_text(text, name) if spec.layer is not None}


@pytest.mark.parametrize("name", sample(CONFIGS, most=12))
def test_a_model_is_a_layer(name):
    text = text_of(name, name, kernels=False)
    tables, layers = tomllib.loads(text)["kernel"], layers_of(text, name)
    assert [table["name"] for table in tables] == [*layers]
    assert "Left out" not in text
    assert max(map(len, text.splitlines())) <= WIDTH + 2
    read = read_model(json.dumps(CONFIGS[name]), "")
    first = layers[tables[0]["name"]]
    assert (first.hidden, first.intermediate, first.tokens) == (read.hidden, read.mlps[0].intermediate, 8192)
    assert first.activation.items() >= read.mlps[0].activation.items()
    assert first.glu_layout == (read.mlps[0].glu_layout if read.mlps[0].gated else "none")
    assert first.bias == read.mlps[0].bias
    if name not in LAYERS:
        assert (first.name, first.kind, len(layers)) == ("mlp", "mlp", 1)
        return
    assert (first.name, first.kind, first.experts, first.topk) == ("moe", "moe", read.router.experts, read.router.topk)
    assert {key: first.router[key] for key in LAYERS[name]} == LAYERS[name]
    assert first.b_major == ("n" if name.startswith(("gpt-oss", "llama-4")) else "k")  # as the checkpoint has them
    assert first.shared == SHARED.get(name, 0)
    others = {mlp.role for mlp in read.mlps} - {"experts"} - ({"shared"} if first.shared else set())
    assert set(layers) == {"moe", *others}


def test_a_layer_of_inference_has_no_loss_and_no_backward_pass():
    text = text_of("deepseek-v3", kernels=False, training=False)
    layers = layers_of(text)
    assert {layer.keep for layer in layers.values()} == {"none"} and len(layers) == 2
    assert {layer.weights for layer in layers.values()} == {"fp8-block"}  # as its checkpoint has them
    assert not any("grad" in spec.kernel or "bwd" in spec.kernel for spec in parse_text(text, "model"))
    assert "forward and backward" not in text
    layer = layers_of(text_of("mixtral-8x7b", kernels=False, training=False))["moe"]
    assert layer.router["aux_loss"] is False
    assert layer.weights == "none"
    text = text_of("gpt-oss-20b", kernels=False, training=False)
    assert [(layer.weights, layer.b_major) for layer in layers_of(text).values()] == [("mxfp4", "k")]
    assert "gate_up_proj_blocks" in text
    for door in ("transformers", "vllm", "sglang"):
        (layer,) = layers_of(text_of("gpt-oss-20b", kernels=False, training=False, door=door)).values()
        assert (layer.weights, layer.b_major) == ("mxfp4", "k")
    narrow = CONFIGS["gpt-oss-20b"] | {"intermediate_size": 96}  # not a multiple of two scales
    assert layers_of(text_of(narrow, kernels=False, training=False))["moe"].weights == "none"
    by_sequence = text_of("deepseek-v3", kernels=False)
    assert {layer.weights for layer in layers_of(by_sequence).values()} == {"none"}
    assert "the layer's is that of all its tokens, so aux_loss is left out" in by_sequence.replace("\n#  ", "")
    assert layers_of(by_sequence)["moe"].router["aux_loss"] is False


def test_the_layer_of_one_rank_takes_the_rows_of_an_exchange():
    text = text_of("deepseek-v3", kernels=False, ranks=32)
    layers = layers_of(text)
    moe = layers["moe"]
    assert (moe.experts, moe.topk, moe.tokens, moe.shared) == (8, 1, 65536, 0)
    assert moe.router["input"] == "choices"
    assert set(layers) == {"moe", "shared", "dense"}
    assert {"router-topk", "router-topk-bwd"} <= set(kernels_of(text))
    assert "permute" not in kernels_of(text)
    assert "a layer of all experts with ranks = 32 has its own" in text.replace("\n#  ", "")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"torch_dtype": "float16"}, 'must be "f32" or "bf16"'),
        ({"hidden_act": "xielu"}, "is no activation of a gated MLP"),
    ],
)
def test_where_no_layer_fits_there_are_kernels(change, why):
    text = text_of(CONFIGS["mixtral-8x7b"] | change, kernels=False)
    assert why in re.sub(r"\n# +", " ", text)
    assert re.search("^# Left out: moe ", text, re.MULTILINE)
    assert layers_of(text) == {}
    assert {"index", "fc2-fwd"} <= set(kernels_of(text))


def test_a_layer_of_other_than_eights_of_experts_takes_logits():
    for training in (True, False):
        text = text_of("qwen1.5-moe-a2.7b", kernels=False, training=training)
        assert layers_of(text)["moe"].router["input"] == "logits"
        assert "logits[T, X], x . Wr^T. These are not covered" in text.replace("\n#  ", "")
    biased = text_of(CONFIGS["gpt-oss-20b"] | {"num_local_experts": 12}, kernels=False, training=False)
    assert layers_of(biased)["moe"].router["bias"] is False
    assert "logits[T, X], x . Wr^T + b." in biased.replace("\n#  ", "")


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_the_packaged_layers_are_those_of_the_models(model):
    packaged = layers_of((packaged_folder() / f"{model}.toml").read_text(), model)["moe"]
    config = {key: value for key, value in CONFIGS[model].items() if key != "quantization_config"}  # dequantised
    layer = layers_of(text_of(config, model, kernels=False, training=False, tokens=packaged.tokens), model)["moe"]
    assert packaged.canonical() == layer.canonical() | {"keep": "z"}
