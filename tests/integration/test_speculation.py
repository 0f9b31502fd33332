"""Speculative decoding through a prefiller, a transfer and a decoder."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.parallel_config import ParallelConfig
from engine.request import SamplingParams
from tests.engine.mtp import tiny_mtp
from tests.engine.tiny import hf_logits
from tests.integration.alone import tokens_alone
from tests.integration.service import Service

pytestmark = pytest.mark.multiprocess

_NUM_DRAFTS = 2
_NUM_TOKENS = 24
_TIE = 1e-3  # logits closer than this may swap


def _write(folder: Path, tokenizer_folder: Path, num_layers: int = 1) -> Any:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder / name)
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    hf, _ = tiny_mtp(
        folder, num_layers, vocab_size=vocab_size, max_position_embeddings=512, eos_token_id=0
    )
    return hf


def _draft_stats(service: Service) -> tuple[int, int, int]:
    (decoder,) = service.of_role("decoder")
    stats = decoder.stats()
    return stats.num_draft_steps, stats.num_draft_tokens, stats.num_accepted_tokens


@pytest.mark.parametrize(
    ("num_layers", "prefiller_tp", "decoder_tp", "temperature"),
    [(1, 1, 1, 0.0), (2, 2, 1, 0.0), (2, 1, 2, 1.0)],
    ids=["one layer", "two layers, tp 2 to 1", "two layers, tp 1 to 2, sampled"],
)
async def test_a_prefiller_hands_over_what_the_first_draft_needs(
    num_layers: int,
    prefiller_tp: int,
    decoder_tp: int,
    temperature: float,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    hf = _write(tmp_path, tiny_model, num_layers)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, hf.config.vocab_size, (length,), generator=generator).tolist()
        for length in (33, 64, 100, 200)
    ]
    worker = {
        "transfer": {"transport": "memory"},
        "speculation": "mtp",
        "num_draft_tokens": _NUM_DRAFTS,
    }
    with Service(
        tmp_path,
        worker=worker,
        prefiller={"parallel": ParallelConfig(tp_size=prefiller_tp)},
        decoder={"parallel": ParallelConfig(tp_size=decoder_tp)},
    ) as service:
        # Of three tokens the prefiller samples one, and only the first of the decoder's steps may
        # still use a draft: it is the prefiller's.
        for prompt in prompts:
            service.generate(prompt, max_tokens=3, ignore_eos=True)
        assert _draft_stats(service)[:2] == (len(prompts), len(prompts))

        def generate(prompt: list[int]) -> list[int]:
            answer = service.complete(
                prompt,
                temperature=temperature,
                seed=len(prompt),
                max_tokens=_NUM_TOKENS,
                ignore_eos=True,
                return_token_ids=True,
            )
            token_ids: list[int] = answer["choices"][0]["token_ids"]
            return token_ids

        outputs = await asyncio.gather(*(asyncio.to_thread(generate, p) for p in prompts))
        assert _draft_stats(service)[1] > 50
        service.assert_idle()
    if temperature:
        assert outputs == _sampled_without_drafts(tmp_path, prompts, temperature)
        return
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = hf_logits(hf, prompt + output)[len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(output)), torch.tensor(output)]
        assert (logits.amax(dim=-1) - chosen).max() < _TIE


def _sampled_without_drafts(
    folder: Path, prompts: list[list[int]], temperature: float
) -> list[list[int]]:
    """By one process."""
    asked = [
        (
            prompt,
            SamplingParams(
                temperature=temperature,
                seed=len(prompt),
                max_tokens=_NUM_TOKENS,
                ignore_eos=True,
            ),
        )
        for prompt in prompts
    ]
    return tokens_alone(folder, asked)


async def test_right_drafts_are_accepted_and_counted(tiny_model: Path, tmp_path: Path) -> None:
    """A model whose every state is its token's own embedding, so that it says one token again and
    again, and its MTP layer, made like it, says so too."""
    hf = _write(tmp_path, tiny_model)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if "norm" in name:
            tensor.fill_(1.0)
    size = hf.config.hidden_size
    projection = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    tensors["model.layers.2.eh_proj.weight"] = projection
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    worker = {
        "transfer": {"transport": "memory"},
        "speculation": "mtp",
        "num_draft_tokens": _NUM_DRAFTS,
    }
    with Service(tmp_path, worker=worker) as service:
        output = service.generate([7] * 40, max_tokens=31, ignore_eos=True)
        assert output == output[:1] * 31
        # One token by the prefiller, then three a step.
        assert _draft_stats(service) == (10, 20, 20)
