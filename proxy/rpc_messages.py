"""Messages of the public gRPC interface to bodies of the HTTP API, and results to messages."""

from typing import Any

import orjson

from protos import inference_pb2
from proxy.choice import Delta, TextLogprob
from proxy.errors import InvalidRequest, Unsupported
from proxy.generation import Usage
from proxy.openai_responses import ChoiceResult
from proxy.request import GenerationRequest

_LISTS = ("stop", "stop_token_ids", "guided_choice")
_JSON_OPTIONS = {
    "response_format_json": "response_format",
    "structured_outputs_json": "structured_outputs",
}


def completion_body(request: inference_pb2.GenerateRequest, *, stream: bool) -> dict[str, Any]:
    """The body of POST /v1/completions.

    Raises: InvalidRequest: an option that is JSON is none.
    """
    body = {"model": request.model, "stream": stream, **_options(request.options)}
    kind = request.WhichOneof("prompt")
    if kind == "text":
        body["prompt"] = request.text
    elif kind == "token_ids":
        body["prompt"] = list(request.token_ids.ids)
    elif kind == "texts":
        body["prompt"] = list(request.texts.texts)
    elif kind == "token_id_lists":
        body["prompt"] = [list(ids.ids) for ids in request.token_id_lists.lists]
    return body


def chat_body(request: inference_pb2.ChatRequest, *, stream: bool) -> dict[str, Any]:
    """The body of POST /v1/chat/completions.

    Raises: InvalidRequest: an option that is JSON is none, or is not for conversations.
    """
    body = {**conversation_body(request), "stream": stream, **_options(request.options)}
    for name in ("echo", "best_of"):
        if body.pop(name, None):
            raise Unsupported(f"{name} is for Generate only", param=name)
    if "logprobs" in body:
        body["top_logprobs"] = body["logprobs"]
        body["logprobs"] = True
    return body


def conversation_body(request: inference_pb2.ChatRequest) -> dict[str, Any]:
    """What of a chat's body makes the prompt.

    Raises: InvalidRequest: an option that is JSON is none.
    """
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [_message(message) for message in request.messages],
    }
    if request.HasField("parallel_tool_calls"):
        body["parallel_tool_calls"] = request.parallel_tool_calls
    if request.continue_final_message:
        body["continue_final_message"] = True
    if request.tools_json:
        body["tools"] = _json(request.tools_json, "tools_json")
    if request.tool_choice_json in ("none", "auto", "required"):
        body["tool_choice"] = request.tool_choice_json
    elif request.tool_choice_json:
        body["tool_choice"] = _json(request.tool_choice_json, "tool_choice_json")
    if request.HasField("add_generation_prompt"):
        body["add_generation_prompt"] = request.add_generation_prompt
    if request.chat_template_kwargs_json:
        body["chat_template_kwargs"] = _json(
            request.chat_template_kwargs_json, "chat_template_kwargs_json"
        )
    return body


def _json(text: str, param: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from None


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := {field.name: value for field, value in message.ListFields()}.get(name):
            body[name] = value
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body


def _options(options: inference_pb2.GenerationOptions) -> dict[str, Any]:
    """Options that are set, under their names in the HTTP API (they are the same)."""
    body: dict[str, Any] = {}
    for field, value in options.ListFields():
        if field.name == "logit_bias":
            body[field.name] = dict(options.logit_bias)
        elif field.name in _LISTS:
            body[field.name] = list(value)
        elif field.name in _JSON_OPTIONS:
            body[_JSON_OPTIONS[field.name]] = _json(value, field.name)
        elif field.name == "continuous_usage_stats":
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": value}
        else:
            body[field.name] = value
    return body


def whole_choice(request: GenerationRequest, choice: ChoiceResult) -> inference_pb2.Choice:
    """A choice of a call that does not stream."""
    delta = Delta(
        index=choice.index,
        text=choice.text,
        reasoning=choice.reasoning,
        tool_calls=tuple(choice.tool_calls),
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        prompt_logprobs=choice.prompt_logprobs,
    )
    return choice_delta(request, delta, is_first=True)


def choice_delta(
    request: GenerationRequest, delta: Delta, *, is_first: bool
) -> inference_pb2.Choice:
    """What a choice gained. is_first: nothing of it was sent before."""
    shown = (delta.logprobs or ()) if request.shows_logprobs else ()
    as_ids = request.tokens_as_ids
    prompt_ids: tuple[int, ...] = ()
    if is_first and request.shows_token_ids:
        prompt_ids = request.prompts[delta.index // request.num_returned]
    return inference_pb2.Choice(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason.value if delta.finish_reason else "",
        logprobs=[_position(entry, as_ids=as_ids) for entry in shown],
        tool_calls=[
            inference_pb2.ToolCall(
                index=call.index, id=call.id, name=call.name, arguments=call.arguments
            )
            for call in delta.tool_calls
        ],
        reasoning_content=delta.reasoning,
        prompt_logprobs=[_position(entry, as_ids=as_ids) for entry in delta.prompt_logprobs or ()],
        stop_reason="" if delta.stop_reason is None else str(delta.stop_reason),
        prompt_token_ids=prompt_ids,
    )


def _position(entry: TextLogprob, *, as_ids: bool) -> inference_pb2.PositionLogprobs:
    def logprob(token_id: int, data: bytes, value: float) -> inference_pb2.Logprob:
        token = f"token_id:{token_id}" if as_ids else data.decode(errors="replace")
        return inference_pb2.Logprob(token=token, token_id=token_id, logprob=value, bytes=data)

    return inference_pb2.PositionLogprobs(
        sampled=logprob(entry.token_id, entry.data, entry.logprob or 0.0),
        top=[logprob(*top) for top in entry.top],
    )


def usage_message(usage: Usage) -> inference_pb2.Usage:
    """Tokens of a request."""
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
