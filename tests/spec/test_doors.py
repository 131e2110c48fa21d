"""What `fusekit new --for` writes for each trainer and server."""

import json

import pytest

from fusekit.errors import SpecError
from fusekit.spec.doors import DOORS
from fusekit.spec.hf_config import read_model
from fusekit.spec.model_kernels import Request
from fusekit.spec.new_spec import new_spec
from fusekit.spec.parse import parse_text

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "dtype": "bfloat16"}
QWEN = SIZES | {
    "model_type": "qwen2_moe", "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "shared_expert_intermediate_size": 64,
}  # fmt: skip
GPT_OSS = SIZES | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 64}


def written(config, door, **more):
    """The options of the one layer."""
    spec = new_spec(read_model(json.dumps(config), "config.json"), Request("small", door=door, **more))
    layers = {each.layer.name: each.layer for each in parse_text(spec.text, "small") if each.layer is not None}
    assert layers.keys() == spec.layers.keys()
    return layers["moe"]


@pytest.mark.parametrize("door", DOORS)
def test_a_door_could_ask_for_its_layer(door):
    options = written(QWEN, door)
    assert DOORS[door].fits(options)
    assert options.shared == (0 if DOORS[door].choices else 64)


def test_the_options_of_each():
    megatron = written(QWEN, "megatron", ranks=4)
    assert (megatron.topk, megatron.experts, megatron.accumulate, megatron.glu_layout) == (1, 2, True, "concat")
    assert not written(QWEN, "megatron", training=False).accumulate
    titan = written(GPT_OSS, "torchtitan")
    assert (titan.topk, titan.glu_layout, titan.bias, titan.b_major) == (4, "interleaved", True, "k")
    stored = written(GPT_OSS, "transformers")
    assert (stored.b_major, stored.glu_layout) == ("n", "interleaved")


def test_a_door_does_not_ask_for_others():
    titan, megatron = written(QWEN, "torchtitan"), written(QWEN, "megatron")
    assert not DOORS["megatron"].fits(titan) and not DOORS["torchtitan"].fits(megatron)


def test_models_that_a_door_does_not_take():
    with pytest.raises(SpecError, match="--for megatron: this model's experts have biases"):
        written(GPT_OSS, "megatron")
    dense = SIZES | {"model_type": "llama"}
    with pytest.raises(SpecError, match="--for vllm: this model has no experts; leave it out"):
        written(dense, "vllm")
