"""HTTP routes: the OpenAI API, vLLM's tokenizer endpoints, and those for operators."""

import asyncio
import contextlib
import importlib.metadata
import logging
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    ProxyError,
    RouteNotFound,
    Unauthenticated,
    Unsupported,
)
from proxy.http_body import drain, read_json
from proxy.http_generation import GenerationResponse, error_headers, send_error
from proxy.openai import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    LoadAdapterBody,
    TokenizeChatBody,
    TokenizeTextBody,
    UnloadAdapterBody,
    parse_body,
)
from proxy.openai_responses import ChatFormat, CompletionFormat, ResponseFormat
from proxy.openapi import build_document
from proxy.request import GenerationRequest
from proxy.service import Service

logger = logging.getLogger(__name__)

# What probes and scrapers need; no prompt, no token and no address is to be had there.
_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/openapi.json"})


def create_app(service: Service) -> ASGIApp:
    """Build the ASGI application of a proxy."""
    routes = _Routes(service)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/embeddings", routes.embeddings, methods=["POST"]),
            Route("/v1/models", routes.models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", routes.model, methods=["GET"]),
            Route("/v1/load_lora_adapter", routes.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", routes.unload_adapter, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/ready", routes.ready, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
            Route("/version", routes.version, methods=["GET"]),
            Route("/openapi.json", routes.openapi, methods=["GET"]),
            Route("/pdserve/status", routes.status, methods=["GET"]),
        ],
        exception_handlers={
            ProxyError: _proxy_error,
            HTTPException: _http_exception,
            ClientDisconnected: _nobody,
            Exception: _defect,
        },
    )
    # A redirect would name a scheme and a host that only a proxy before us knows.
    app.router.redirect_slashes = False
    guarded: ASGIApp = _Gate(app, service)
    if not service.config.cors_origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=service.config.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
        expose_headers=["retry-after", "x-request-id"],
    )


class _Gate:
    """Lets in who shows a valid API key; the account goes along in the scope."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            values = [value for name, value in scope["headers"] if name == b"authorization"]
            authorization = values[0].decode(errors="surrogateescape") if len(values) == 1 else None
            try:
                scope["account"] = self._service.accounts.authenticate(authorization)
            except Unauthenticated as error:
                self._service.metrics.requests.labels("auth", "401").inc()
                with contextlib.suppress(ClientDisconnected, DeadlineExceeded):
                    await drain(receive, self._service.config.client_read_timeout_s)
                await send_error(send, error)
                return
        await self._app(scope, receive, send)


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat_completions(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        try:
            body = parse_body(ChatCompletionBody, await self._json(request))
            generation = await self._service.builder.chat(body)
        except ProxyError as error:
            self._count_refusal("chat", error)
            raise
        return self._generate("chat", request, body, generation, ChatFormat(generation))

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        try:
            body = parse_body(CompletionBody, await self._json(request))
            generation = await self._service.builder.completion(body)
        except ProxyError as error:
            self._count_refusal("completions", error)
            raise
        return self._generate(
            "completions", request, body, generation, CompletionFormat(generation)
        )

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings: no model here has them."""
        raw = await self._json(request)
        name = raw.get("model") if isinstance(raw, dict) else None
        model = self._service.builder.check_model(name if isinstance(name, str) else None)
        raise Unsupported(f"The model `{model}` does not support embeddings", param="model")

    async def load_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        body = parse_body(LoadAdapterBody, await self._json(request))
        service = self._service
        await service.adapters.load(body.lora_name, body.lora_path, service.pool.connected)
        return _json_response(self._model(body.lora_name))

    async def unload_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        body = parse_body(UnloadAdapterBody, await self._json(request))
        await self._service.adapters.unload(body.lora_name, self._service.pool.connected)
        return _json_response({"id": body.lora_name, "object": "model", "deleted": True})

    async def models(self, request: Request) -> Response:
        """GET /v1/models; independent of the workers' health."""
        names = [*self._service.config.served_model_names, *self._service.adapters.names]
        return _json_response({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model_id}."""
        model_id = request.path_params["model_id"]
        # NOTE: not `check_model`: there no name is the default one, here it is none.
        names = (*self._service.config.served_model_names, *self._service.adapters.names)
        if model_id not in names:
            raise ModelNotFound.of(model_id, names)
        return _json_response(self._model(model_id))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize, with a prompt or with messages."""
        raw = await self._json(request)
        body: TokenizeTextBody | TokenizeChatBody
        if isinstance(raw, dict) and raw.get("messages") is not None:
            body = parse_body(TokenizeChatBody, raw)
        else:
            body = parse_body(TokenizeTextBody, raw)
        tokens = await self._service.builder.tokenize(body)
        strings = None
        if body.return_token_strs:
            strings = await asyncio.to_thread(self._service.tokenizer.token_strs, tokens)
        return _json_response(
            {
                "count": len(tokens),
                "max_model_len": self._service.max_model_len(),
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = parse_body(DetokenizeBody, await self._json(request))
        self._service.builder.check_model(body.model)
        return _json_response({"prompt": self._service.builder.detokenize(body.tokens)})

    async def health(self, request: Request) -> Response:
        """GET /health: this process is alive."""
        return _json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: requests can be served."""
        is_ready = self._service.is_ready
        workers = self._service.state().num_workers
        return _json_response(
            {"ready": is_ready, "workers": workers}, status=200 if is_ready else 503
        )

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._service.metrics.render(), media_type=media_type)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json_response({"version": _version()})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        needs_key = self._service.accounts.needs_key
        return _json_response(build_document(_version(), needs_key=needs_key))

    async def status(self, request: Request) -> Response:
        """GET /pdserve/status: workers and what is in flight, for operators and tests."""
        return _json_response(self._service.status())

    async def _json(self, request: Request) -> object:
        config = self._service.config
        return await read_json(request, config.limits.max_body_bytes, config.client_read_timeout_s)

    def _generate(
        self,
        api: str,
        request: Request,
        body: GenerationBody,
        generation: GenerationRequest,
        response_format: ResponseFormat,
    ) -> ASGIApp:
        options = body.stream_options
        continuous = options is not None and bool(options.continuous_usage_stats)
        include = options is not None and bool(options.include_usage)
        return GenerationResponse(
            self._service,
            generation,
            response_format,
            account=request.scope["account"],
            api=api,
            is_stream=bool(body.stream),
            include_usage=include,
            continuous_usage=include and continuous,
        )

    def _count_refusal(self, api: str, error: ProxyError) -> None:
        self._service.metrics.requests.labels(api, str(error.status)).inc()

    def _model(self, name: str) -> dict[str, Any]:
        base = self._service.config.served_model_names[0]
        return {
            "id": name,
            "object": "model",
            "created": self._service.started_s,
            "owned_by": "pdserve",
            "root": base,
            "parent": base if name in self._service.adapters.names else None,
            "max_model_len": self._service.max_model_len(),
            "permission": [],
        }


def _json_response(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def _error_response(error: ProxyError) -> Response:
    response = _json_response(error.body(), status=error.status)
    for name, value in error_headers(error):
        response.headers[name.decode()] = value.decode()
    return response


async def _proxy_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProxyError)
    return _error_response(error)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _error_response(RouteNotFound(f"no route {request.scope['path'][:200]}"))
    if error.status_code == 405:
        response = _error_response(
            MethodNotAllowed(f"{request.method} is not allowed on {request.url.path[:200]}")
        )
        response.headers.update(error.headers or {})
        return response
    return _error_response(InvalidRequest(str(error.detail)))


class _NoResponse:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing: the client is gone."""


async def _nobody(request: Request, error: Exception) -> Any:
    return _NoResponse()


async def _defect(request: Request, error: Exception) -> Response:
    logger.error("defect while serving %s", request.url.path, exc_info=error)
    return _error_response(InternalError("internal error"))


def _version() -> str:
    try:
        return importlib.metadata.version("pdserve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
