"""One engine step and what it tells the proxies: the part that both roles share."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.ahead import AheadSteps
from engine.grammar import Grammars
from engine.request import Request, RequestKey
from engine.runner import RunnerOutput
from engine.scheduler_output import ScheduledRequest
from engine.speculation import Drafter, SampledTokens, Verifier, rows_before, rows_kept
from engine.worker.convert import logprobs_to_proto, output_to_proto
from engine.worker.cores import CoreShares
from engine.worker.counters import LoopCounters
from engine.worker.lockstep import StepModel
from kernels.ops import Ops
from protos import worker_pb2
from protos.step_message import step_message

Emitted = tuple[Request, worker_pb2.TokenOutput]


@dataclass(frozen=True, slots=True)
class RankSampler:
    """What turns the logits of one data-parallel rank into tokens."""

    verifier: Verifier
    drafter: Drafter | None


class StepRunner:
    """Runs scheduled requests, samples, advances the scheduler and builds the token messages."""

    def __init__(
        self,
        model: StepModel | None,
        ops: Ops,
        samplers: Sequence[RankSampler],
        grammars: Grammars,
        counters: LoopCounters,
        cores: CoreShares | None = None,
        ahead: AheadSteps | None = None,
        why_in_turn: str = "",
    ) -> None:
        """model: None where steps of a pipeline begin and end apart. samplers: of every
        data-parallel rank. ahead: of the only one; None: steps run in turn, and are counted under
        `why_in_turn`.
        """
        self.ahead = ahead
        self._why_in_turn = why_in_turn
        self._model = model
        self._ops = ops
        self._samplers = samplers
        self._grammars = grammars
        self._counters = counters
        self._cores = cores
        self._lent_flags: list[int] = []
        self._prompt_logprobs: dict[RequestKey, list[worker_pb2.LogprobList]] = {}

    def run(
        self,
        scheduled: Sequence[Sequence[ScheduledRequest]],
        on_layer: Callable[[int], None] | None = None,
    ) -> list[Emitted]:
        """Compute one step of what each data-parallel rank has scheduled; return each request that
        got tokens, with its message.

        on_layer(i): called from inside the forward pass of the leader's own data-parallel rank once
        layer i's KV of this step is written.
        """
        assert self._model is not None, "steps begin and end apart"
        if self._why_in_turn:
            self._counters.ahead.waits[self._why_in_turn] += 1
        self.begin(scheduled)
        outputs = self._model.run(scheduled, on_layer)
        return self.end(scheduled, outputs, on_layer)

    def begin(self, scheduled: Sequence[Sequence[ScheduledRequest]]) -> None:
        """Take the cores, prepare grammars and count, before a step is computed."""
        self._take_cores()
        entries = [entry for of_rank in scheduled for entry in of_rank]
        self._grammars.prepare([entry.request for entry in entries if entry.samples])
        self._count(entries)

    def end(
        self,
        scheduled: Sequence[Sequence[ScheduledRequest]],
        outputs: Sequence[RunnerOutput],
        on_layer: Callable[[int], None] | None = None,
    ) -> list[Emitted]:
        """Sample from what a step has computed; see `run`."""
        emitted = []
        for sampler, of_rank, output in zip(self._samplers, scheduled, outputs, strict=True):
            self._keep_prompt_logprobs(output)
            if of_rank:
                emitted += self._sample(sampler, of_rank, output, on_layer)
        return emitted

    def run_one(self, scheduled: Sequence[ScheduledRequest]) -> list[Emitted]:
        """See `engine.async_scheduling.Steps`."""
        return self.run([scheduled])

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """See `engine.async_scheduling.Steps`."""
        assert self.ahead is not None, "steps run in turn"
        assert self._model is not None, "they run in a model of one rank"
        self._take_cores()
        self._count(scheduled)
        self._model.num_steps += 1
        self.ahead.launch(scheduled)

    def conclude(self) -> list[Emitted]:
        """See `engine.async_scheduling.Steps`."""
        assert self.ahead is not None, "steps run in turn"
        return self._emit(self.ahead.conclude())

    def _count(self, entries: Iterable[ScheduledRequest]) -> None:
        """To be called before the tokens of these are known."""
        for entry in entries:
            self._counters.num_computed_tokens += entry.num_tokens
            if entry.request.num_output_tokens == entry.num_unknown == 0:
                self._counters.num_prompt_tokens += entry.num_tokens

    def _keep_prompt_logprobs(self, output: RunnerOutput) -> None:
        for part in output.prompt_logprobs:
            # NOTE: the token's own logprob comes first in its list.
            own, top = logprobs_to_proto(part.entries)
            lists = self._prompt_logprobs.setdefault(part.request.key, [])
            # A recomputed chunk replaces what was reported before.
            lists[part.start - 1 :] = [
                worker_pb2.LogprobList(logprobs=[token, *alternatives.logprobs])
                for token, alternatives in zip(own, top, strict=True)
            ]

    def _sample(
        self,
        sampler: RankSampler,
        scheduled: Sequence[ScheduledRequest],
        output: RunnerOutput,
        on_layer: Callable[[int], None] | None,
    ) -> list[Emitted]:
        before = rows_before(scheduled)
        sampled = sampler.verifier.run(scheduled, output.logits)
        if sampler.drafter is not None:
            sampler.drafter.propose(rows_kept(scheduled, before), output.hidden, on_layer)
        return self._emit(sampled)

    def _emit(self, sampled: Sequence[SampledTokens]) -> list[Emitted]:
        self._counters.num_generated_tokens += sum(len(tokens.token_ids) for tokens in sampled)
        self._counters.drafts.add(sampled)
        emitted = []
        for tokens in sampled:
            request = tokens.request
            message = output_to_proto(request, tokens.token_ids, tokens.logprobs)
            message.prompt_logprobs.extend(self._prompt_logprobs.pop(request.key, ()))
            if error := self._grammars.error(request.key):
                message = worker_pb2.TokenOutput(key=message.key, error=f"grammar: {error}")
            emitted.append((request, message))
        return emitted

    def _take_cores(self) -> None:
        if self._cores is not None:
            self._cores.set_busy(True)
            self._borrow(self._cores.lent_flags())

    def _borrow(self, flags: list[int]) -> None:
        if flags != self._lent_flags:
            self._lent_flags = flags
            self._ops.set_lent_threads(flags)

    def idle(self) -> None:
        """Say that there is nothing to run: the others may have the cores."""
        if self._cores is not None:
            self._cores.set_busy(False)

    def forget(self, key: RequestKey) -> None:
        """Drop what is kept for a request that is over."""
        self._prompt_logprobs.pop(key, None)
        self._grammars.forget(key)

    def expect(self, request: Request) -> None:
        """Begin what can be done before the first step of a request: compiling its grammar."""
        self._grammars.prepare([request])


def group_by_session(
    emitted: Iterable[Emitted], session_of: Callable[[RequestKey], int | None]
) -> list[tuple[int, worker_pb2.WorkerMessage]]:
    """One StepOutput per session."""
    groups: dict[int, list[worker_pb2.TokenOutput]] = defaultdict(list)
    for request, message in emitted:
        session_id = session_of(request.key)
        if session_id is not None:
            groups[session_id].append(message)
    return [
        (session_id, worker_pb2.WorkerMessage(step=step_message(outputs)))
        for session_id, outputs in groups.items()
    ]
