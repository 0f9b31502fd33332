"""One step of several data-parallel ranks, as the leader sees it; the other ranks are faked."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.request import Request, SamplingParams
from engine.runner import EagerForward
from engine.scheduler_output import ScheduledRequest
from engine.worker.leading_model import ints_from_bytes
from engine.worker.lockstep import Lockstep
from kernels.ops import select_ops
from protos import ranks_pb2

HIDDEN_SIZE = 4


class _Others:
    """The group and the commands that reach its other rank."""

    size = 2

    def __init__(self) -> None:
        self.received: list[Sequence[int]] = []
        self.forwards: list[Sequence[ranks_pb2.Forward]] = []

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self.received.append(list(received))
        return torch.ones(sum(received), HIDDEN_SIZE)


def test_a_step_ends_after_a_rank_that_samples_nothing_has_written_its_kv() -> None:
    others = _Others()
    model: Any = SimpleNamespace(
        parallel=SimpleNamespace(dp=others),
        start=lambda forwards, graph_sizes: others.forwards.append(forwards),
        own=lambda ids, positions, kv, on_layer: torch.zeros(len(ids), HIDDEN_SIZE),
        config=SimpleNamespace(vocab_size=7),
    )
    own = EagerForward(model)
    lockstep = Lockstep(model, own, (), (), select_ops("reference"), block_size=4)
    prompt = list(range(12))
    request = Request(
        request_id="r",
        attempt=0,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(),
        block_ids=[0, 1, 2],
    )
    # A chunk that does not reach the end of the prompt, on the second rank.
    idle, output = lockstep.run([[], [ScheduledRequest(request, num_tokens=8)]])
    (forwards,) = others.forwards
    assert forwards[1].gathers
    assert ints_from_bytes(forwards[1].wanted_rows).tolist() == [0]
    assert others.received == [[0, 1]], "the leader waits for a row of that rank"
    assert len(idle.logits) == len(output.logits) == 0
