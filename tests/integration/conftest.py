"""Models that the service tests run: the packaged one, and a tiny random one for fault tests; and
a service of the packaged one for those that leave it as they found it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.integration.service import Service
from tests.oracle import packaged_model_path

_TEXT = (
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen jugs.",
    "Prefill computes the keys and values of a prompt; decode adds one token at a time.",
    "0123456789 naïve café 東京 🙂 def f(x): return x + 1",
)
TINY_CONTEXT = 4096
PACKAGED_NAME = "smollm2-135m-instruct"


def write_tiny_model(folder: Path, *, layers: int = 2, hidden: int = 64) -> Path:
    """A random Llama with a byte-level BPE tokenizer and a chat template, as a model folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "<|end|>"})
    )
    vocab, heads, kv_heads, inter = tokenizer.get_vocab_size(), 4, 2, 2 * hidden
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": TINY_CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": None,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (1.5 / shape[-1] ** 0.5)

    head_dim = hidden // heads
    weights = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(vocab, hidden),
    }
    for i in range(layers):
        prefix = f"model.layers.{i}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": random(heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": random(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": random(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": random(hidden, heads * head_dim),
            f"{prefix}.mlp.gate_proj.weight": random(inter, hidden),
            f"{prefix}.mlp.up_proj.weight": random(inter, hidden),
            f"{prefix}.mlp.down_proj.weight": random(hidden, inter),
        }
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def packaged_model() -> Path:
    return packaged_model_path()


@pytest.fixture(scope="session")
def packaged_service(packaged_model: Path) -> Iterator[Service]:
    """One prefiller and one decoder, for tests that only send requests."""
    with Service(packaged_model, model_name=PACKAGED_NAME) as running:
        yield running
