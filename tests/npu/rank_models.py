"""Ranks of a model that shares experts, in threads."""

from typing import Any

from engine.checkpoint.config import parse_model_config
from engine.layers.layer import pack_weights, weighted_layers
from engine.models import CausalLM, build_model
from engine.parallel import Parallel
from engine.parallel_config import ParallelConfig
from kernels.npu import NpuOps
from kernels.reference import ReferenceOps
from tests.npu.families import COMMON, CONFIGS, fill
from tests.npu.simulated_experts import Network, ThreadGroup

SPARSE = {"qwen3_moe": 2, "deepseek_v3": 1}


# Of the data-parallel ranks: other numbers of sequences, and of tokens.
LENGTHS = ((5, 126, 1, 17), (40,))


class RankGroups:
    """The meetings of the groups of an engine's ranks."""

    def __init__(self, network: Network, tp_size: int) -> None:
        self.tp_size = tp_size
        self.network = network
        self.tp = [network.meeting(tp_size) for _ in range(network.size // tp_size)]
        self.ep = network.meeting(network.size)

    def of(self, config: ParallelConfig, exchange_rows: int) -> Parallel:
        tp, ep = config.tp_rank, config.ep_rank
        return Parallel(
            config=config,
            tp=ThreadGroup(self.tp[config.dp_rank], tp, self.tp_size),
            ep=ThreadGroup(self.ep, ep, self.network.size),
            exchange=self.network.exchange(ep),
            exchange_rows=exchange_rows,
        )


def rank_model(name: str, parallel: Parallel, ops: NpuOps, quantization: Any) -> CausalLM:
    """One rank's part of what `family` makes."""
    config = parse_model_config(COMMON | CONFIGS[name])
    whole = fill(build_model(config, ReferenceOps()))
    model = build_model(config, ops, parallel)
    for prefix, layer in weighted_layers(model):
        shards = layer.shards()
        for weight_name, weight in layer.weights():
            values = whole[prefix + weight_name]
            if shard := shards.get(weight_name):
                values = values.narrow(shard.dim, shard.span.start, len(shard.span))
            weight.copy_(values)
    pack_weights(model, quantization)
    return model
