"""Settings of one proxy process, read by `python -m proxy` from a JSON file."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one client request may ask for; more is refused with status 400 (413 for the body)."""

    max_body_bytes: Annotated[int, Ge(1024)] = 4 * 1024 * 1024
    """Size of a request body, and of a gRPC message."""
    max_stop: Annotated[int, Ge(1)] = 16
    """Stop strings of one request (OpenAI allows 4)."""
    max_stop_chars: Annotated[int, Ge(1)] = 1024
    """Characters of one stop string."""
    max_n: Annotated[int, Ge(1)] = 16
    """Choices per prompt."""
    max_logprobs: Annotated[int, Ge(0)] = 20
    """Alternatives per token."""
    max_logit_bias: Annotated[int, Ge(0)] = 1024
    """Entries of logit_bias."""
    max_prompts: Annotated[int, Ge(1)] = 256
    """Prompts of one /v1/completions request."""
    max_sequences: Annotated[int, Ge(1)] = 512
    """Prompts times choices of one request."""
    max_grammar_bytes: Annotated[int, Ge(1024)] = 64 * 1024
    """Size of a schema, regular expression, list of choices or grammar, tools to be forced too."""
    max_tools: Annotated[int, Ge(0)] = 128
    """Tools of one request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyConfig:
    """Everything that a proxy process has to know at start; times are in seconds."""

    host: str = "127.0.0.1"
    """Address that both listeners bind."""
    http_port: Annotated[int, Ge(0), Le(65535)] = 8000
    """Port of the OpenAI API; 0 picks a free one."""
    grpc_port: Annotated[int, Ge(0), Le(65535)] = 8001
    """Port of the public gRPC API; 0 picks a free one."""
    model_path: str
    """Hugging Face folder or .gguf file: the tokenizer and the chat template come from it."""
    served_model_names: tuple[str, ...]
    """Names that clients may give as `model`; the first one is reported."""
    controller_address: str
    """host:port of the controller's gRPC service."""
    cluster_token: str = ""
    """Shared secret sent to controller and workers; empty for none."""
    adapters_folder: str = ""
    """Folder of the LoRA adapters that clients may load; empty: they may load none."""
    adapter_timeout_s: Annotated[float, Gt(0)] = 60.0
    """For all workers to load an adapter."""
    max_model_len: Annotated[int, Ge(0)] = 0
    """Context limit in tokens; 0: what the decoders report, and the model's own until then."""
    local_prefill_tokens: Annotated[int, Ge(0)] = 16
    """A prompt with at most this many uncached tokens is prefilled on the decoder."""
    max_concurrent_requests: Annotated[int, Ge(1)] = 256
    """Sequences (prompts times choices) that are with the workers at a time."""
    max_queued_requests: Annotated[int, Ge(0)] = 1024
    """Requests that may wait for admission; one more is refused with 429."""
    queue_timeout_s: Annotated[float, Gt(0)] = 30.0
    """Longest wait for admission, and for a worker that is overloaded; then 429."""
    request_timeout_s: Annotated[float, Gt(0)] = 600.0
    """Longest life of a request; then 408, or an error event in a stream."""
    lease_renew_s: Annotated[float, Gt(0)] = 1.0
    """Interval of lease renewals to each worker."""
    connect_timeout_s: Annotated[float, Gt(0)] = 5.0
    """For a worker to greet after dialling, and for the controller to answer."""
    worker_silence_s: Annotated[float, Gt(0)] = 8.0
    """A worker that sends nothing for so long is taken for dead; it sends stats every 2.5 s."""
    controller_silence_s: Annotated[float, Gt(0)] = 15.0
    """Without a membership for so long, the watch is opened anew."""
    reserve_timeout_s: Annotated[float, Gt(0)] = 30.0
    """For a decoder to answer a reservation."""
    first_token_timeout_s: Annotated[float, Gt(0)] = 300.0
    """For the first token of an attempt, after the reservation."""
    token_timeout_s: Annotated[float, Gt(0)] = 120.0
    """Between two tokens of an attempt."""
    worker_wait_s: Annotated[float, Ge(0)] = 2.0
    """How long a request waits for a decoder to appear when none is left; then 503."""
    max_attempts: Annotated[int, Ge(1)] = 6
    """Attempts that may fail (overload not counted) before a request fails."""
    reconnect_min_s: Annotated[float, Gt(0)] = 0.05
    """First pause before a broken session is dialled again; doubles up to reconnect_max_s."""
    reconnect_max_s: Annotated[float, Gt(0)] = 2.0
    """Longest pause between two dials."""
    shutdown_grace_s: Annotated[float, Ge(0)] = 3.0
    """After SIGTERM, running requests may finish within this time."""
    client_write_timeout_s: Annotated[float, Gt(0)] = 30.0
    """A streaming client that takes no byte for so long is disconnected."""
    client_read_timeout_s: Annotated[float, Gt(0)] = 30.0
    """A client that sends no piece of its body for so long gets 408."""
    tool_format: Literal["auto", "hermes", "llama3", "deepseek"] = "auto"
    """How the model spells tool calls; auto: as its chat template says."""
    reasoning_format: Literal["auto", "think", "none"] = "auto"
    """think: <think> ... </think> is reasoning_content; auto: if the chat template knows it."""
    api_keys_file: str = ""
    """File with hashed API keys (its form: proxy/auth.py); empty for none. It may change."""
    api_keys_poll_s: Annotated[float, Gt(0)] = 2.0
    """Interval at which the file is looked at."""
    api_key_hashes: tuple[str, ...] = ()
    """More keys, each as sha256:HEX. Without any key, callers need none."""
    requests_per_minute: Annotated[int, Ge(0)] = 0
    """Generation requests per key and minute, unless its line in the file differs; 0: no limit."""
    tokens_per_minute: Annotated[int, Ge(0)] = 0
    """Prompt and output tokens per key and minute, likewise."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the HTTP API; empty: none, * for all."""
    limits: Limits = Limits()
    """Bounds on one request."""

    def to_json(self) -> str:
        """Serialise; `from_json` is the inverse."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises: ValueError: on malformed JSON or an unknown field; TypeError: on a missing field.
        """
        raw = json.loads(text)
        unknown = set(raw) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown proxy settings: {', '.join(sorted(unknown))}")
        for name in ("served_model_names", "api_key_hashes", "cors_origins"):
            if name in raw:
                raw[name] = tuple(raw[name])
        if "limits" in raw:
            raw["limits"] = Limits(**raw["limits"])
        return cls(**raw)
