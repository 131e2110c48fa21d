"""`fusekit new` against Transformers: the layer of a small model computes what the model's own block computes."""

import importlib
import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from fusekit.cpu import CpuLayer  # noqa: E402
from fusekit.interop.torch import MoE  # noqa: E402
from fusekit.spec.hf_config import read_model  # noqa: E402
from fusekit.spec.model_kernels import Request  # noqa: E402
from fusekit.spec.new_spec import new_spec  # noqa: E402
from fusekit.spec.parse import parse_text  # noqa: E402

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "dtype": "bfloat16",
}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "norm_topk_prob": True}
QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64, "norm_topk_prob": True}
ONE_SHARED = {"shared_expert.": "shared_experts."}
# model type: the block's class, the config's other fields, names of the checkpoint that are others in the module
BLOCKS = {
    "deepseek_v3": ("DeepseekV3MoE", DEEPSEEK | {"n_group": 4, "topk_group": 1, "routed_scaling_factor": 2.5}, {}),
    "glm4_moe_lite": ("Glm4MoeLiteMoE", DEEPSEEK | {"routed_scaling_factor": 1.8}, {}),
    "glm_moe_dsa": ("GlmMoeDsaMoE", DEEPSEEK | {"n_shared_experts": 2}, {}),
    "dots1": ("Dots1MoE", DEEPSEEK | {"routed_scaling_factor": 2.5}, {}),
    "kimi_linear": ("KimiLinearMoE", {
        "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_renormalize": True,
        "num_expert_group": 1, "routed_scaling_factor": 2.4,
    }, {}),
    "mimo_v2_flash": ("MiMoV2FlashMoE", DEEPSEEK | {"n_shared_experts": None, "routed_scaling_factor": 1.0}, {}),
    "mistral4": ("Mistral4MoE", DEEPSEEK | {"n_shared_experts": None, "routed_scaling_factor": 2.0}, {}),
    "deepseek_v4": ("DeepseekV4SparseMoeBlock", DEEPSEEK | {
        "mlp_layer_types": ["moe"] * 4, "swiglu_limit": 0.5, "intermediate_size": 32,
    }, {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Moe", {"num_experts": 8, "moe_topk": 2, "moe_intermediate_size": None}, {
        "gate.wg.": "gate.", "shared_mlp.": "shared_experts.",
    }),
    "lfm2_moe": ("Lfm2MoeSparseMoeBlock", {
        "num_experts": 8, "num_experts_per_tok": 2, "use_expert_bias": True, "norm_topk_prob": True,
    }, {"expert_bias": "gate.e_score_correction_bias"}),
    "qwen2_moe": ("Qwen2MoeSparseMoeBlock", QWEN | {"norm_topk_prob": False}, ONE_SHARED),
    "qwen3_next": ("Qwen3NextSparseMoeBlock", QWEN, ONE_SHARED),
    "qwen3_5_moe_text": ("Qwen3_5MoeSparseMoeBlock", QWEN, ONE_SHARED),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False}, {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", BLOCKS)
def test_the_layer_computes_the_models_block(model_type):
    name, more, renamed = BLOCKS[model_type]
    values = {key: value for key, value in (SIZES | more).items() if value is not None}
    folder = model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    configs = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    config_class = next(each for each in vars(configs).values() if getattr(each, "model_type", None) == model_type)
    config = config_class(**values)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block_class = getattr(module, name)
    block = block_class(config, 3) if name in ("DeepseekV4SparseMoeBlock", "HunYuanMoEV1Moe") else block_class(config)
    state = {
        key: torch.randn_like(tensor, dtype=torch.float32).bfloat16() for key, tensor in block.state_dict().items()
    }
    state = {key: tensor * (3.0 if key.startswith("gate") else 0.2) for key, tensor in state.items()}
    block.load_state_dict(state)
    text = new_spec(read_model(json.dumps({"model_type": model_type} | values), "config.json"), Request("small")).text
    options = next(
        spec.layer for spec in parse_text(text, "small") if spec.layer is not None and spec.layer.kind == "moe"
    )
    moe = MoE(CpuLayer(options), aux_coefficient=0.0)
    for old, new in renamed.items():
        state = {key.replace(old, new) if key.startswith(old) else key: tensor for key, tensor in state.items()}
    moe.load_state_dict(state)
    x = torch.randn(32, 64).bfloat16()
    with torch.no_grad():
        wanted, result = block.float()(x.float()[None])[0], moe(x)
    result = result[0] if isinstance(result, tuple) else result
    torch.testing.assert_close(result.float(), wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())
