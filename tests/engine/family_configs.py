"""Shapes in which families are compared with transformers: by name, the family and its options."""

from typing import Any

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
NINE_HEADS = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
FIVE_HEADS = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}
LLAMA_CONFIGS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "nine heads over three": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
    },
    "tied embedding": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "both biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "wide theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "linear": {"rope_parameters": LINEAR},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn with its own attention factor": {
        "rope_parameters": YARN
        | {
            "attention_factor": 0.8,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        }
    },
    "yarn with mscale": {
        "rope_parameters": YARN
        | {
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        }
    },
}
QWEN_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 gqa": ("qwen2", {}),
    "qwen2 mha, tied": ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2 nine heads over three": ("qwen2", NINE_HEADS),
    "qwen2 five heads over one, yarn": ("qwen2", FIVE_HEADS | {"rope_parameters": YARN}),
    "qwen2 wide heads, linear": ("qwen2", {"head_dim": 24, "rope_parameters": LINEAR}),
    "qwen2 dynamic": ("qwen2", {"rope_parameters": DYNAMIC}),
    "qwen2 llama3, three layers": ("qwen2", {"rope_parameters": LLAMA3, "num_hidden_layers": 3}),
    "qwen3 gqa": ("qwen3", {"head_dim": 16}),
    "qwen3 default head_dim of 128, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 nine wide heads over three": ("qwen3", NINE_HEADS | {"head_dim": 32}),
    "qwen3 five heads over one, yarn": (
        "qwen3",
        FIVE_HEADS | {"head_dim": 16, "rope_parameters": YARN},
    ),
    "qwen3 mha, biases": (
        "qwen3",
        {"head_dim": 24, "num_key_value_heads": 4, "attention_bias": True},
    ),
    "qwen3 linear": ("qwen3", {"head_dim": 16, "rope_parameters": LINEAR}),
    "qwen3 dynamic": ("qwen3", {"head_dim": 16, "rope_parameters": DYNAMIC}),
    "qwen3 llama3, three layers": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": LLAMA3, "num_hidden_layers": 3},
    ),
}
MOE_CONFIGS: dict[str, dict[str, Any]] = {
    "top two of eight": {},
    "weights normalised": {"norm_topk_prob": True},
    "one expert per token": {"num_experts_per_tok": 1},
    "all experts for every token": {"num_experts_per_tok": 8, "norm_topk_prob": True},
    "more experts than tokens": {"num_experts": 130, "num_experts_per_tok": 5},
    "first layer dense": {"mlp_only_layers": [0]},
    "every second layer sparse": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "sparse step with a dense exception": {
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "mlp_only_layers": [3],
    },
    "nine heads over three, tied": NINE_HEADS | {"tie_word_embeddings": True},
    "five heads over one, yarn": FIVE_HEADS | {"rope_parameters": YARN, "norm_topk_prob": True},
    "biases, llama3": {"attention_bias": True, "rope_parameters": LLAMA3},
    "width of 36, linear": {"moe_intermediate_size": 36, "rope_parameters": LINEAR},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 11}
WINDOW_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mistral, window of 7": ("mistral", {"sliding_window": 7}),
    "mistral, window of 1": ("mistral", {"sliding_window": 1, "head_dim": 32}),
    "mistral, nine heads over three, tied": (
        "mistral",
        NINE_HEADS | {"sliding_window": 20, "tie_word_embeddings": True},
    ),
    "mistral, five heads over one, yarn": (
        "mistral",
        FIVE_HEADS | {"sliding_window": None, "rope_parameters": YARN, "head_dim": 16},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, window of 12, tied": ("mixtral", {"sliding_window": 12, "tie_word_embeddings": True}),
    "mixtral, one expert of five": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 1, "rope_parameters": LLAMA3},
    ),
    "mixtral, nine heads over three": ("mixtral", NINE_HEADS | {"num_experts_per_tok": 3}),
    "mixtral, five heads over one, yarn": (
        "mixtral",
        FIVE_HEADS | {"rope_parameters": YARN, "head_dim": 16},
    ),
    "qwen2, window from the second layer on": ("qwen2", WINDOW | {"max_window_layers": 1}),
    "qwen3, every other layer": (
        "qwen3",
        WINDOW
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 32,
        },
    ),
    "qwen3-moe, all layers": ("qwen3-moe", WINDOW | {"head_dim": 16}),
}
DEEPSEEK_YARN = YARN | {"beta_fast": 32.0, "beta_slow": 1.0}
DEEPSEEK_FIVE_HEADS = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}
DEEPSEEK_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("v3", {}),
    "v3, eight groups": ("v3", {"n_routed_experts": 16, "n_group": 8, "topk_group": 3}),
    "v3, one group": ("v3", {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 5}),
    "v3 without q_lora, weights not normalised": (
        "v3",
        {"q_lora_rank": None, "norm_topk_prob": False},
    ),
    "v3, yarn with mscale": (
        "v3",
        {"rope_parameters": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "v3, five heads, all sparse, two shared experts": (
        "v3",
        DEEPSEEK_FIVE_HEADS | {"first_k_dense_replace": 0, "n_shared_experts": 2},
    ),
    "v3, biases, linear rope, tied": (
        "v3",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "v3, values wider than keys, all dense": (
        "v3",
        {"v_head_dim": 40, "qk_nope_head_dim": 8, "first_k_dense_replace": 2},
    ),
    "v3, one value a head": ("v3", {"v_head_dim": 1}),
    "v2, greedy": ("v2", {"topk_method": "greedy"}),
    "v2, one of four groups": ("v2", {"topk_group": 1}),
    "v2, eight groups, scaled": (
        "v2",
        {"n_routed_experts": 16, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0},
    ),
    "v2 without q_lora, as Lite": (
        "v2",
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_shared_experts": 2,
            "rope_parameters": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v2, five heads, yarn with another mscale": (
        "v2",
        DEEPSEEK_FIVE_HEADS
        | {"rope_parameters": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "v2, one head, biases, tied": (
        "v2",
        {
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
