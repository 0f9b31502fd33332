"""Experts over ranks, through the NPU's code and simulated dispatch and combine, give the tokens of
one rank of the reference.
"""

from typing import Any

import pytest
import torch

from engine.checkpoint.config import parse_model_config
from engine.models import build_model
from engine.parallel_config import MoEComm, ParallelConfig
from engine.worker.config import WorkerConfig
from kernels.ascend.options import NpuOptions
from kernels.npu import NpuOps
from kernels.reference import ReferenceOps
from tests.npu.families import COMMON, CONFIGS, family, generate
from tests.npu.rank_models import LENGTHS, SPARSE, RankGroups, rank_model
from tests.npu.simulated_experts import Network
from tests.npu.tokens import npu_ops, prompts

NUM_TOKENS = 33  # one by the prefill, 32 by decode steps


def decode(
    name: str,
    network: Network,
    num_tokens: int = NUM_TOKENS,
    quantization: Any = "none",
    **sizes: Any,
) -> list[list[list[int]]]:
    """The tokens of every rank, which has the prompts of its data-parallel rank."""
    worker = WorkerConfig(
        engine_id="",
        model_path="",
        model_name="",
        parallel=ParallelConfig(ep_size=network.size, **sizes),
        max_num_seqs=4,
        max_num_batched_tokens=160,
    )
    groups = RankGroups(network, worker.parallel.tp_size)

    def job(rank: int) -> list[list[int]]:
        config = ParallelConfig(ep_size=network.size, **sizes, rank=rank)
        ops = NpuOps(
            device=torch.device("cpu"),
            dtype=torch.float32,
            product="A2",
            buffer_mib=200,
            options=NpuOptions(quantize_activations=quantization == "int8"),
        )
        model = rank_model(name, groups.of(config, worker.exchange_rows), ops, quantization)
        return generate(model, prompts(*LENGTHS[config.dp_rank]), num_tokens)[0]

    return network.run(job)


@pytest.mark.parametrize("moe_comm", ["zero_redundancy", "allreduce"])
@pytest.mark.parametrize("name", SPARSE)
def test_ranks_with_the_same_requests_give_the_tokens_of_the_reference(
    name: str, moe_comm: MoEComm
) -> None:
    expected, _ = generate(family(name, ReferenceOps()), prompts(*LENGTHS[0]), NUM_TOKENS)
    with Network(2) as network:
        found = decode(name, network, tp_size=2, moe_comm=moe_comm)
    assert found == [expected, expected]
    # The prompts are more rows than the operators were checked for: these went by all-to-all.
    num_steps = NUM_TOKENS - 1
    assert network.calls == ["dispatch", "combine"] * SPARSE[name] * num_steps


@pytest.mark.parametrize("name", SPARSE)
def test_ranks_with_requests_of_their_own_give_the_tokens_of_the_reference(name: str) -> None:
    model = family(name, ReferenceOps())
    expected = [generate(model, prompts(*lengths), NUM_TOKENS)[0] for lengths in LENGTHS]
    with Network(4) as network:
        found = decode(name, network, tp_size=2, dp_size=2)
    assert found == [expected[0], expected[0], expected[1], expected[1]]
    # One rank's step may be a prompt's while another's is not: none may leave the operators.
    assert network.calls == ["dispatch", "combine"] * SPARSE[name] * NUM_TOKENS


@pytest.mark.parametrize("name", SPARSE)
def test_rows_that_travel_in_int8_give_the_tokens_of_one_rank(name: str) -> None:
    model = family(name, npu_ops(quantize_activations=True), "int8")
    expected = [generate(model, prompts(*lengths), 9)[0] for lengths in LENGTHS]
    with Network(2) as network:
        found = decode(name, network, 9, "int8", dp_size=2)
    assert found == expected
    assert set(network.calls) == {"dispatch in int8", "combine"}


def test_a_buffer_that_is_too_small_is_refused_when_the_model_is_built() -> None:
    config = ParallelConfig(tp_size=2, ep_size=2)
    with Network(2) as network:
        parallel = RankGroups(network, 2).of(config, exchange_rows=256)
        ops = NpuOps(device=torch.device("cpu"), product="A2", buffer_mib=1)
        model_config = parse_model_config(COMMON | CONFIGS["qwen3_moe"])
        with pytest.raises(
            ValueError,
            match=r"experts over 2 ranks: HCCL_BUFFSIZE is 1 MiB, .* needs 5 \(max_num_seqs of",
        ):
            build_model(model_config, ops, parallel)
