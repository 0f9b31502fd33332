"""Prefill and decode in one process and thread: what a disaggregated run must equal."""

from collections.abc import Iterable

import torch

from engine.block_manager import BlockManager
from engine.kv_layout import kv_layout
from engine.models import CausalLM
from engine.request import Request
from engine.runner import ForwardMemory, MakeForward, Runner
from engine.sampling import Sampler
from engine.scheduler import Scheduler, SchedulerConfig
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
    ) -> None:
        config = model.config
        # NOTE: NaN, so that whatever reads a block that nobody wrote shows in the tokens.
        k_caches, v_caches = (
            [torch.full(shape, torch.nan) for _ in range(config.num_layers)]
            for shape in kv_layout(config, block_size).shapes(num_blocks)
        )
        self.block_manager = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(
            scheduler_config, self.block_manager, eos_token_ids=config.eos_token_ids
        )
        forward = None
        if make_forward is not None:
            max_blocks = -(-scheduler_config.max_model_len // block_size)
            memory = ForwardMemory(k_caches, v_caches, scheduler_config.max_num_seqs, max_blocks)
            forward = make_forward(model, ops, memory)
        self._runner = Runner(model, k_caches, v_caches, ops, block_size, forward)
        self._sampler = Sampler(config.vocab_size, config.eos_token_ids)

    def generate(self, requests: Iterable[Request]) -> None:
        """Run the requests together until each has finished; their output is in their token_ids.

        Raises: QueueFull, ValueError: a request is not admitted; see Scheduler.add.
        """
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.step()

    def step(self) -> None:
        """Schedule, run and sample once."""
        output = self.scheduler.schedule()
        scheduled = output.scheduled
        if not scheduled:
            assert output.preempted, "requests are left, but none can go on"
            return  # those who lost their blocks are admitted by the next schedule
        sampling = [entry.request for entry in scheduled if entry.samples]
        logits = self._runner.run(scheduled).logits
        self.scheduler.update(scheduled, self._sampler.sample(logits, sampling).token_ids)
