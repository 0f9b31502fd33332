"""Decoding by graphs of few sizes."""

from collections.abc import Sequence
from typing import Any

import tests.npu.ge  # noqa: F401  (stops TorchAir before the Graph Engine)
from decoder.graph import GraphRunner
from decoder.graph_npu import AclGraphBackend, TorchairBackend
from engine.colocated import ColocatedEngine
from engine.models import CausalLM
from engine.runner import ForwardMemory
from engine.scheduler import SchedulerConfig
from kernels.npu import NpuOps
from tests.npu.families import BLOCK_SIZE, make_request
from tests.npu.tokens import prompts

LENGTHS = (5, 126, 1)


class FewSizes:
    def batch_sizes(self, max_num_rows: int) -> Sequence[int]:
        return (1, 4)


class FewTorchairSizes(FewSizes, TorchairBackend):
    pass


class FewAclSizes(FewSizes, AclGraphBackend):
    pass


def decode(
    model: CausalLM, ops: NpuOps, backend: Any, *, async_scheduling: bool = False
) -> tuple[list[list[int]], GraphRunner]:
    runners = []

    def make_forward(model: CausalLM, ops: Any, memory: ForwardMemory) -> GraphRunner:
        runners.append(GraphRunner(model, memory, backend))
        runners[0].capture(lambda phase, progress: None)
        return runners[0]

    engine = ColocatedEngine(
        model,
        ops,
        num_blocks=12,
        block_size=BLOCK_SIZE,
        scheduler_config=SchedulerConfig(max_num_seqs=4, max_model_len=384),
        make_forward=make_forward,
        async_scheduling=async_scheduling,
    )
    requests = [make_request(i, prompt) for i, prompt in enumerate(prompts(*LENGTHS))]
    requests = [
        type(request)(
            request_id=request.request_id,
            attempt=0,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=type(request.sampling)(max_tokens=4 + 3 * i, ignore_eos=True),
        )
        for i, request in enumerate(requests)
    ]
    engine.generate(requests)
    return [request.token_ids for request in requests], runners[0]
