"""Fields of public config.json files: those that an MLP and a router depend on, and some that must not matter."""

CONFIGS = {
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64,
        "experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 32, "hidden_act": "silu",
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "router_aux_loss_coef": 0.9,
        "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"},
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64,
        "experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 128, "hidden_act": "silu",
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "router_aux_loss_coef": 0.9,
        "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"},
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "router_aux_loss_coef": 0.001, "torch_dtype": "bfloat16",
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "aux_loss_alpha": 0.001,
        "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    },
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "aux_loss_alpha": 0.003,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6, "num_hidden_layers": 60,
        "routed_scaling_factor": 16.0, "scoring_func": "softmax", "seq_aux": True, "topk_group": 3,
        "topk_method": "group_limited_greedy", "torch_dtype": "bfloat16",
    },
    "glm-4.5": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
        "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 92, "routed_scaling_factor": 2.5,
        "topk_group": 1, "torch_dtype": "bfloat16", "use_qk_norm": True, "rope_scaling": None,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_local_experts": 8,
        "router_aux_loss_coef": 0.02, "torch_dtype": "bfloat16", "sliding_window": None,
    },
    "llama-4-maverick": {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "llama4_text", "attention_bias": False, "hidden_act": "silu", "hidden_size": 5120,
            "interleave_moe_layer_step": 2, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_local_experts": 128, "output_router_logits": False,
            "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16",
        },
        "vision_config": {"hidden_size": 1408, "intermediate_size": 5632, "hidden_act": "gelu"},
    },
    "kimi-k2": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 1,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"},
    },
    "qwen2-57b-a14b": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "decoder_sparse_step": 1,
        "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944, "moe_intermediate_size": 2560,
        "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 20480, "torch_dtype": "bfloat16",
    },
    "qwen1.5-moe-a2.7b": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "decoder_sparse_step": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
        "norm_topk_prob": False, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "torch_dtype": "bfloat16",
    },
    "granite-4.0-h-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_act": "silu",
        "hidden_size": 1536, "intermediate_size": 512, "num_experts_per_tok": 6, "num_hidden_layers": 40,
        "num_local_experts": 64, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 1024,
        "torch_dtype": "bfloat16",
    },
    "jamba": {
        "architectures": ["JambaForCausalLM"], "model_type": "jamba", "attn_layer_offset": 4, "attn_layer_period": 8,
        "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "router_aux_loss_coef": 0.001, "torch_dtype": "bfloat16",
    },
    "ernie-4.5-21b": {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_act": "silu",
        "hidden_size": 2560, "intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "num_hidden_layers": 28, "torch_dtype": "bfloat16", "use_bias": False,
    },
    "phi-3.5-moe": {
        "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "hidden_act": "silu", "hidden_size": 4096,
        "input_jitter_noise": 0.01, "intermediate_size": 6400, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_local_experts": 16, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "torch_dtype": "bfloat16",
    },
    "minimax-text-01": {
        "architectures": ["MiniMaxForCausalLM"], "model_type": "minimax", "hidden_act": "silu", "hidden_size": 6144,
        "intermediate_size": 9216, "num_experts_per_tok": 2, "num_hidden_layers": 80, "num_local_experts": 32,
        "router_aux_loss_coef": 0.001, "torch_dtype": "bfloat16",
    },
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 1536, "num_experts_per_tok": 8, "num_hidden_layers": 62,
        "num_local_experts": 256, "scoring_func": "sigmoid", "use_routing_bias": True, "torch_dtype": "bfloat16",
    },
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "mlp_bias": False, "num_hidden_layers": 32,
        "torch_dtype": "bfloat16",
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "torch_dtype": "bfloat16",
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
        "num_hidden_layers": 42, "torch_dtype": "float32",
    },
    "starcoder2-3b": {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30, "use_bias": True,
        "torch_dtype": "float16",
    },
}  # fmt: skip
