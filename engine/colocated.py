"""Prefill and decode in one process and thread: what a disaggregated run must equal."""

from collections.abc import Callable, Iterable, Sequence

from engine.adapters import Adapters
from engine.ahead import AheadSteps
from engine.async_scheduling import AsyncScheduling
from engine.block_manager import BlockManager
from engine.kv_caches import poisoned_caches
from engine.kv_layout import kv_layout
from engine.models import CausalLM
from engine.request import Request
from engine.runner import ForwardMemory, MakeForward, Runner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.scheduler_output import ScheduledRequest
from engine.speculation import (
    DraftCounters,
    Drafter,
    SampledTokens,
    Verifier,
    rows_before,
    rows_kept,
)
from kernels.ops import Ops


class ColocatedEngine:
    """A model with its KV cache; the prefix cache lives from one `generate` to the next."""

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        *,
        num_blocks: int,
        block_size: int,
        scheduler_config: SchedulerConfig,
        make_forward: MakeForward | None = None,
        adapters: Adapters | None = None,
        make_drafter: Callable[["ColocatedEngine"], Drafter] | None = None,
        cache_dtype: str = "float32",
        async_scheduling: bool = False,
    ) -> None:
        """cache_dtype: of the KV cache; see `kv_layout`. async_scheduling: see engine.ahead.

        Raises: ValueError: async_scheduling with a drafter.
        """
        config = model.config
        # NOTE: NaN, so that whatever reads a block that nobody wrote shows in the tokens.
        layout = kv_layout(config, block_size, dtype=cache_dtype)
        k_caches, v_caches = poisoned_caches(layout, num_blocks + ops.num_spare_blocks)
        self.block_manager = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(
            scheduler_config, self.block_manager, eos_token_ids=config.eos_token_ids
        )
        forward = None
        if make_forward is not None:
            max_blocks = -(-scheduler_config.max_model_len // block_size)
            memory = ForwardMemory(
                k_caches,
                v_caches,
                scheduler_config.max_num_seqs,
                max_blocks,
                num_draft_tokens=scheduler_config.num_draft_tokens,
            )
            forward = make_forward(model, ops, memory)
        self._runner = Runner(model, k_caches, v_caches, ops, block_size, forward, adapters)
        self.caches = (k_caches, v_caches)
        self.drafts = DraftCounters()
        self._verifier = Verifier(
            self.scheduler,
            config.vocab_size,
            config.eos_token_ids,
            ops,
        )
        self._drafter = None if make_drafter is None else make_drafter(self)
        self.ahead = None
        self._async_scheduling = None
        if async_scheduling:
            if self._drafter is not None:
                raise ValueError("async_scheduling does not go with drafts")
            self.ahead = AheadSteps(self._runner, self.scheduler, ops.queue())
            self._async_scheduling = AsyncScheduling(
                self.ahead,
                self,
                lambda: self.scheduler.schedule().scheduled,
                self.scheduler.schedule_ahead,
            )

    def close(self) -> None:
        """End the thread of async scheduling, if there is one."""
        if self.ahead is not None:
            self.ahead.close()

    def generate(self, requests: Iterable[Request]) -> None:
        """Run the requests together until each has finished; their output is in their token_ids.

        Raises: QueueFull, ValueError: a request is not admitted; see Scheduler.add.
        """
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work or (self.ahead is not None and self.ahead.num_under_way):
            self.step()

    def step(self) -> None:
        """Schedule, run and sample once; with async_scheduling, of one step and the next."""
        if self._async_scheduling is not None:
            if self._async_scheduling.step() is None:
                assert self.scheduler.num_waiting, "requests are left, but none can go on"
            return
        chosen = self.scheduler.schedule()
        if chosen.scheduled:
            self.run_one(chosen.scheduled)
        else:
            # Those who lost their blocks are admitted by the next schedule.
            assert chosen.preempted, "requests are left, but none can go on"

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """See `engine.async_scheduling.Steps`."""
        assert self.ahead is not None, "steps are launched by async_scheduling alone"
        self.ahead.launch(scheduled)

    def conclude(self) -> list[SampledTokens]:
        """See `engine.async_scheduling.Steps`."""
        assert self.ahead is not None, "steps are launched by async_scheduling alone"
        return self.ahead.conclude()

    def run_one(self, scheduled: Sequence[ScheduledRequest]) -> list[SampledTokens]:
        """See `engine.async_scheduling.Steps`."""
        output = self._runner.run(scheduled)
        before = rows_before(scheduled)
        sampled = self._verifier.run(scheduled, output.logits)
        self.drafts.add(sampled)
        if self._drafter is not None:
            self._drafter.propose(rows_kept(scheduled, before), output.hidden, None)
        return sampled
