"""Chat completions over a real socket, with the official clients."""

import asyncio
import json
from typing import Any

import openai
import pytest

from protos import worker_pb2
from proxy.tokenizer import Tokenizer
from tests.proxy.conftest import MODEL, Stand, StandFactory
from tests.proxy.fakes import WORD_IDS, hashed_token, scripted

MESSAGES: list[Any] = [
    {"role": "user", "content": "Tell me about lighthouses, at some length please."}
]


def expected_text(tokenizer: Tokenizer, num_tokens: int) -> str:
    """What fake workers say, computed without any service."""
    prompt = tokenizer.encode(tokenizer.render(MESSAGES), add_special_tokens=False)
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(hashed_token(token_ids, len(prompt), worker_pb2.SamplingParams()))
    return tokenizer.decode(token_ids[len(prompt) :])


def script(proxy: Stand, output_ids: list[int]) -> None:
    for worker in proxy.workers:
        worker.behavior.token = scripted(output_ids)


async def chat(proxy: Stand, **options: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": MESSAGES, **options}
    reply = await proxy.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


async def stream_events(proxy: Stand, **options: Any) -> list[dict[str, Any]]:
    """Chunks of a stream that ends well."""
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, **options}
    events = []
    async with proxy.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        data = (await reply.aread()).decode()
    assert data.endswith("data: [DONE]\n\n")
    for event in data.removesuffix("\n\n").split("\n\n")[:-1]:
        assert event.startswith("data: ")
        assert "\n" not in event
        events.append(json.loads(event[6:]))
    return events


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)


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
        await proxy.until_idle()
        assert not proxy.prefillers[0].cancelled
        assert not proxy.decoders[0].cancelled
        assert proxy.metric("pdserve_disagg_decisions_total", path="remote", reason="long") == 1


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


async def test_the_synchronous_client_works(stand: StandFactory, tokenizer: Tokenizer) -> None:
    async with stand() as proxy:

        def talk() -> str:
            with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", timeout=20) as client:
                stream = client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=5, stream=True
                )
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        assert await asyncio.to_thread(talk) == expected_text(tokenizer, 5)


async def test_continuous_usage_counts_up_to_the_final_usage(stand: StandFactory) -> None:
    async with stand() as proxy:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await stream_events(proxy, max_tokens=4, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert all(
            e["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] for e in events
        )


async def test_a_repeated_prompt_reports_cached_tokens_once(stand: StandFactory) -> None:
    async with stand() as proxy:
        long = [{"role": "user", "content": "lighthouse " * 320}]
        first = await chat(proxy, messages=long, max_tokens=2)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = await chat(proxy, messages=long, max_tokens=2, n=3)
        num_prompt = again["usage"]["prompt_tokens"]
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert num_prompt - 32 <= cached < num_prompt
        assert again["usage"]["completion_tokens"] == 6


async def test_a_short_uncached_rest_is_prefilled_on_the_decoder(stand: StandFactory) -> None:
    async with stand(local_prefill_tokens=4096) as proxy:
        await chat(proxy, max_tokens=3)
        assert proxy.prefillers[0].received.count("prefill") == 0
        assert proxy.decoders[0].num_prefills == 1
        assert proxy.metric("pdserve_disagg_decisions_total", path="local", reason="short") == 1


async def test_first_token_that_ends_the_request_causes_no_decode_work(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy:
        script(proxy, [WORD_IDS[0], WORD_IDS[1]])
        one = await chat(proxy, max_tokens=1)
        assert one["choices"][0]["finish_reason"] == "length"
        stopped = await chat(proxy, max_tokens=9, stop=tokenizer.decode([WORD_IDS[0]]))
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["choices"][0]["message"]["content"] == ""
        assert stopped["choices"][0]["stop_reason"] == tokenizer.decode([WORD_IDS[0]])
        script(proxy, [2])
        eos = await chat(proxy, max_tokens=9)
        assert eos["choices"][0]["finish_reason"] == "stop"
        assert eos["choices"][0]["message"]["content"] == ""
        assert eos["usage"]["completion_tokens"] == 1
        assert proxy.decoders[0].num_decode_tokens == 0
        assert "activate" not in proxy.decoders[0].received
        await proxy.until_idle()
        assert len(proxy.decoders[0].cancelled) == 3


async def test_stop_strings_across_tokens_never_leak(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy:
        text = "Once upon a time there was a STOP sign HALT here"
        script(proxy, [*tokenizer.encode(text), 2])
        for stop in ("a STOP", ["nothing", "STOP"], "OP si", ["was a STOP sign", "HALT"]):
            stops = [stop] if isinstance(stop, str) else stop
            expected = text[: min(text.find(s) for s in stops if s in text)]
            unary = await chat(proxy, max_tokens=50, stop=stop)
            events = await stream_events(proxy, max_tokens=50, stop=stop)
            assert unary["choices"][0]["message"]["content"] == expected
            assert text_of(events) == expected
            assert events[-1]["choices"][0]["finish_reason"] == "stop"
        unmatched = await chat(proxy, max_tokens=50, stop=["here!", "STOP signs"])
        assert unmatched["choices"][0]["message"]["content"] == text
        kept = await chat(proxy, max_tokens=50, stop="STOP", include_stop_str_in_output=True)
        assert kept["choices"][0]["message"]["content"].endswith("a STOP")
        await proxy.until_idle()


async def test_min_tokens_keep_a_stop_string_from_ending_the_text(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy:
        script(proxy, [WORD_IDS[0]])
        word = tokenizer.decode([WORD_IDS[0]])
        reply = await chat(proxy, max_tokens=9, min_tokens=4, stop=word)
        assert reply["usage"]["completion_tokens"] == 5
        assert reply["choices"][0]["message"]["content"] == word * 4


async def test_characters_are_whole_however_tokens_cut_them(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy:
        text = "naïve 東京タワー 👩‍👩‍👧 🙂🙃 ½ ٣ ok"
        script(proxy, [*tokenizer.encode(text), 2])
        events = await stream_events(proxy, max_tokens=100)
        assert text_of(events) == text
        assert not any("�" in text_of([event]) for event in events)
        cut = await chat(proxy, max_tokens=len(tokenizer.encode("naïve 東")) - 1)
        assert cut["choices"][0]["message"]["content"].startswith("naïve ")


async def test_n_choices_are_complete_and_independent(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    def seeded(token_ids: Any, num_prompt: int, sampling: worker_pb2.SamplingParams) -> int:
        return WORD_IDS[(sampling.seed + len(token_ids)) % len(WORD_IDS)]

    async with stand(num_prefillers=2, num_decoders=2) as proxy:
        for worker in proxy.workers:
            worker.behavior.token = seeded
        unary = await chat(proxy, n=4, seed=11, max_tokens=6)
        texts = [choice["message"]["content"] for choice in unary["choices"]]
        assert [choice["index"] for choice in unary["choices"]] == [0, 1, 2, 3]
        assert len(set(texts)) > 1
        assert unary["usage"]["completion_tokens"] == 24
        events = await stream_events(proxy, n=4, seed=11, max_tokens=6)
        assert [text_of(events, index) for index in range(4)] == texts
        alone = await chat(proxy, seed=11, max_tokens=6)
        assert alone["choices"][0]["message"]["content"] == texts[0]
        unseeded = [await chat(proxy, max_tokens=6) for _ in range(3)]
        assert len({reply["choices"][0]["message"]["content"] for reply in unseeded}) > 1
        await proxy.until_idle()


async def test_chat_logprobs_cover_every_token(stand: StandFactory) -> None:
    async with stand() as proxy, proxy.client() as client:
        reply = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3
        )
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 5
        text = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode()
        assert text == reply.choices[0].message.content
        assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
        events = await stream_events(proxy, max_tokens=5, logprobs=True, top_logprobs=3)
        streamed = [
            entry
            for event in events
            for choice in event["choices"]
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert [e["token"] for e in streamed] == [e.token for e in logprobs.content]


async def test_all_sampling_options_reach_the_workers(stand: StandFactory) -> None:
    async with stand() as proxy:
        await chat(
            proxy,
            max_completion_tokens=7,
            min_tokens=5,
            temperature=0.5,
            top_k=40,
            top_p=0.25,
            min_p=0.125,
            presence_penalty=1.5,
            frequency_penalty=-1.5,
            repetition_penalty=1.25,
            logit_bias={"5": 2.5},
            seed=-1,
            stop_token_ids=[9],
            ignore_eos=True,
            logprobs=True,
            top_logprobs=2,
            priority=-3,
            cache_salt="tenant",
            a_field_nobody_knows={"x": 1},
            response_format={"type": "text"},
        )
        for worker in proxy.workers:
            work = worker.works[0]
            assert work.sampling == worker_pb2.SamplingParams(
                temperature=0.5,
                top_k=40,
                top_p=0.25,
                min_p=0.125,
                presence_penalty=1.5,
                frequency_penalty=-1.5,
                repetition_penalty=1.25,
                logit_bias={5: 2.5},
                seed=2**64 - 1,
                num_logprobs=2,
                max_tokens=7,
                min_tokens=5,
                ignore_eos=True,
                stop_token_ids=[9],
            )
            assert work.priority == -3
            assert work.cache_salt == "tenant"
            assert 0 < work.deadline_ms <= 600_000


async def test_null_options_mean_defaults(stand: StandFactory) -> None:
    async with stand() as proxy:
        nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "logprobs", "tools"))
        await chat(proxy, max_tokens=2, **nulls)
        sampling = proxy.decoders[0].works[0].sampling
        assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)
        assert not sampling.HasField("num_logprobs")


async def test_content_parts_are_joined(stand: StandFactory) -> None:
    async with stand() as proxy:
        content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        parts = await chat(proxy, messages=[{"role": "user", "content": content}], max_tokens=1)
        plain = await chat(proxy, messages=[{"role": "user", "content": "a\nb"}], max_tokens=1)
        assert parts["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize("repeat_tokens", [False, True])
async def test_repeated_outputs_of_a_worker_are_dropped(
    stand: StandFactory, tokenizer: Tokenizer, repeat_tokens: bool
) -> None:
    async with stand() as proxy:
        proxy.decoders[0].behavior.repeat_tokens = repeat_tokens
        reply = await chat(proxy, max_tokens=8, logprobs=True)
        assert reply["choices"][0]["message"]["content"] == expected_text(tokenizer, 8)
        assert len(reply["choices"][0]["logprobs"]["content"]) == 8
