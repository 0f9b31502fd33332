"""Text completions: prompts of every form, echo and log-probabilities."""

from typing import Any

from proxy.tokenizer import Tokenizer
from tests.proxy.conftest import MODEL, Stand, StandFactory


async def complete(proxy: Stand, **options: Any) -> dict[str, Any]:
    reply = await proxy.http.post("/v1/completions", json={"model": MODEL, **options})
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


async def test_text_and_token_prompts_are_the_same(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy:
        text = "The lighthouse stood at the end of the pier, and its keeper was old."
        ids = tokenizer.encode(text)
        by_text = await complete(proxy, prompt=text, max_tokens=6)
        by_ids = await complete(proxy, prompt=ids, max_tokens=6)
        assert by_text["choices"][0]["text"] == by_ids["choices"][0]["text"]
        assert by_text["usage"]["prompt_tokens"] == len(ids)
        assert by_text["object"] == "text_completion"


async def test_batches_keep_their_order_and_share_the_usage(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand(num_prefillers=2, num_decoders=2) as proxy:
        prompts = ["one lamp", "two lamps burn", "three lamps burn bright"]
        alone = [await complete(proxy, prompt=prompt, max_tokens=4) for prompt in prompts]
        expected = [reply["choices"][0]["text"] for reply in alone]
        batch = await complete(proxy, prompt=prompts, max_tokens=4)
        assert [choice["text"] for choice in batch["choices"]] == expected
        by_ids = await complete(proxy, prompt=[tokenizer.encode(p) for p in prompts], max_tokens=4)
        assert [choice["text"] for choice in by_ids["choices"]] == expected
        twice = await complete(proxy, prompt=prompts, max_tokens=4, n=2)
        assert [choice["index"] for choice in twice["choices"]] == list(range(6))
        assert [choice["text"] for choice in twice["choices"]] == [
            t for t in expected for _ in "ab"
        ]
        assert twice["usage"]["completion_tokens"] == 24
        assert twice["usage"]["prompt_tokens"] == batch["usage"]["prompt_tokens"]
        await proxy.until_idle()


async def test_max_tokens_is_16_by_default(stand: StandFactory) -> None:
    async with stand() as proxy:
        reply = await complete(proxy, prompt="a")
        assert reply["usage"]["completion_tokens"] == 16


async def test_echo_with_logprobs_covers_prompt_and_output(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy:
        prompt = "naïve 東京"
        ids = tokenizer.encode(prompt)
        reply = await complete(proxy, prompt=prompt, max_tokens=2, echo=True, logprobs=2)
        choice = reply["choices"][0]
        assert choice["text"].startswith(prompt)
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + 2
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:3] == [-(i % 8) / 8 for i in ids[1:3]]
        assert logprobs["text_offset"][0] == 0
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        last = logprobs["tokens"][-1]
        assert choice["text"][logprobs["text_offset"][-1] :] == last


async def test_echo_without_output_scores_the_prompt(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy:
        prompt = "The keeper was old"
        reply = await complete(proxy, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
        choice = reply["choices"][0]
        assert choice["text"] == prompt
        assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode(prompt))
        assert reply["usage"]["completion_tokens"] == 0
        assert choice["finish_reason"] == "length"
        await proxy.until_idle()


async def test_partial_characters_are_spelled_in_logprobs(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy:
        reply = await complete(proxy, prompt="東", max_tokens=1, echo=True, logprobs=0)
        tokens = reply["choices"][0]["logprobs"]["tokens"]
        if len(tokenizer.encode("東")) > 1:
            assert tokens[0].startswith("bytes:\\x")


async def test_skip_special_tokens_false_shows_them(stand: StandFactory) -> None:
    async with stand() as proxy:
        reply = await complete(
            proxy, prompt="<|im_start|>a", max_tokens=1, echo=True, skip_special_tokens=False
        )
        assert reply["choices"][0]["text"].startswith("<|im_start|>a")
        hidden = await complete(proxy, prompt="<|im_start|>a", max_tokens=1, echo=True)
        assert hidden["choices"][0]["text"].startswith("a")


async def test_streams_of_a_batch_carry_each_choice_whole(stand: StandFactory) -> None:
    async with stand() as proxy, proxy.client() as client:
        prompts = ["one lamp", "two lamps"]
        whole = await client.completions.create(model=MODEL, prompt=prompts, max_tokens=5)
        stream = await client.completions.create(
            model=MODEL, prompt=prompts, max_tokens=5, stream=True
        )
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in whole.choices]


async def test_tokenize_and_detokenize_are_inverse(stand: StandFactory) -> None:
    async with stand() as proxy:
        text = "Grüße, 東京 🙂 1234"
        reply = await proxy.http.post("/tokenize", json={"prompt": text})
        body = reply.json()
        assert body["count"] == len(body["tokens"])
        assert body["max_model_len"] == 8192
        back = await proxy.http.post("/detokenize", json={"tokens": body["tokens"]})
        assert back.json() == {"prompt": text}
        chat = await proxy.http.post(
            "/tokenize",
            json={"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True},
        )
        # As the vocabulary spells them: a space is U+0120, a new line U+010A.
        strings = chat.json()["token_strs"]
        assert len(strings) == chat.json()["count"]
        assert strings[-4:] == ["<|im_start|>", "ass", "istant", "\u010a"]
        more = await proxy.http.post(
            "/tokenize", json={"prompt": " the", "return_token_strs": True}
        )
        assert more.json()["token_strs"] == ["\u0120the"]
        messages = [{"role": "user", "content": "hi"}]
        for options, is_open in (({}, True), ({"add_generation_prompt": False}, False)):
            reply = await proxy.http.post("/tokenize", json={"messages": messages, **options})
            assert reply.json()["token_strs"] is None
            assert (reply.json()["tokens"] == chat.json()["tokens"]) == is_open
        bad = await proxy.http.post("/detokenize", json={"tokens": [10**6]})
        assert bad.status_code == 400
