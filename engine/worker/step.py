"""One engine step and what it tells the proxies: the part that both roles share."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from engine.grammar import Grammars
from engine.request import Request, RequestKey
from engine.runner import Runner
from engine.scheduler import ScheduledRequest
from engine.speculation import Drafter, Verifier, rows_before, rows_kept
from engine.worker.convert import logprobs_to_proto, output_to_proto
from engine.worker.cores import CoreShares
from engine.worker.stats import LoopCounters
from protos import worker_pb2

Emitted = tuple[Request, worker_pb2.TokenOutput]


class StepRunner:
    """Runs scheduled requests, samples, advances the scheduler and builds the token messages."""

    def __init__(
        self,
        runner: Runner,
        verifier: Verifier,
        grammars: Grammars,
        counters: LoopCounters,
        cores: CoreShares | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._runner = runner
        self._verifier = verifier
        self._drafter = drafter
        self._grammars = grammars
        self._counters = counters
        self._cores = cores
        self._lent_flags: list[int] = []
        self._prompt_logprobs: dict[RequestKey, list[worker_pb2.LogprobList]] = {}

    def run(
        self, scheduled: Sequence[ScheduledRequest], on_layer: Callable[[int], None] | None = None
    ) -> list[Emitted]:
        """Compute one step; return each request that got tokens, with its message.

        on_layer(i): called from inside the forward pass once layer i's KV of this step is written.
        """
        if self._cores is not None:
            self._cores.set_busy(True)
            self._borrow(self._cores.lent_flags())
        sampling = [entry.request for entry in scheduled if entry.samples]
        self._grammars.prepare(sampling)
        output = self._runner.run(scheduled, on_layer)
        for part in output.prompt_logprobs:
            # NOTE: the token's own logprob comes first in its list.
            own, top = logprobs_to_proto(part.entries)
            lists = self._prompt_logprobs.setdefault(part.request.key, [])
            # A recomputed chunk replaces what was reported before.
            lists[part.start - 1 :] = [
                worker_pb2.LogprobList(logprobs=[token, *alternatives.logprobs])
                for token, alternatives in zip(own, top, strict=True)
            ]
        for entry in scheduled:
            self._counters.num_computed_tokens += entry.num_tokens
            if entry.request.num_output_tokens == 0:
                self._counters.num_prompt_tokens += entry.num_tokens
        before = rows_before(scheduled)
        sampled = self._verifier.run(scheduled, output.logits)
        if self._drafter is not None:
            self._drafter.propose(rows_kept(scheduled, before), output.hidden, on_layer)
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

    def _borrow(self, flags: list[int]) -> None:
        if flags != self._lent_flags:
            self._lent_flags = flags
            self._runner.ops.set_lent_threads(flags)

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
        (session_id, worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(outputs=outputs)))
        for session_id, outputs in groups.items()
    ]
