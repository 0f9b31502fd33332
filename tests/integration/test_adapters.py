"""LoRA adapters, loaded while a service runs, through a prefiller and a decoder of two ranks."""

import asyncio
import queue
import shutil
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from tokenizers import Tokenizer

from engine.parallel_config import ParallelConfig
from protos import worker_pb2, worker_pb2_grpc
from protos.block_hash import block_salt, hash_blocks, kv_identity
from proxy.adapters import Adapters
from proxy.config import ProxyConfig
from tests.engine.adapter_files import merge, write_adapter
from tests.engine.tiny import hf_logits, tiny_hf_llama
from tests.integration.service import TOKEN, Service

pytestmark = pytest.mark.multiprocess

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NUM_TOKENS = 16
_TIE = 1e-3  # logits closer than this may swap


def _assert_greedy(hf: Any, prompt: list[int], output: list[int]) -> None:
    logits = hf_logits(hf, prompt + output)[len(prompt) - 1 : -1]
    chosen = logits[torch.arange(len(output)), torch.tensor(output)]
    assert (logits.amax(dim=-1) - chosen).max() < _TIE


def assert_blocks_are_named_as_a_proxy_names_them(
    address: str, name: str, folder: str, prompt: list[int]
) -> None:
    """By the key that a worker answers a SetAdapter with; two names of it would never match."""
    outgoing: queue.SimpleQueue[worker_pb2.ProxyMessage | None] = queue.SimpleQueue()
    with grpc.insecure_channel(address) as channel:
        replies = worker_pb2_grpc.WorkerStub(channel).Session(
            iter(outgoing.get, None), timeout=60, metadata=(("x-pdserve-token", TOKEN),)
        )
        hello = next(replies).hello
        outgoing.put(
            worker_pb2.ProxyMessage(set_adapter=worker_pb2.SetAdapter(name=name, path=folder))
        )
        changed = next(m.adapter_changed for m in replies if m.HasField("adapter_changed"))
        outgoing.put(worker_pb2.ProxyMessage(resync_kv=worker_pb2.ResyncKV()))
        stored = next(m.kv_events.stored for m in replies if m.HasField("kv_events"))
        outgoing.put(None)
        replies.cancel()
    config = ProxyConfig(
        model_path=folder, served_model_names=(hello.model,), controller_address=address
    )
    known = Adapters(config)
    known.changed(("decoder-0", 1), changed)
    identity = kv_identity(hello.model, hello.layout)
    for adapter in ("", name):
        salt = block_salt(identity, known.key(adapter), "")
        for block_hash in hash_blocks(prompt, hello.layout.block_size, salt):
            assert block_hash in {stored[i : i + 16] for i in range(0, len(stored), 16)}


async def test_adapters_are_loaded_used_and_unloaded_while_serving(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, folder / name)
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    hf = tiny_hf_llama(vocab_size=vocab_size, max_position_embeddings=512, eos_token_id=0)
    hf.save_pretrained(folder)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    deltas = {
        "": {},
        "red": write_adapter(adapters / "red", hf, _TARGETS, seed=1),
        "blue": write_adapter(adapters / "blue", hf, _TARGETS[:2], seed=2),
    }
    write_adapter(adapters / "dora", hf, _TARGETS, seed=3, use_dora=True)
    prompt = torch.randint(3, vocab_size, (70,), generator=torch.Generator().manual_seed(0))
    with Service(
        folder,
        worker={"transfer": {"transport": "memory"}},
        decoder={"parallel": ParallelConfig(tp_size=2)},
        proxy={"adapters_folder": str(adapters)},
    ) as service:

        def post(action: str, **body: str) -> httpx.Response:
            return httpx.post(f"{service.url}/v1/{action}_lora_adapter", json=body, timeout=60)

        def generate(name: str) -> list[int]:
            answer = service.complete(
                prompt.tolist(),
                model=name or service.model_name,
                max_tokens=_NUM_TOKENS,
                ignore_eos=True,
                return_token_ids=True,
            )
            token_ids: list[int] = answer["choices"][0]["token_ids"]
            return token_ids

        async def together() -> list[list[int]]:
            return await asyncio.gather(*(asyncio.to_thread(generate, name) for name in deltas))

        for name in ("red", "blue"):
            assert post("load", lora_name=name, lora_path=name).status_code == 200
        refused = post("load", lora_name="bad", lora_path="dora")
        assert refused.status_code == 400
        assert "use_dora is True" in refused.json()["error"]["message"]
        outside = post("load", lora_name="bad", lora_path="../model")
        assert "is not inside of" in outside.json()["error"]["message"]
        models = httpx.get(f"{service.url}/v1/models", timeout=10).json()["data"]
        assert [model["id"] for model in models][1:] == ["blue", "red"]

        outputs = await together()
        assert_blocks_are_named_as_a_proxy_names_them(
            service.of_role("decoder")[0].info["address"],
            "red",
            str(adapters / "red"),
            prompt.tolist(),
        )
        (decoder,) = service.of_role("decoder")
        decoder.kill()
        service.restart(decoder)
        assert await together() == outputs, "a new worker lacks the adapters"

        assert post("unload", lora_name="red").status_code == 200
        assert post("unload", lora_name="red").status_code == 404
        gone = httpx.post(
            f"{service.url}/v1/completions", json={"model": "red", "prompt": "x"}, timeout=60
        )
        assert gone.status_code == 404
        service.assert_idle()
    assert len({tuple(output) for output in outputs}) == 3
    for added, output in zip(deltas.values(), outputs, strict=True):
        merge(hf, added, 1)
        _assert_greedy(hf, prompt.tolist(), output)
        merge(hf, added, -1)
