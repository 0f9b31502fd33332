"""Ranks that share experts replay graphs of the same size together, rows of padding staying where
they are; and their graphs are the same, one collective after the other.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoder.graph import GraphRunner
from decoder.graph_npu import AclGraphBackend, DecodeStep, settings_of, step_arguments
from engine.batch import Batch, BatchBuilder
from engine.collectives import SingleGroup
from engine.parallel_config import ParallelConfig
from engine.runner import ForwardMemory
from engine.scheduler_output import ScheduledRequest
from engine.step_plan import plan_step
from kernels.npu import NpuOps
from kernels.reference import ReferenceOps
from tests.npu.decode_step import static_batch
from tests.npu.expert_parallel import NUM_SEQS, expert_parallel_model
from tests.npu.fake_npu import FakeNpu
from tests.npu.families import BLOCK_SIZE, caches, family, generate, make_request
from tests.npu.ge import GEGraph, ge_graph
from tests.npu.rank_models import LENGTHS, SPARSE, RankGroups, rank_model
from tests.npu.simulated_experts import Network, ThreadGroup
from tests.npu.tokens import prompts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # TorchAir's own

NUM_TOKENS = (9, 4)
"""Of each rank's sequences; from then on it has a dummy row."""


class FourRows(AclGraphBackend):
    def batch_sizes(self, max_num_rows: int) -> Sequence[int]:
        return (4,)


def decode(rank: int, name: str, groups: RankGroups, start: Any) -> tuple[list[list[int]], int]:
    """Tokens of this rank, and how many steps were replayed; data-parallel ranks in lockstep."""
    config = ParallelConfig(dp_size=2, ep_size=2, rank=rank)
    parallel = groups.of(config, exchange_rows=160)
    parallel = replace(parallel, tp=SingleGroup(), start=ThreadGroup(start, rank, 2))
    ops = NpuOps(device=torch.device("cpu"), dtype=torch.float32, product="A2", buffer_mib=200)
    model: Any = rank_model(name, parallel, ops, "none")
    made = caches(model, num_blocks=12)
    backend = FourRows(ops, npu=FakeNpu(), parallel=parallel)
    graphs = GraphRunner(model, ForwardMemory(made.k, made.v, 4, 2, parallel), backend)
    graphs.capture(lambda phase, progress: None)
    builder = BatchBuilder(made.k, made.v, BLOCK_SIZE)
    requests = [make_request(i, prompt) for i, prompt in enumerate(prompts(*LENGTHS[rank]))]
    for i, request in enumerate(requests):
        request.block_ids += [3 * i, 3 * i + 1]
    for step in range(max(NUM_TOKENS)):
        going = requests if step < NUM_TOKENS[rank] else []
        scheduled = [ScheduledRequest(r, r.num_tokens - r.num_computed_tokens) for r in going]
        batch = builder.build(scheduled) if scheduled else builder.dummy()
        if step:
            hidden = graphs.replay(batch, graphs.graph_size([batch]))
        else:
            rows = [sum(lengths) for lengths in LENGTHS]
            parallel.step.become(plan_step(rows, config, 2, has_operators=True))
            hidden = graphs(batch)
        if not going:
            continue
        last = batch.kv.cu_seqlens_q[1:].long() - 1
        logits = model.logits(hidden.index_select(0, last))
        for request, token_id in zip(going, logits.argmax(-1).tolist(), strict=True):
            request.num_computed_tokens = request.num_tokens
            request.token_ids.append(token_id)
    tokens = [request.token_ids[request.num_prompt_tokens :] for request in requests]
    return tokens, graphs.stats.num_replays


@pytest.mark.parametrize("name", SPARSE)
def test_replays_of_two_ranks_give_the_tokens_of_the_reference_and_send_no_padding(
    name: str,
) -> None:
    model = family(name, ReferenceOps())
    expected = [
        generate(model, prompts(*lengths), count)[0]
        for lengths, count in zip(LENGTHS, NUM_TOKENS, strict=True)
    ]
    with Network(2) as network:
        groups, start = RankGroups(network, 1), network.meeting(2)
        found = network.run(lambda rank: decode(rank, name, groups, start))
        num_rows = network.num_rows_sent
    num_replays = max(NUM_TOKENS) - 1
    assert found == [(tokens, num_replays) for tokens in expected]
    # A capture runs rows of padding. The prompts of ranks that differ in rows travel whole.
    real = sum(map(sum, LENGTHS)) + 4 * (NUM_TOKENS[0] - 1) + NUM_TOKENS[1] - 1
    assert num_rows == SPARSE[name] * real


def followed_graph(name: str, rank: int) -> GEGraph:
    """What this rank compiles and replays."""
    model = expert_parallel_model(name, moe_comm="zero_redundancy", num_local_experts=1, rank=rank)
    kv = static_batch(model, NUM_SEQS, 1)
    ids = torch.zeros(NUM_SEQS, dtype=torch.int32)
    step = DecodeStep(model)
    arguments = step_arguments(Batch(ids, ids.clone(), kv, sample_rows=ids[:0]))
    return ge_graph(step.method(NUM_SEQS), *arguments, config=settings_of(step).config())


@pytest.mark.parametrize("name", SPARSE)
def test_leader_and_follower_replay_the_same_nodes_in_the_same_order(name: str) -> None:
    leader, follower = (
        [node.op for node in followed_graph(name, r).nodes.values()] for r in (0, 5)
    )
    assert leader == follower
    assert {"HcomReduceScatter", "HcomAllGather", "MoeDistributeDispatchV2"} <= set(leader)
