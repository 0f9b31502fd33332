"""One rank of a decoder with TP 4 and EP 16, its collectives through a fake process group."""

from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine.checkpoint.config import parse_model_config
from engine.collectives import CollectiveCounters, ProcessGroup
from engine.layers.layer import named_weights, pack_weights
from engine.models import CausalLM, build_model
from engine.parallel_config import MoEComm
from engine.step_plan import plan_step
from kernels.ascend.options import NpuOptions
from kernels.npu import NpuOps
from tests.npu.families import CONFIGS
from tests.npu.published import ShapeGroup, one_rank

TP_SIZE, EP_SIZE = 4, 16
NUM_SEQS = 8
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 64,
}


def fake_groups(rank: int) -> None:
    """Make this process that rank of 16."""
    if dist.is_initialized():
        if dist.get_rank() == rank:
            return
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=EP_SIZE, store=FakeStore())


def expert_parallel_model(
    name: str,
    *,
    moe_comm: MoEComm,
    num_local_experts: int,
    quantization: Any = "none",
    rank: int = 0,
    **ops: bool,
) -> CausalLM:
    """The family `name` on a rank, as the engine builds it and plans a step that is replayed.

    ops: options of NpuOps.
    """
    fake_groups(rank)
    first = rank - rank % TP_SIZE
    ranks = dist.new_group(list(range(first, first + TP_SIZE)))
    tp = ProcessGroup("tp", ranks, CollectiveCounters())
    parallel = one_rank(
        TP_SIZE,
        EP_SIZE,
        rank=rank,
        moe_comm=moe_comm,
        groups={"tp": tp},
        fused_tp=ShapeGroup(rank % TP_SIZE, TP_SIZE),
        exchange=ShapeGroup(rank, EP_SIZE),
        exchange_rows=NUM_SEQS // TP_SIZE,
    )
    rows = [NUM_SEQS] * parallel.config.dp_size
    parallel.step.become(plan_step(rows, parallel.config, 2, has_operators=True))
    key = "n_routed_experts" if name == "deepseek_v3" else "num_experts"
    num_experts = EP_SIZE * num_local_experts
    config = parse_model_config(CONFIGS[name] | _SIZES | {key: num_experts})
    model = build_model(
        config,
        NpuOps(device=torch.device("cpu"), product="A3", options=NpuOptions(**ops)),
        parallel,
    )
    for weight in named_weights(model).values():
        weight.zero_()
    pack_weights(model, quantization)
    return model
