"""The OpenAPI document of the HTTP API, at /openapi.json.

Request bodies are the models that validate them (proxy/openai.py); replies are written out here,
and tests hold them against what is really sent.
"""

from typing import Any

from pydantic.json_schema import models_json_schema

from proxy.openai import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeChatBody,
    TokenizeTextBody,
    UnloadAdapterBody,
)

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_ERRORS = {
    "400": "The request is wrong; the error names the parameter.",
    "401": "No API key, or a wrong one.",
    "404": "No such model.",
    "408": "The request ran out of time.",
    "413": "The body is too large.",
    "429": "Too many requests, or the key's limit is used up; see Retry-After.",
    "500": "A defect.",
    "503": "No worker can serve it now.",
}
_BODY_ERRORS = ("400", "401", "404", "408", "413", "500")
_BODIES = (
    ChatCompletionBody,
    CompletionBody,
    TokenizeTextBody,
    TokenizeChatBody,
    DetokenizeBody,
    LoadAdapterBody,
    UnloadAdapterBody,
)


def build_document(version: str, *, needs_key: bool) -> Schema:
    """The whole document."""
    _, definitions = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=_REF + "{model}"
    )
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "pdserve",
            "version": version,
            "description": "OpenAI-compatible inference. Unknown fields are accepted and ignored.",
        },
        "paths": _paths(),
        "components": {
            "schemas": {**definitions["$defs"], **_replies()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    if needs_key:
        document["security"] = [{"key": []}]
    return document


def _paths() -> Schema:
    return {
        "/v1/chat/completions": {
            "post": _generation("Answer a conversation", "ChatCompletion", ChatCompletionBody)
        },
        "/v1/completions": {"post": _generation("Complete a text", "Completion", CompletionBody)},
        "/v1/embeddings": {
            "post": _operation(
                "Always refused: no model here has embeddings",
                None,
                _BODY_ERRORS,
                {"type": "object", "properties": {"model": {"type": "string"}}},
            )
        },
        "/v1/models": {"get": _operation("The models", _json("ModelList"), ("401", "500"))},
        "/v1/models/{model_id}": {
            "get": {
                **_operation("One model", _json("Model"), ("401", "404", "500")),
                "parameters": [
                    {
                        "name": "model_id",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "minLength": 1},
                    }
                ],
            }
        },
        "/v1/load_lora_adapter": {
            "post": _operation(
                "Load a LoRA adapter, to be asked for as a model",
                _json("Model"),
                (*_BODY_ERRORS, "503"),
                _ref("LoadAdapterBody"),
            )
        },
        "/v1/unload_lora_adapter": {
            "post": _operation(
                "Unload a LoRA adapter",
                _json("Deleted"),
                (*_BODY_ERRORS, "503"),
                _ref("UnloadAdapterBody"),
            )
        },
        "/tokenize": {
            "post": _operation(
                "Token ids of a text or a conversation",
                _json("Tokens"),
                _BODY_ERRORS,
                {"anyOf": [_ref("TokenizeTextBody"), _ref("TokenizeChatBody")]},
            )
        },
        "/detokenize": {
            "post": _operation(
                "Text of token ids", _json("Text"), _BODY_ERRORS, _ref("DetokenizeBody")
            )
        },
        "/health": {"get": _open("The process is alive", _json("Status"))},
        "/ready": {
            "get": {
                **_open("Whether requests can be served", _json("Readiness")),
                "responses": {
                    "200": {"description": "They can.", "content": _json("Readiness")},
                    "503": {"description": "They cannot.", "content": _json("Readiness")},
                    "500": _error("500"),
                },
            }
        },
        "/metrics": {
            "get": _open("For Prometheus", {"text/plain": {"schema": {"type": "string"}}})
        },
        "/version": {"get": _open("The version", _json("Version"))},
        "/openapi.json": {
            "get": _open("This document", {"application/json": {"schema": {"type": "object"}}})
        },
        "/pdserve/status": {
            "get": _operation(
                "Workers, and what is in flight",
                {"application/json": {"schema": {"type": "object"}}},
                ("401", "500"),
            )
        },
    }


def _generation(summary: str, reply: str, body: type) -> Schema:
    content = {
        **_json(reply),
        "text/event-stream": {
            "schema": {
                "type": "string",
                "description": f"With stream: true. Events `data: {reply}Chunk`, then "
                "`data: [DONE]`. An error after the first event is a last event with an Error.",
            }
        },
    }
    operation = _operation(summary, content, tuple(_ERRORS), _ref(body.__name__))
    schema: Schema = operation["requestBody"]["content"]["application/json"]
    if body is CompletionBody:
        schema["schema"] = {"allOf": [schema["schema"], {"required": ["prompt"]}]}
    return operation


def _operation(
    summary: str, content: Schema | None, errors: tuple[str, ...], body: Schema | None = None
) -> Schema:
    responses = {} if content is None else {"200": {"description": "Done.", "content": content}}
    operation: Schema = {
        "summary": summary,
        "responses": {**responses, **{status: _error(status) for status in errors}},
    }
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return operation


def _open(summary: str, content: Schema) -> Schema:
    """An operation that needs no key."""
    return {**_operation(summary, content, ("500",)), "security": []}


def _error(status: str) -> Schema:
    response: Schema = {"description": _ERRORS[status], "content": _json("Error")}
    if status == "429":
        response["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return response


def _json(name: str) -> Schema:
    return {"application/json": {"schema": _ref(name)}}


def _ref(name: str) -> Schema:
    return {"$ref": _REF + name}


def _object(properties: Schema, optional: tuple[str, ...] = ()) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_MAYBE_NUMBER: Schema = {"type": ["number", "null"]}
_STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
_IDS = _list(_INTEGER)
_PROMPT_LOGPROBS: Schema = {"type": ["array", "null"], "items": {"type": ["object", "null"]}}


def _replies() -> Schema:
    return {
        **_chat_replies(),
        **_completion_replies(),
        "Error": _object(
            {
                "error": _object(
                    {"message": _TEXT, "type": _TEXT, "param": _MAYBE_TEXT, "code": _TEXT}
                )
            }
        ),
        "Usage": _object(
            {
                "prompt_tokens": _INTEGER,
                "completion_tokens": _INTEGER,
                "total_tokens": _INTEGER,
                "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
            }
        ),
        "Model": _object(
            {
                "id": _TEXT,
                "object": {"const": "model"},
                "created": _INTEGER,
                "owned_by": _TEXT,
                "max_model_len": _INTEGER,
            }
        ),
        "ModelList": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
        "Tokens": _object(
            {
                "count": _INTEGER,
                "max_model_len": _INTEGER,
                "tokens": _IDS,
                "token_strs": {"type": ["array", "null"], "items": _TEXT},
            }
        ),
        "Text": _object({"prompt": _TEXT}),
        "Deleted": _object({"id": _TEXT, "object": _TEXT, "deleted": {"type": "boolean"}}),
        "Status": _object({"status": _TEXT}),
        "Readiness": _object({"ready": {"type": "boolean"}, "workers": {"type": "object"}}),
        "Version": _object({"version": _TEXT}),
    }


def _head(kind: str) -> Schema:
    return {"id": _TEXT, "object": {"const": kind}, "created": _INTEGER, "model": _TEXT}


def _chat_replies() -> Schema:
    function = _object({"name": _TEXT, "arguments": _TEXT}, ("name",))
    call = {"index": _INTEGER, "id": _TEXT, "type": {"const": "function"}, "function": function}
    message = {
        "role": {"const": "assistant"},
        "content": _MAYBE_TEXT,
        "refusal": {"type": "null"},
        "reasoning_content": _TEXT,
        "tool_calls": _list(_object(call, ("index",))),
    }
    delta = {
        "role": {"const": "assistant"},
        "content": _TEXT,
        "reasoning_content": _TEXT,
        "tool_calls": _list(_object(call, ("id", "type"))),
    }
    token = {"token": _TEXT, "logprob": _NUMBER, "bytes": _IDS}
    entry = _object({**token, "top_logprobs": _list(_object(token))})
    logprobs = {"anyOf": [{"type": "null"}, _object({"content": _list(entry)})]}
    reason = {"enum": ["stop", "length", "tool_calls"]}
    ending = {"logprobs": logprobs, "stop_reason": _STOP_REASON, "token_ids": _IDS}
    choice = _object(
        {
            "index": _INTEGER,
            "message": _object(message, ("reasoning_content", "tool_calls")),
            "finish_reason": reason,
            **ending,
        },
        ("token_ids",),
    )
    piece = _object(
        {
            "index": _INTEGER,
            "delta": _object(delta, tuple(delta)),
            "finish_reason": {"enum": [*reason["enum"], None]},
            **ending,
        },
        ("token_ids", "stop_reason"),
    )
    return {
        "ChatCompletion": _object(
            {
                **_head("chat.completion"),
                "choices": _list(choice),
                "usage": _ref("Usage"),
                "prompt_token_ids": _IDS,
                "prompt_logprobs": _PROMPT_LOGPROBS,
            },
            ("prompt_token_ids", "prompt_logprobs"),
        ),
        "ChatCompletionChunk": _chunk("chat.completion.chunk", piece),
    }


def _completion_replies() -> Schema:
    logprobs = {
        "anyOf": [
            {"type": "null"},
            _object(
                {
                    "tokens": _list(_TEXT),
                    "token_logprobs": _list(_MAYBE_NUMBER),
                    "top_logprobs": _list({"type": ["object", "null"]}),
                    "text_offset": _IDS,
                }
            ),
        ]
    }
    choice = {
        "index": _INTEGER,
        "text": _TEXT,
        "logprobs": logprobs,
        "finish_reason": {"enum": ["stop", "length"]},
        "stop_reason": _STOP_REASON,
        "token_ids": _IDS,
        "prompt_token_ids": _IDS,
        "prompt_logprobs": _PROMPT_LOGPROBS,
    }
    optional = ("token_ids", "prompt_token_ids", "prompt_logprobs")
    piece = {**choice, "finish_reason": {"enum": ["stop", "length", None]}}
    return {
        "Completion": _object(
            {
                **_head("text_completion"),
                "choices": _list(_object(choice, optional)),
                "usage": _ref("Usage"),
            }
        ),
        "CompletionChunk": _chunk("text_completion", _object(piece, (*optional, "stop_reason"))),
    }


def _chunk(kind: str, piece: Schema) -> Schema:
    usage = {"anyOf": [{"type": "null"}, _ref("Usage")]}
    properties = {
        **_head(kind),
        "choices": _list(piece),
        "usage": usage,
        "prompt_token_ids": _IDS,
    }
    return _object(properties, ("usage", "prompt_token_ids"))
