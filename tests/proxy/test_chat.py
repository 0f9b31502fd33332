"""Chat completions over a real socket, with the official client."""

import json

import httpx
import openai
import pytest

from proxy.tokenizer import Tokenizer
from tests.proxy.conftest import MODEL, StandFactory
from tests.proxy.fakes import WORD_IDS, hashed_token, scripted
from protos import worker_pb2

MESSAGES = [{"role": "user", "content": "Tell me about lighthouses, at some length please."}]


def expected_text(tokenizer: Tokenizer, num_tokens: int) -> str:
    """What fake workers say, computed without any service."""
    prompt = tokenizer.encode(tokenizer.render(MESSAGES), add_special_tokens=False)
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(hashed_token(token_ids, len(prompt), worker_pb2.SamplingParams()))
    return tokenizer.decode(token_ids[len(prompt) :])


async def test_a_chat_goes_through_prefiller_and_decoder(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy, proxy.client() as client:
        reply = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12)
        assert reply.choices[0].message.content == expected_text(tokenizer, 12)
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 12
        assert proxy.prefillers[0].num_prefills == 1
        assert proxy.decoders[0].num_prefills == 0
        assert proxy.decoders[0].num_decode_tokens == 11
        assert not proxy.prefillers[0].cancelled
        assert not proxy.decoders[0].cancelled
        await proxy.until_idle()


async def test_a_stream_is_the_unary_text_in_pieces(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy, proxy.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == expected_text(tokenizer, 9)
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 9
        assert all(c.usage is None for c in chunks[:-1])
        await proxy.until_idle()
