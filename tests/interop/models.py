"""Small models of Transformers with random weights."""

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig

from tests.doors.served import error

ATTENTION = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 1024, "pad_token_id": 0,
}  # fmt: skip


def configs(hidden, intermediate, layers=2):
    """A configuration of each family."""
    base = {**ATTENTION, "hidden_size": hidden, "num_hidden_layers": layers}
    return {
        "gpt-oss": GptOssConfig(
            **base, intermediate_size=intermediate, num_local_experts=8, num_experts_per_tok=4, sliding_window=64
        ),
        "qwen3-moe": Qwen3MoeConfig(
            **base, intermediate_size=hidden, moe_intermediate_size=intermediate, num_experts=16, num_experts_per_tok=4,
            norm_topk_prob=True,
        ),
        "mixtral": MixtralConfig(
            **base, intermediate_size=intermediate, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
        ),
        "deepseek-v3": DeepseekV3Config(
            **{**base, "num_key_value_heads": 4, "head_dim": 8}, intermediate_size=hidden,
            moe_intermediate_size=intermediate, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
            n_shared_experts=1, first_k_dense_replace=0, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=16, v_head_dim=16, routed_scaling_factor=2.5,
        ),
    }  # fmt: skip


def model(name, backend, hidden, intermediate, dtype=torch.float32, device="cpu", layers=2):
    """A model of the family with the experts backend; the same weights for every backend."""
    torch.manual_seed(0)
    config = configs(hidden, intermediate, layers)[name]
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=backend)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "experts" in path or "router" in path or "gate" in path:
                parameter.normal_(std=0.02 if parameter.dim() > 1 else 0.1)
    return model.to(device)


def tokens(count, device="cpu", seed=0):
    """Token ids [2, count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, ATTENTION["vocab_size"], (2, count), generator=generator).to(device)


def agree(model, wanted):
    """Asserts that logits are apart by no more than rounding, and that `generate` gives the same tokens."""
    ids = tokens(11)
    with torch.no_grad():
        assert error(model(input_ids=ids).logits, wanted(input_ids=ids).logits.float()) < 0.02
        generated = [each.generate(ids, max_new_tokens=4, do_sample=False) for each in (model, wanted)]
    assert torch.equal(*generated)


def ran(library):
    """The passes that ran, by layer, of a library of `test_transformers`."""
    return {
        name.removeprefix("store/"): {which for which, *_ in layer.passes}
        for name, layer in library._layers.items()
        if layer.passes
    }
