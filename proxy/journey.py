"""What one sequence has behind it: tokens emitted, attempts made, workers that failed it."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from protos import worker_pb2
from proxy.errors import DeadlineExceeded, InvalidRequest, Unavailable
from proxy.metrics import ProxyMetrics
from proxy.request import FinishReason, Progress, SequenceRequest, TokenEvent
from proxy.session import Call, Identity
from proxy.token_output import logprobs_of, prompt_logprobs_of

_PROGRESS_TOKENS = 8
_DEADLINE_SLACK_S = 1.0

_FINISH = {
    worker_pb2.FINISH_NONE: None,
    worker_pb2.FINISH_STOP: FinishReason.STOP,
    worker_pb2.FINISH_LENGTH: FinishReason.LENGTH,
}


class AttemptFailed(Exception):
    """An attempt ended without finishing; `blamed` is the worker to avoid next time, if any."""

    def __init__(self, reason: str, blamed: Identity | None, *, is_overload: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.blamed = blamed
        self.is_overload = is_overload


class TokenSink(Protocol):
    """Takes the tokens of a sequence."""

    @property
    def is_finished(self) -> bool:
        """Whether the sequence is over: at its finish reason, or earlier."""

    def push(self, event: TokenEvent) -> bool:
        """Take an event, at once; True: the next may follow at once.

        False: it is finished, or `ready` has to be awaited.
        """

    def push_tokens(self, token_ids: list[int]) -> bool:
        """The same as `push` of an event that has nothing else."""

    async def ready(self) -> None:
        """Wait until another event may be pushed."""


@dataclass(slots=True)
class Journey:
    """What one sequence knows over its attempts."""

    request: SequenceRequest
    progress: Progress
    sink: TokenSink
    metrics: ProxyMetrics
    emitted: list[int] = field(default_factory=list)
    num_attempts: int = 0
    num_failed: int = 0
    num_remote_failures: int = 0
    num_emitted_before: int = 0
    """Tokens emitted when the current attempt started."""
    num_failures: Counter[Identity] = field(default_factory=Counter)
    overloaded: set[Identity] = field(default_factory=set)
    overloaded_since_s: float | None = None
    num_backoffs: int = 0
    is_migrating: bool = False
    decoder: Identity | None = None
    """Of the current attempt."""
    prefiller: Identity | None = None
    """Of the current attempt."""
    asks_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        self.asks_logprobs = self.request.sampling.HasField("num_logprobs")

    def token_ids(self) -> list[int]:
        """Prompt and emitted output."""
        return [*self.request.prompt_token_ids, *self.emitted]

    def work(self, now_s: float) -> worker_pb2.Work:
        """The message that lets a worker start, or go on, with this sequence."""
        return worker_pb2.Work(
            token_ids=self.token_ids(),
            num_prompt_tokens=len(self.request.prompt_token_ids),
            sampling=self.request.sampling,
            deadline_ms=max(1, int((self.request.deadline_s - now_s) * 1000)),
            priority=self.request.priority,
            cache_salt=self.request.cache_salt,
            adapter=self.request.adapter,
        )

    def begin_attempt(self, decoder: Identity) -> tuple[str, int]:
        """Count an attempt at a decoder; its key."""
        key = (self.request.request_id, self.num_attempts)
        self.num_attempts += 1
        self.num_emitted_before = len(self.emitted)
        self.decoder, self.prefiller = decoder, None
        return key

    async def emit(self, event: TokenEvent) -> bool:
        """Hand an event on and wait until the next may follow; False: there is none."""
        if not self.sink.push(event):
            if self.sink.is_finished:
                return False
            await self.sink.ready()
        return True

    def follows(self, output: worker_pb2.TokenOutput) -> bool:
        """Whether an output says nothing but what comes after the emitted tokens."""
        return output.output_index == len(self.emitted) and not output.error

    def accept(self, call: Call, output: worker_pb2.TokenOutput) -> TokenEvent | None:
        """Turn a worker's tokens into an event without what was emitted before; None if empty.

        Raises: InvalidRequest: the request itself cannot go on; AttemptFailed: tokens are missing.
        """
        if output.error:
            raise InvalidRequest(output.error)
        num_known = len(self.emitted) - output.output_index
        if num_known < 0:
            raise AttemptFailed("token gap", call.session.identity)
        new_ids = list(output.token_ids)
        if num_known:
            new_ids = new_ids[num_known:]
        finish_reason = _FINISH[output.finish_reason]
        if not new_ids and finish_reason is None:
            return None
        is_first = not self.emitted
        self.emitted += new_ids
        if self.is_migrating:
            self.is_migrating = False
            self.metrics.migrations.labels("success").inc()
        self.overloaded_since_s = None
        if not (is_first or self.asks_logprobs):
            return TokenEvent(new_ids, finish_reason=finish_reason)
        return TokenEvent(
            token_ids=new_ids,
            logprobs=logprobs_of(output, num_known),
            prompt_logprobs=prompt_logprobs_of(output) if is_first else None,
            num_cached_tokens=output.num_cached_tokens if is_first else None,
            finish_reason=finish_reason,
        )

    def failure(self, call: Call, failed: worker_pb2.Failed) -> Exception:
        """What a worker's refusal means for the request."""
        identity: Identity | None = call.session.identity
        if failed.code == worker_pb2.FAILURE_INVALID:
            return InvalidRequest(failed.message or "the worker refused the request")
        time_left_s = self.request.deadline_s - asyncio.get_running_loop().time()
        if failed.code == worker_pb2.FAILURE_DEADLINE and time_left_s < _DEADLINE_SLACK_S:
            return DeadlineExceeded("the request ran out of time")
        if failed.code == worker_pb2.FAILURE_OVERLOADED:
            return AttemptFailed("overloaded", identity, is_overload=True)
        if failed.code == worker_pb2.FAILURE_TRANSFER and self.prefiller is not None:
            # Whoever saw it, the writer is the one that another attempt can avoid.
            identity = self.prefiller
        elif failed.code == worker_pb2.FAILURE_LEASE:
            identity = None
        return AttemptFailed(worker_pb2.FailureCode.Name(failed.code)[8:].lower(), identity)

    def recover(self, failure: AttemptFailed, max_attempts: int) -> None:
        """Note a failed attempt; return if another may start.

        Raises: Unavailable: too many attempts failed.
        """
        self.metrics.retries.labels(failure.reason.replace(" ", "_")).inc()
        if self.emitted:
            self.is_migrating = True
        if failure.is_overload:
            assert failure.blamed is not None
            self.overloaded.add(failure.blamed)
            return
        if len(self.emitted) - self.num_emitted_before >= _PROGRESS_TOKENS:
            # A long stream may meet many failures in its life; only fruitless attempts add up.
            self.num_failed = self.num_remote_failures = 0
            self.num_failures.clear()
        self.num_failed += 1
        if failure.blamed is not None:
            self.num_failures[failure.blamed] += 1
            self.num_remote_failures += failure.blamed == self.prefiller
        if self.num_failed >= max_attempts:
            raise Unavailable(
                f"{self.num_failed} attempts failed, the last one with: {failure.reason}",
                retry_after_s=1.0,
            )
