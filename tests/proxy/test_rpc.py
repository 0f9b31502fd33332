"""The gRPC edge with a generated client."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from proxy.tokenizer import Tokenizer
from tests.proxy.conftest import MODEL, StandFactory

PROMPT = "The lighthouse stood at the end of the pier, and its keeper was old."


async def test_generate_equals_http(stand: StandFactory, tokenizer: Tokenizer) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        options = inference_pb2.GenerationOptions(max_tokens=8, temperature=0.0, logprobs=2)
        by_text = inference_pb2.GenerateRequest(model=MODEL, text=PROMPT, options=options)
        reply = await stub.Generate(by_text)
        http = await proxy.http.post(
            "/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2},
        )
        choice = reply.choices[0]
        assert choice.text == http.json()["choices"][0]["text"]
        assert choice.finish_reason == "length"
        assert tokenizer.decode(choice.token_ids) == choice.text
        assert len(choice.logprobs) == 8
        assert [len(entry.top) for entry in choice.logprobs] == [2] * 8
        assert reply.usage.completion_tokens == 8
        assert reply.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
        ids = inference_pb2.TokenIds(ids=tokenizer.encode(PROMPT))
        by_ids = inference_pb2.GenerateRequest(model=MODEL, token_ids=ids, options=options)
        assert (await stub.Generate(by_ids)).choices[0].text == choice.text
        # An explicit zero is not the default.
        assert proxy.decoders[0].works[0].sampling.temperature == 0.0


async def test_a_stream_carries_deltas_then_usage(stand: StandFactory) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            text=PROMPT, options=inference_pb2.GenerationOptions(max_tokens=6, n=2, echo=True)
        )
        whole = await stub.Generate(request)
        texts, reasons = ["", ""], ["", ""]
        async for chunk in stub.GenerateStream(request):
            last = chunk
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert texts == [choice.text for choice in whole.choices]
        assert all(text.startswith(PROMPT) for text in texts)
        assert reasons == ["length", "length"]
        assert last.usage.completion_tokens == 12
        assert not last.choices


async def test_chat_equals_http(stand: StandFactory) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.ChatRequest(
            model=MODEL,
            messages=[inference_pb2.ChatMessage(role="user", content=PROMPT)],
            options=inference_pb2.GenerationOptions(max_tokens=7, stop=["zzz"], logprobs=1),
            chat_template_kwargs_json='{"x": 1}',
        )
        reply = await stub.Chat(request)
        http = await proxy.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 7},
        )
        text = http.json()["choices"][0]["message"]["content"]
        assert reply.choices[0].text == text
        streamed = [chunk async for chunk in stub.ChatStream(request)]
        assert "".join(c.text for chunk in streamed for c in chunk.choices) == text


async def test_tokenize_detokenize_and_models(stand: StandFactory, tokenizer: Tokenizer) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(text=PROMPT))
        assert list(tokens.tokens) == tokenizer.encode(PROMPT)
        assert tokens.max_model_len == 8192
        back = await stub.Detokenize(inference_pb2.DetokenizeRequest(tokens=tokens.tokens))
        assert back.text == PROMPT
        chat = inference_pb2.ChatRequest(
            messages=[inference_pb2.ChatMessage(role="user", content="hi")]
        )
        rendered = await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
        assert tokenizer.decode(rendered.tokens).endswith("<|im_start|>assistant\n")
        models = await stub.Models(inference_pb2.ModelsRequest())
        assert [model.id for model in models.models] == [MODEL, "default"]


async def test_health_follows_readiness(stand: StandFactory) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING

        async def status(name: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)

        async with asyncio.timeout(5):
            while await status("pdserve.v1.Inference") != serving:
                await asyncio.sleep(0.02)
        proxy.decoders[0].state = worker_pb2.WORKER_DRAINING
        proxy.controller.publish()
        async with asyncio.timeout(5):
            while await status("") == serving:
                await asyncio.sleep(0.02)


async def test_reflection_describes_the_service(stand: StandFactory) -> None:
    async with stand() as proxy:

        def list_services() -> list[str]:
            with grpc.insecure_channel(proxy.grpc_address) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                return list(database.get_services())

        names = await asyncio.to_thread(list_services)
        assert "pdserve.v1.Inference" in names
        assert "grpc.health.v1.Health" in names
