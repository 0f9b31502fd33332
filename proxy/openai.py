"""Bodies of the OpenAI API (with vLLM's extensions), and their validation.

Types are strict: a number in quotes is an error, as it is at OpenAI. Unknown fields are accepted.
"""

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from proxy.errors import InvalidRequest

_MAX_SHOWN_CHARS = 100
# Each has at least one token, but is checked before the context is known to be too short.
_MAX_MESSAGES, _MAX_PARTS = 16_384, 4_096
# Far above what any limit or context allows, and still looked at in a moment.
_MAX_ENTRIES = {
    "prompt": 1 << 20,
    "tokens": 1 << 18,
    "tools": 4096,
    "functions": 4096,
    "stop": 4096,
    "stop_token_ids": 1 << 16,
    "logit_bias": 1 << 16,
    "guided_choice": 1 << 16,
}

Uint32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
TokenId = Uint32


class Body(BaseModel):
    """Common to all bodies."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Body):
    """A schema with a name."""

    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """How the answer is constrained: text, json_object or json_schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """One constraint, in vLLM's form."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(Body):
    """Fields that chat and text completions share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Uint32 | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    # Far below, logits would overflow in the engine.
    repetition_penalty: Annotated[float, Field(ge=0.001, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Known and not there: refused by name, rather than ignored.
    use_beam_search: bool | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None


_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _TOKEN_IDS_SCHEMA,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS_SCHEMA]}},
    ]
}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None


class ContentPart(Body):
    """One part of a message's content."""

    type: str
    text: str | None = None


class FunctionCall(Body):
    """What the model called."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(Body):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionSpec(Body):
    """A function that the model may call; parameters is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ConversationBody(Body):
    """How a conversation becomes a prompt."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    tools: list[Tool] | None = None


class ChatCompletionBody(GenerationBody, ConversationBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    function_call: Any = None


class TokenizeTextBody(Body):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


class TokenizeChatBody(ConversationBody):
    """POST /tokenize with a conversation."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(kind: type[BodyT], raw: object) -> BodyT:
    """Validate a decoded JSON document.

    Raises: InvalidRequest: naming the field, the value and the limit.
    """
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {_show(raw)}")
    _check_counts(raw)
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = _param(first["loc"])
        if first["type"] == "missing":
            raise InvalidRequest(
                f"{param} is required", param=param, code="missing_required_parameter"
            ) from None
        message = first["msg"].replace("Input should", "should").replace("Value", "value")
        raise InvalidRequest(
            f"{param} {message}, got {_show(first['input'])}", param=param
        ) from None


def _check_counts(raw: dict[Any, Any]) -> None:
    """Refuse long lists before each entry is validated, which would keep others waiting."""
    counts = [
        (name, len(value), limit)
        for name, limit in _MAX_ENTRIES.items()
        if isinstance(value := raw.get(name), list | dict)
    ]
    messages = raw.get("messages")
    if isinstance(messages, list):
        counts.append(("messages", len(messages), _MAX_MESSAGES))
        for i, message in enumerate(messages[:_MAX_MESSAGES]):
            counts += _part_counts(i, message)
    for param, count, limit in counts:
        if count > limit:
            raise InvalidRequest(f"{param} has {count} entries, the limit is {limit}", param=param)


def _part_counts(index: int, message: object) -> list[tuple[str, int, int]]:
    if not isinstance(message, dict):
        return []
    return [
        (f"messages[{index}].{name}", len(value), _MAX_PARTS)
        for name in ("content", "tool_calls")
        if isinstance(value := message.get(name), list)
    ]


_UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "list", "dict", "NamedTool"})


def _param(location: tuple[int | str, ...]) -> str:
    """Path of a field; members that pydantic adds for unions are no part of it."""
    name = ""
    for step in location:
        if isinstance(step, int):
            name += f"[{step}]"
        elif step.isidentifier() and step not in _UNION_MEMBERS:
            name += f".{step}" if name else step
    return name


def _show(value: object) -> str:
    try:
        text = orjson.dumps(value).decode()
    except TypeError:
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."
