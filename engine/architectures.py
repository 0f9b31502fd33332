"""What models can be run, by the names their files give them; without torch, for a launcher."""

from typing import Literal, get_args

Architecture = Literal[
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
]
"""In config.json. engine.models.MODELS says how each is built."""

ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)

GGUF_ARCHITECTURES: dict[str, Architecture] = {
    "deepseek2": "DeepseekV2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""`general.architecture` of a GGUF file. Other values make deepseek2 V3, and llama Mixtral."""
