"""One rank of a decoder with TP 4 and EP 16, its collectives through a fake process group."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine.collectives import CollectiveCounters, ProcessGroup
from engine.config import ModelConfig
from engine.layers.layer import named_weights, pack_weights
from engine.layers.moe import MoE
from engine.models import CausalLM, build_model
from engine.models.config import parse_model_config
from engine.parallel import Parallel
from engine.parallel_config import MoEComm, ParallelConfig
from kernels.ascend.experts import ExpertGroup, SharedExpert, run_experts
from kernels.ascend.hccl import ExpertExchange
from kernels.npu import NpuOps
from tests.npu.families import CONFIGS

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


class ExpertParallelMoE(nn.Module):
    """A sparse block whose experts are spread over the ranks; rows as they are between blocks."""

    def __init__(self, config: ModelConfig, ops: NpuOps, parallel: Parallel) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        num_local = moe.num_experts // EP_SIZE
        # This rank's experts as if they were all: only shapes matter, the router keeps its own.
        self.block = MoE(
            config.hidden_size, replace(moe, num_experts=num_local), ops=ops, parallel=Parallel()
        )
        router = MoE(config.hidden_size, moe, ops=ops, parallel=Parallel())
        self.block.gate, self.block.correction = router.gate, router.correction
        self.comm = parallel.config.moe_comm
        self.tp = parallel.tp
        self.ops = ops
        self.group = ExpertGroup(
            communicator="ep",
            rank=0,
            sizes=ExpertExchange(
                product="A3",
                ep_size=EP_SIZE,
                num_experts=moe.num_experts,
                num_experts_per_tok=moe.num_experts_per_tok,
                hidden_size=config.hidden_size,
                max_tokens=NUM_SEQS // TP_SIZE,
            ),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.comm == "zero_redundancy":
            return self.experts(x)
        rows = NUM_SEQS // TP_SIZE
        out = self.experts(x[self.tp.rank * rows : (self.tp.rank + 1) * rows])
        return self.tp.all_gather(out)

    def experts(self, x: Tensor) -> Tensor:
        weights, ids = self.block._route(x)
        shared = self.block.shared_experts
        halves = None
        if shared is not None:
            halves = SharedExpert(
                lambda x: self.ops.silu_mul(shared.gate_up_proj(x)), shared.down_proj
            )
        return run_experts(
            x,
            ids.int(),
            weights,
            self.group,
            self.products,
            shared=halves,
            is_multi_stream=self.ops.is_multi_stream,
        )

    def products(self, rows: Tensor, group_sizes: Tensor) -> Tensor:
        gate_up, down = self.block.experts._gate_up, self.block.experts._down
        assert gate_up is not None
        assert down is not None
        return down(self.ops.silu_mul(gate_up(rows, group_sizes)), group_sizes)


def fake_groups() -> None:
    """Make this process rank 0 of 16; a second call does nothing."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=EP_SIZE, store=FakeStore())


def expert_parallel_model(
    name: str, *, moe_comm: MoEComm, num_local_experts: int, is_multi_stream: bool = False
) -> CausalLM:
    """The family `name` on rank 0."""
    fake_groups()
    tp = ProcessGroup("tp", dist.new_group(list(range(TP_SIZE))), CollectiveCounters())
    parallel = Parallel(
        config=ParallelConfig(
            tp_size=TP_SIZE, dp_size=EP_SIZE // TP_SIZE, ep_size=EP_SIZE, moe_comm=moe_comm
        ),
        tp=tp,
    )
    key = "n_routed_experts" if name == "deepseek_v3" else "num_experts"
    num_experts = EP_SIZE * num_local_experts
    config = parse_model_config(CONFIGS[name] | _SIZES | {key: num_experts})
    assert config.moe is not None
    ops = NpuOps(device=torch.device("cpu"), is_multi_stream=is_multi_stream)
    model = build_model(config, ops, parallel)
    for layer_idx in config.moe.layers:
        model.model.layers[layer_idx].mlp = ExpertParallelMoE(config, ops, parallel)
    for weight in named_weights(model).values():
        weight.zero_()
    pack_weights(model)
    return model
