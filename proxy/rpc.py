"""The public gRPC edge: `pdserve.v1.Inference`, health and reflection.

Requests become the bodies of the HTTP API and pass through the same validation, so both edges take
and refuse the same things. Errors carry `pdserve-error-code` and `pdserve-error-param` as trailing
metadata, and `retry-after` where it helps.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import inference_pb2
from proxy.auth import Account
from proxy.choice import Delta
from proxy.errors import BodyTooLarge, InternalError, InvalidRequest, ProxyError
from proxy.generation import DeltaSink, Usage
from proxy.http_body import WriteWatch, cancel_stalled_writes
from proxy.openai import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
    parse_body,
)
from proxy.openai_responses import Gathering, select_choices
from proxy.request import GenerationRequest, Progress
from proxy.rpc_messages import (
    chat_body,
    choice_delta,
    completion_body,
    conversation_body,
    usage_message,
    whole_choice,
)
from proxy.service import Service

logger = logging.getLogger(__name__)

_SERVICE_NAME = "pdserve.v1.Inference"
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
RequestT = TypeVar("RequestT", bound=Message)
StreamRequestT = TypeVar("StreamRequestT", inference_pb2.GenerateRequest, inference_pb2.ChatRequest)


class RpcServer:
    """The gRPC listener of a proxy."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
            )
        )
        self._health = health.aio.HealthServicer()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Bind and serve; return the port.

        Raises: OSError: the port is taken.
        """
        config = self._service.config
        self._server.add_generic_rpc_handlers((_Inference(self._service).handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            port = self._server.add_insecure_port(f"{host}:{config.grpc_port}")
        except RuntimeError as error:
            raise OSError(f"cannot bind {host}:{config.grpc_port} for gRPC: {error}") from error
        await self._server.start()
        self._following = asyncio.create_task(self._follow_readiness())
        return port

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish within the grace, cancel the rest."""
        if self._following is not None:
            self._following.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def _follow_readiness(self) -> None:
        """Keep the standard health service in step with /ready."""
        while True:
            status = (
                health_pb2.HealthCheckResponse.SERVING
                if self._service.is_ready
                else health_pb2.HealthCheckResponse.NOT_SERVING
            )
            for name in ("", _SERVICE_NAME):
                await self._health.set(name, status)
            await self._service.pool.wait_for_change(1.0)


class _Inference:
    """The methods of the service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def handlers(self) -> grpc.GenericRpcHandler:
        """Handlers that parse requests themselves, so that undecodable bytes get a clear status."""
        kinds: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": self._unary(inference_pb2.GenerateRequest, self._generate),
            "GenerateStream": self._streaming(
                inference_pb2.GenerateRequest, self._generate_request, "grpc_generate"
            ),
            "Chat": self._unary(inference_pb2.ChatRequest, self._chat),
            "ChatStream": self._streaming(
                inference_pb2.ChatRequest, self._chat_request, "grpc_chat"
            ),
            "Tokenize": self._unary(inference_pb2.TokenizeRequest, self._tokenize),
            "Detokenize": self._unary(inference_pb2.DetokenizeRequest, self._detokenize),
            "Models": self._unary(inference_pb2.ModelsRequest, self._models),
        }
        return grpc.method_handlers_generic_handler(_SERVICE_NAME, kinds)

    def _unary(
        self, kind: type[RequestT], answer: Callable[[RequestT, Account], Awaitable[Message]]
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        async def call(data: bytes, context: Context) -> bytes:
            try:
                account = self._authenticate(context)
                reply = await answer(self._parse(kind, data), account)
            except ProxyError as error:
                await _abort(context, error)
            except Exception:  # outermost: the client must get a status
                logger.exception("defect in a gRPC call")
                await _abort(context, InternalError("internal error"))
            return reply.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(call)

    def _streaming(
        self,
        kind: type[StreamRequestT],
        build: Callable[[StreamRequestT], Awaitable[GenerationRequest]],
        api: str,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        timeout_s = self._service.config.client_write_timeout_s

        async def call(data: bytes, context: Context) -> None:
            try:
                account = self._authenticate(context)
                message = self._parse(kind, data)
                request = await build(message)
                with cancel_stalled_writes(timeout_s) as writes:
                    chunks = _ChunkStream(
                        request, context, writes, message.options.continuous_usage_stats
                    )
                    await self._run(request, api, account, chunks)
                    await chunks.end()
            except ProxyError as error:
                await _abort(context, error)
            except Exception:  # outermost: the client must get a status
                logger.exception("defect in a gRPC stream")
                await _abort(context, InternalError("internal error"))

        return grpc.unary_stream_rpc_method_handler(call)

    def _authenticate(self, context: Context) -> Account:
        metadata = dict(context.invocation_metadata() or ())
        authorization = metadata.get("authorization")
        return self._service.accounts.authenticate(
            authorization if isinstance(authorization, str) else None
        )

    def _parse(self, kind: type[RequestT], data: bytes) -> RequestT:
        limit = self._service.config.limits.max_body_bytes
        if len(data) > limit:
            raise BodyTooLarge.beyond(limit)
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"the message cannot be decoded: {error}") from None

    async def _generate_request(
        self, request: inference_pb2.GenerateRequest, *, stream: bool = True
    ) -> GenerationRequest:
        body = parse_body(CompletionBody, completion_body(request, stream=stream))
        return await self._service.builder.completion(body)

    async def _chat_request(
        self, request: inference_pb2.ChatRequest, *, stream: bool = True
    ) -> GenerationRequest:
        body = parse_body(ChatCompletionBody, chat_body(request, stream=stream))
        return await self._service.builder.chat(body)

    async def _generate(self, request: inference_pb2.GenerateRequest, account: Account) -> Message:
        generation = await self._generate_request(request, stream=False)
        return await self._gather(generation, "grpc_generate", account)

    async def _chat(self, request: inference_pb2.ChatRequest, account: Account) -> Message:
        generation = await self._chat_request(request, stream=False)
        return await self._gather(generation, "grpc_chat", account)

    async def _tokenize(self, request: inference_pb2.TokenizeRequest, account: Account) -> Message:
        body: dict[str, Any] = {"model": request.model}
        if request.HasField("add_special_tokens"):
            body["add_special_tokens"] = request.add_special_tokens
        if request.HasField("chat"):
            body = {**conversation_body(request.chat), **body}
            tokens = await self._service.builder.tokenize(parse_body(TokenizeChatBody, body))
        else:
            body["prompt"] = request.text
            tokens = await self._service.builder.tokenize(parse_body(TokenizeTextBody, body))
        strings: list[str] = []
        if request.return_token_strs:
            strings = await asyncio.to_thread(self._service.tokenizer.token_strs, tokens)
        return inference_pb2.TokenizeResponse(
            tokens=tokens,
            count=len(tokens),
            max_model_len=self._service.max_model_len(),
            token_strs=strings,
        )

    async def _detokenize(
        self, request: inference_pb2.DetokenizeRequest, account: Account
    ) -> Message:
        body = parse_body(DetokenizeBody, {"model": request.model, "tokens": list(request.tokens)})
        self._service.builder.check_model(body.model)
        return inference_pb2.DetokenizeResponse(text=self._service.builder.detokenize(body.tokens))

    async def _models(self, request: inference_pb2.ModelsRequest, account: Account) -> Message:
        return inference_pb2.ModelsResponse(
            models=[
                inference_pb2.Model(
                    id=name,
                    created=self._service.started_s,
                    owned_by="pdserve",
                    max_model_len=self._service.max_model_len(),
                )
                for name in (
                    *self._service.config.served_model_names,
                    *self._service.adapters.names,
                )
            ]
        )

    async def _gather(self, request: GenerationRequest, api: str, account: Account) -> Message:
        gathering = Gathering(request)
        await self._run(request, api, account, gathering)
        choices = select_choices(gathering.choices, request)
        return inference_pb2.GenerateResponse(
            id=request.request_id,
            model=request.model,
            created=int(time.time()),
            choices=[whole_choice(request, choice) for choice in choices],
            usage=usage_message(gathering.usage),
        )

    async def _run(
        self, request: GenerationRequest, api: str, account: Account, sink: DeltaSink
    ) -> None:
        """Run a request and count how it ended."""
        progress = Progress()
        error: BaseException | None = None
        try:
            await self._service.run(request, progress, account, sink)
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._service.count(api, progress, error)


class _ChunkStream:
    """Sends deltas as messages of a call; every one waits for `ready`."""

    def __init__(
        self,
        request: GenerationRequest,
        context: Context,
        writes: WriteWatch,
        continuous_usage: bool,
    ) -> None:
        self._request = request
        self._context = context
        self._writes = writes
        self._continuous_usage = continuous_usage
        self.usage = Usage(prompt_tokens=request.num_prompt_tokens)
        self._created = int(time.time())
        self._opened: set[int] = set()
        self._pending: deque[bytes] = deque()
        self._sending = asyncio.Lock()

    def push(self, delta: Delta) -> bool:
        """Keep a delta for `ready`."""
        self.usage.add(delta, self._request)
        choice = choice_delta(self._request, delta, is_first=delta.index not in self._opened)
        self._opened.add(delta.index)
        usage = usage_message(self.usage) if self._continuous_usage else None
        self._pending.append(self._chunk([choice], usage))
        return False

    def push_text(self, index: int, text: str, token_ids: list[int]) -> bool:
        """Keep text for `ready`."""
        return self.push(Delta(index=index, text=text, token_ids=token_ids))

    async def ready(self) -> None:
        """Send what was kept."""
        async with self._sending:
            while self._pending:
                self._writes.began_s = asyncio.get_running_loop().time()
                await self._context.write(self._pending.popleft())
                self._writes.began_s = None

    async def end(self) -> None:
        """Send the rest, and the usage."""
        self._pending.append(self._chunk([], usage_message(self.usage)))
        await self.ready()

    def _chunk(
        self, choices: list[inference_pb2.Choice], usage: inference_pb2.Usage | None
    ) -> bytes:
        chunk = inference_pb2.GenerateChunk(
            id=self._request.request_id,
            model=self._request.model,
            created=self._created,
            choices=choices,
            usage=usage,
        )
        return chunk.SerializeToString()


async def _abort(context: Context, error: ProxyError) -> None:
    metadata = [("pdserve-error-code", error.code)]
    if error.param is not None:
        # Metadata is ASCII; a param may hold a key of the client's.
        param = error.param.encode("ascii", "backslashreplace").decode()
        metadata.append(("pdserve-error-param", param))
    if error.retry_after_s is not None:
        metadata.append(("retry-after", str(max(1, math.ceil(error.retry_after_s)))))
    await context.abort(error.grpc_status, error.message, tuple(metadata))
