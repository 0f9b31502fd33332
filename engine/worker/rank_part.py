"""What a rank loads of an engine: its part of the model and of the KV cache; and, in the leader,
the other ranks.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import ModelConfig
from engine.fit import with_draft_layers
from engine.kv_layout import kv_layout, max_block_bytes
from engine.models import build_model
from engine.models.decoder import DecoderForCausalLM
from engine.parallel import Parallel
from engine.parallel_config import ParallelConfig
from engine.rank_adapters import RankAdapters
from engine.runner import ForwardMemory
from engine.weights import load_model_config, load_weights
from engine.worker.config import WorkerConfig
from engine.worker.leading_model import LeadingModel
from engine.worker.process import Report, Start
from engine.worker.ranks import Ranks
from engine.worker.weights_name import quantization_of, weights_name
from kernels.ops import Ops, select_ops
from kvtransfer.layout import KVLayout
from kvtransfer.registration import KVMemory
from protos import worker_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank holds of an engine."""

    model_config: ModelConfig
    ops: Ops
    model: DecoderForCausalLM
    memory: KVMemory
    num_blocks: int
    """Of the pool; the memory has the backend's spare ones besides."""
    parallel: Parallel
    adapters: RankAdapters | None
    """None: rows of this split of the model are not those of the batch."""

    def max_model_len(self, config: WorkerConfig) -> int:
        """Tokens of one request."""
        longest = self.model_config.max_position_embeddings
        return min(config.max_model_len or longest, longest, self.num_blocks * config.block_size)

    def forward_memory(self, config: WorkerConfig) -> ForwardMemory:
        """What passes of this rank may touch."""
        max_blocks = -(-self.max_model_len(config) // config.block_size)
        return ForwardMemory(
            *self.memory.paged,
            config.max_num_seqs,
            max_blocks,
            self.parallel,
            num_draft_tokens=config.num_draft_tokens,
        )


def open_ops(config: WorkerConfig, report: Report) -> Ops:
    """The operations that this process computes with; its calling thread may use their device.

    Raises: RuntimeError: they cannot be had here; says why.
    """
    report("building kernels", 0.0)
    ops = select_ops(config.ops_backend, config.npu, config.cpu)
    ops.bind_thread()
    return ops


def build_part(config: WorkerConfig, ops: Ops, parallel: Parallel, report: Report) -> RankPart:
    """Load this rank's part of the model and allocate its part of the cache.

    Raises: ValueError: the model or a limit does not fit; says which. OSError: unreadable files.
    """
    model_config = with_draft_layers(
        load_model_config(Path(config.model_path)), config.speculation, config.num_draft_tokens
    )
    cache_dtype = ops.cache_dtype
    if config.kv_cache_dtype == "int8":
        ops.check_int8_cache(is_latent=model_config.mla is not None)
        cache_dtype = "int8"
    layout = replace(
        kv_layout(model_config, config.block_size, parallel.config, cache_dtype),
        weights=weights_name(config.quantization, ops),
    )
    num_bytes = max_block_bytes(model_config, config.block_size, parallel.config, cache_dtype)
    num_blocks = config.num_blocks or config.kv_cache_bytes // num_bytes
    if num_blocks < 1:
        raise ValueError(
            f"kv_cache_bytes is {config.kv_cache_bytes}, one block takes {num_bytes} bytes"
        )
    parallel = replace(parallel, exchange_rows=config.exchange_rows)
    model = _load_model(config, model_config, ops, parallel, report)
    memory = _allocate(config, layout, num_blocks + ops.num_spare_blocks, ops)
    adapters = RankAdapters(model) if _takes_adapters(parallel.config) else None
    return RankPart(model_config, ops, model, memory, num_blocks, parallel, adapters)


def _takes_adapters(parallel: ParallelConfig) -> bool:
    sizes = (parallel.dp_size, parallel.cp_size, parallel.pp_size, parallel.ep_size)
    is_split = parallel.sequence_parallel or parallel.dual_batch_overlap
    return set(sizes) == {1} and not is_split


def _allocate(config: WorkerConfig, layout: KVLayout, num_blocks: int, ops: Ops) -> KVMemory:
    if ops.device.type == "cpu":
        return KVMemory.allocate(layout, num_blocks)
    if config.transfer.checksum != "off":
        raise ValueError(
            f"transfer.checksum is {config.transfer.checksum}, and the host cannot read memory of "
            f"{ops.device}: set it to off"
        )
    return KVMemory.on_device(layout, num_blocks, ops.device, ops.bind_thread, ops.mark)


@dataclass(frozen=True, slots=True)
class Leading:
    """What the leader of several ranks has besides its part."""

    ranks: Ranks
    """The others."""
    model: LeadingModel
    """What it runs in the place of its part of the model."""
    follower_addresses: Sequence[str]
    """Of their KVLink services, by rank; a prefiller's have none."""


def build_parts(
    start: Start, role: worker_pb2.Role.ValueType, follower: str
) -> tuple[RankPart, Leading | None]:
    """Load all ranks at the same time; follower: the module that the others run."""
    ops = open_ops(start.config, start.report)
    if start.config.parallel.world_size == 1:
        return build_part(start.config, ops, Parallel(), start.report), None
    start.report("starting ranks", 0.0)
    ranks = Ranks(start.config, role, start.incarnation, start.launcher, start.on_lost, follower)
    part = None
    try:
        parallel = ranks.join(ops.collectives)
        part = build_part(start.config, ops, parallel, start.report)
        addresses = ranks.wait_ready()
    except BaseException:
        ranks.close()
        if part is not None:
            part.memory.close()
        raise
    return part, Leading(ranks, LeadingModel(part.model, parallel, ranks, part.adapters), addresses)


def _load_model(
    config: WorkerConfig, model_config: ModelConfig, ops: Ops, parallel: Parallel, report: Report
) -> DecoderForCausalLM:
    model = build_model(model_config, ops, parallel)
    report("loading weights", 0.0)

    def progress(done: int, total: int) -> None:
        report("loading weights", done / max(total, 1))

    quantization = quantization_of(config.quantization, ops)
    load_weights(Path(config.model_path), model, progress, quantization=quantization)
    if sharded := model.sharded_bytes().whole:
        held = model.sharded_bytes().held
        _log.info(
            "layer sharding: rank %d holds %.1f of %.1f MiB of %s",
            *(config.parallel.rank, held / (1 << 20), sharded / (1 << 20)),
            ", ".join(config.parallel.layer_sharding),
        )
    return model
