"""What both edges (HTTP and gRPC) hand to the request path, and what comes back from it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from protos import worker_pb2
from proxy.output_parser import OutputOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How tokens are chosen; validated, in the meaning of the HTTP API."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None draws one per request."""
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    """What the output must match, in llguidance's form; empty: anything."""

    def to_proto(self, *, seed: int, max_tokens: int) -> worker_pb2.SamplingParams:
        """Build the message for workers, with what only the request path can fill in."""
        return worker_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=seed,
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            grammar=self.grammar,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One client request after validation and tokenization; each prompt gets n choices."""

    request_id: str
    model: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingOptions
    max_tokens: int
    """Of output per choice; the same for all prompts."""
    n: int = 1
    """Choices per prompt that are generated."""
    num_returned: int = 1
    """Of these, the best ones that are returned (best_of)."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """Keep a stop string that ended the text."""
    echo: bool = False
    drop_output: bool = False
    """max_tokens 0 with echo: one token is generated for the prompt's logprobs and not shown."""
    skip_special_tokens: bool = True
    output: OutputOptions | None = None
    """What to look for in the text; None: it is all content."""
    shows_logprobs: bool = False
    shows_prompt_logprobs: bool = False
    shows_token_ids: bool = False
    tokens_as_ids: bool = False
    """Tokens in logprobs are spelled token_id:N."""
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    """LoRA adapter; empty: the model as it is."""

    @property
    def num_sequences(self) -> int:
        """Choices over all prompts."""
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, each prompt once."""
        return sum(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRequest:
    """One choice of one prompt: what a worker sees."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: worker_pb2.SamplingParams
    deadline_s: float
    """On the event loop's clock."""
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    """LoRA adapter; empty: the model as it is."""


class Phase(enum.Enum):
    """Where a request is; the label of disconnect counts."""

    QUEUED = "queued"
    RESERVE = "reserve"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


@dataclass(slots=True)
class Progress:
    """How far a request is, written by the request path and read by its edge."""

    phase: Phase = Phase.QUEUED


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token and of the best alternatives at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class FinishReason(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class TokenEvent(NamedTuple):
    """New tokens of one sequence, each exactly once and in order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One per token, if asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """With the first event, if asked for: one per prompt token but the first."""
    num_cached_tokens: int | None = None
    """With the first event: prompt tokens that were not computed."""
    finish_reason: FinishReason | None = None

    def joined(self, following: "TokenEvent") -> "TokenEvent":
        """This and the next event of the sequence as one."""
        logprobs = None
        if self.logprobs is not None or following.logprobs is not None:
            logprobs = [*(self.logprobs or ()), *(following.logprobs or ())]
        return self._replace(
            token_ids=[*self.token_ids, *following.token_ids],
            logprobs=logprobs,
            finish_reason=following.finish_reason,
        )
