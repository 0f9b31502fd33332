"""One request inside an engine: its tokens, its progress, its blocks and its state."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

RequestKey = tuple[str, int]
"""(request_id, attempt)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How output tokens are chosen; the meaning of each field is that of the HTTP API."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """64 bits. The random number for a token is a pure function of (seed, position)."""
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    grammar: str = ""
    """What the output must match, in llguidance's form; empty: anything."""


class RequestState(enum.Enum):
    """Life of a request in a scheduler.

    prefiller: WAITING -> RUNNING -> SENDING -> FINISHED
    decoder:   RESERVED -> WAITING_FOR_REMOTE_KV -> RUNNING -> FINISHED
               RESERVED -> WAITING (local prefill) -> RUNNING -> FINISHED
    A preempted request goes RUNNING -> WAITING. Any state may go to ABORTED or FAILED.
    """

    WAITING = "waiting"
    RESERVED = "reserved"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    SENDING = "sending"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class FinishReason(enum.Enum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one request; owned by one engine loop thread."""

    request_id: str
    attempt: int
    token_ids: list[int]
    """Prompt, then output; grows with each sampled token."""
    num_prompt_tokens: int
    """How many of token_ids are the prompt; after a migration token_ids starts with output too."""
    sampling: SamplingParams
    deadline_s: float = float("inf")
    """On time.monotonic()."""
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    """Key of the LoRA adapter that it is computed with; empty: the model as it is."""
    arrival_s: float = 0.0
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    """Tokens whose KV is in block_ids."""
    num_cached_tokens: int = 0
    """Of these, tokens found in the prefix cache when first scheduled."""
    num_running_tokens: int = 0
    """Tokens that steps under way compute: they will be among num_computed_tokens."""
    num_running_samples: int = 0
    """Tokens that steps under way sample: they will be in token_ids."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of token_ids so far; extended as blocks fill."""
    finish_reason: FinishReason | None = None
    draft_token_ids: list[int] = field(default_factory=list)
    """Guesses of what comes after token_ids; a step that computes them forgets them."""

    @property
    def key(self) -> RequestKey:
        """Identity on the wire."""
        return (self.request_id, self.attempt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far, those emitted before a migration included."""
        return len(self.token_ids) - self.num_prompt_tokens
