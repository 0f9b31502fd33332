"""Every option of the HTTP API exists over gRPC, and means the same there."""

import json
from typing import Any

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc
from proxy.openai import ChatCompletionBody, CompletionBody, TokenizeChatBody, TokenizeTextBody
from tests.proxy.conftest import MODEL, StandFactory
from tests.proxy.fakes import WORD_IDS

Options = inference_pb2.GenerationOptions
PROMPT = "The lighthouse stood at the end of the pier."
SCHEMA = {"type": "object"}

# HTTP option -> (its value, the gRPC options that say the same)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_tokens": (5, {"max_tokens": 5}),
    "min_tokens": (2, {"min_tokens": 2}),
    "temperature": (0.5, {"temperature": 0.5}),
    "top_k": (7, {"top_k": 7}),
    "top_p": (0.5, {"top_p": 0.5}),
    "min_p": (0.25, {"min_p": 0.25}),
    "presence_penalty": (-0.5, {"presence_penalty": -0.5}),
    "frequency_penalty": (0.5, {"frequency_penalty": 0.5}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "logit_bias": ({"5": 2.0}, {"logit_bias": {"5": 2.0}}),
    "seed": (-3, {"seed": -3}),
    "n": (3, {"n": 3}),
    "stop": ([" and"], {"stop": [" and"]}),
    "stop_token_ids": ([WORD_IDS[0]], {"stop_token_ids": [WORD_IDS[0]]}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "skip_special_tokens": (False, {"skip_special_tokens": False}),
    "include_stop_str_in_output": (True, {"include_stop_str_in_output": True}),
    "priority": (-2, {"priority": -2}),
    "cache_salt": ("s", {"cache_salt": "s"}),
    "user": ("u", {"user": "u"}),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}),
    "response_format": (
        {"type": "json_object"},
        {"response_format_json": '{"type": "json_object"}'},
    ),
    "structured_outputs": ({"regex": "a+"}, {"structured_outputs_json": '{"regex": "a+"}'}),
    "guided_json": (SCHEMA, {"guided_json": json.dumps(SCHEMA)}),
    "guided_regex": ("a+", {"guided_regex": "a+"}),
    "guided_choice": (["a", "b"], {"guided_choice": ["a", "b"]}),
    "guided_grammar": ('root ::= "a"', {"guided_grammar": 'root ::= "a"'}),
    "prompt_logprobs": (2, {"prompt_logprobs": 2}),
    "add_special_tokens": (False, {"add_special_tokens": False}),
    "return_token_ids": (True, {"return_token_ids": True}),
    "return_tokens_as_token_ids": (True, {"return_tokens_as_token_ids": True, "logprobs": 1}),
    "echo": (True, {"echo": True}),
    "logprobs": (2, {"logprobs": 2}),
    "best_of": (2, {"best_of": 2}),
}
# What is no generation option over gRPC: the method says it, a field of the request does, or it is
# refused by name on the other edge.
ELSEWHERE = {"model", "stream", "prompt", "max_completion_tokens", "top_logprobs"}
REFUSED = {"use_beam_search", "suffix", "functions", "function_call", "modalities", "audio"}
CONVERSATION = {
    "messages",
    "add_generation_prompt",
    "chat_template_kwargs",
    "continue_final_message",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
}
REFUSED_TEMPLATE = {"chat_template"}


def test_no_option_is_missing() -> None:
    fields = {*CompletionBody.model_fields, *ChatCompletionBody.model_fields}
    assert fields == {*CASES, *ELSEWHERE, *REFUSED, *CONVERSATION, *REFUSED_TEMPLATE}
    spelled = {name for _, options in CASES.values() for name in options}
    assert spelled == {field.name for field in Options.DESCRIPTOR.fields}
    chat = {
        field.name.removesuffix("_json") for field in inference_pb2.ChatRequest.DESCRIPTOR.fields
    }
    assert chat == {*CONVERSATION, "model", "options"}
    tokenize = {field.name for field in inference_pb2.TokenizeRequest.DESCRIPTOR.fields}
    http = {*TokenizeTextBody.model_fields, *TokenizeChatBody.model_fields} - CONVERSATION
    assert http - REFUSED_TEMPLATE - {"prompt"} == tokenize - {"text", "chat"}


async def test_an_option_means_the_same_on_both_edges(stand: StandFactory) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for worker in proxy.workers:
            worker.behavior.token_delay_s = 0.0
        for name, (value, options) in CASES.items():
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, name: value}
            if "logprobs" in options:
                body["logprobs"] = options["logprobs"]
            # The only option that a call without a stream may not have.
            stream_options = body.pop("stream_options", None)
            whole = {} if stream_options else options
            sampled = []
            http = (await proxy.http.post("/v1/completions", json={"seed": 1, **body})).json()
            sampled.append(proxy.decoders[0].works[-1])
            request = inference_pb2.GenerateRequest(
                model=MODEL, text=PROMPT, options=Options(**{"max_tokens": 4, "seed": 1, **whole})
            )
            reply = await stub.Generate(request)
            sampled.append(proxy.decoders[0].works[-1])
            assert sampled[0].sampling == sampled[1].sampling, name
            assert sampled[0].token_ids == sampled[1].token_ids, name
            assert sampled[0].priority == sampled[1].priority, name
            assert sampled[0].cache_salt == sampled[1].cache_salt, name
            assert len(http["choices"]) == len(reply.choices), name
            for theirs, ours in zip(http["choices"], reply.choices, strict=True):
                assert (theirs["text"], theirs["finish_reason"]) == (
                    ours.text,
                    ours.finish_reason,
                ), name
                assert theirs.get("prompt_token_ids", []) == list(ours.prompt_token_ids), name
                tokens = (theirs["logprobs"] or {}).get("tokens", [])
                assert tokens == [entry.sampled.token for entry in ours.logprobs], name
            usage = http["usage"]
            assert usage["completion_tokens"] == reply.usage.completion_tokens, name
            if name in ("best_of", "prompt_logprobs"):
                continue
            text = [""] * len(reply.choices)
            request.options.MergeFrom(Options(**options) if stream_options else Options())
            chunks = [chunk async for chunk in stub.GenerateStream(request)]
            for chunk in chunks:
                for choice in chunk.choices:
                    text[choice.index] += choice.text
            assert text == [choice.text for choice in reply.choices], name
            assert chunks[-1].usage.completion_tokens == usage["completion_tokens"], name
            assert all(chunk.HasField("usage") for chunk in chunks[:-1]) == bool(stream_options)
            first = [list(choice.prompt_token_ids) for choice in chunks[0].choices]
            assert first == [list(reply.choices[0].prompt_token_ids)]
        await proxy.until_idle()


async def test_batches_of_prompts_keep_their_order(stand: StandFactory) -> None:
    prompts = [PROMPT, "Once upon a time", "Hello"]
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        body = {"prompt": prompts, "n": 2, "max_tokens": 4, "seed": 1, "return_token_ids": True}
        http = (await proxy.http.post("/v1/completions", json=body)).json()
        options = Options(n=2, max_tokens=4, seed=1, return_token_ids=True)
        texts = inference_pb2.GenerateRequest(
            texts=inference_pb2.Texts(texts=prompts), options=options
        )
        ids = [choice["prompt_token_ids"] for choice in http["choices"][::2]]
        lists = inference_pb2.GenerateRequest(
            token_id_lists=inference_pb2.TokenIdLists(
                lists=[inference_pb2.TokenIds(ids=entry) for entry in ids]
            ),
            options=options,
        )
        for request in (texts, lists):
            reply = await stub.Generate(request)
            assert [c.text for c in reply.choices] == [c["text"] for c in http["choices"]]
            assert [list(c.prompt_token_ids) for c in reply.choices[::2]] == ids


async def test_an_error_about_a_key_that_is_not_ascii_is_an_invalid_argument(
    stand: StandFactory,
) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            text=PROMPT, options=Options(logit_bias={"naïve": 500.0})
        )
        for call in (stub.Generate(request), anext(aiter(stub.GenerateStream(request)))):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            trailing = dict(refused.value.trailing_metadata() or ())
            assert trailing["pdserve-error-param"] == "logit_bias.na\\xefve"


async def test_a_grpc_reader_that_stops_is_ended(stand: StandFactory) -> None:
    options = Options(max_tokens=8000, logprobs=20)
    small = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))
    async with (
        stand(client_write_timeout_s=0.5) as proxy,
        grpc.aio.insecure_channel(proxy.grpc_address, options=small) as channel,
    ):
        for worker in proxy.workers:
            worker.behavior.token_delay_s = 0.0
        call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(
            inference_pb2.GenerateRequest(text=PROMPT, options=options)
        )
        await call.read()
        await proxy.until(lambda: proxy.server.service.state().num_in_flight == 0, timeout_s=20)
        await proxy.until_idle()
        assert proxy.metric("pdserve_disconnects_total", phase="decode") == 1
        call.cancel()
