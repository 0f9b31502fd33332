"""Everything one worker process is told at its start."""

import json
from dataclasses import asdict, dataclass, field

from engine.config import AsyncScheduling, KVCacheDtype, Quantization, Speculation
from engine.parallel_config import ParallelConfig
from kernels.ascend.environment import HCCLConfig
from kernels.ascend.options import NpuOptions
from kernels.cpu.options import CpuOptions
from kvtransfer.config import KVTransferConfig
from kvtransfer.tiers.config import TierConfig

_NOT_IN_GRAPHS = frozenset(
    {
        "engine_id",
        "async_scheduling",
        "model_name",
        "host",
        "cluster_token",
        "max_num_waiting",
        "num_threads",
        "max_threads",
        "cores_folder",
        "rank_timeout_s",
        "hccl",
        "lease_s",
        "transfer",
        "tiers",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Derived from the service's configuration by its launcher; the same for both roles."""

    engine_id: str
    """Stable over restarts: role and index, such as prefiller-0."""
    model_path: str
    """Folder of a Hugging Face model, or a .gguf file."""
    model_name: str
    """What clients call it; part of the salt of block hashes."""
    host: str = "127.0.0.1"
    """Address to bind and to publish."""
    cluster_token: str = ""
    """Secret that every peer must send; empty means none."""
    block_size: int = 32
    """Tokens per KV block."""
    kv_cache_bytes: int = 512 << 20
    """Memory of the KV cache, unless num_blocks is given."""
    num_blocks: int | None = None
    """Blocks of the KV cache."""
    max_model_len: int | None = None
    """Tokens one request may have; None takes the model's. Never more than the KV cache holds."""
    max_num_seqs: int = 64
    """Requests that run at once."""
    max_num_batched_tokens: int = 512
    """Tokens of one step."""
    max_prefill_tokens: int | None = None
    """Of these, tokens of requests that do not decode yet; None means all."""
    max_num_waiting: int = 1024
    """Bound of the queue."""
    num_threads: int = 1
    """Compute threads that are this worker's own."""
    max_threads: int | None = None
    """Bound of a step that borrows idle workers' threads; None means the cores of the machine."""
    cores_folder: str = ""
    """Where the workers of a host find each other to lend idle cores; empty means never."""
    ops_backend: str = "auto"
    """auto, reference, cpu or npu."""
    graph_mode: str = "auto"
    """How a decoder runs its batches; see decoder.graph."""
    async_scheduling: AsyncScheduling = "auto"
    """Whether a decoder prepares its next step while one runs; see engine.ahead."""
    quantization: Quantization = "none"
    """Of the weights, at load. Peers must agree: their KV would differ."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Of the KV cache. Peers must agree."""
    speculation: Speculation = "none"
    """Where drafts come from. Peers must agree on mtp: its layer has a KV cache of its own."""
    num_draft_tokens: int = 0
    """Drafts of a request in a step; 0 without speculation."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the engine is spread over ranks, and which one this process is."""
    rank_timeout_s: float = 30.0
    """A rank that has not ended a step within this time takes its engine down."""
    cpu: CpuOptions = field(default_factory=CpuOptions)
    """How CPUs compute. Peers must agree: their KV would differ."""
    npu: NpuOptions = field(default_factory=NpuOptions)
    """How NPUs compute."""
    hccl: HCCLConfig = field(default_factory=HCCLConfig)
    """Of NPUs; whoever starts this worker's processes has set it in their environment."""
    lease_s: float = 4.0
    """A request that its proxy does not renew for this long is aborted."""
    transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    """Settings of the KV transfer."""
    tiers: TierConfig = field(default_factory=TierConfig)
    """Where prefix blocks are kept beyond the KV cache."""

    @property
    def exchange_rows(self) -> int:
        """Most rows that a rank hands to operators that reach experts on other ranks.

        Ranks that share experts and have the same requests use them for decode steps; longer steps,
        which all of them see at once, go by all-to-all. Ranks with requests of their own have to
        use them in any step, since another rank's may be a decode step. Those that share
        the rows of a prefill have more than the operators take.
        """
        parallel = self.parallel
        if parallel.ep_size == 1 or parallel.cp_size > 1:
            return 0
        num_tokens = self.max_num_seqs * (1 + self.num_draft_tokens)
        if not parallel.has_even_rows:
            num_tokens = max(num_tokens, self.max_num_batched_tokens)
        return -(-num_tokens // parallel.tp_size)

    @property
    def graph_key(self) -> str:
        """Equal for workers whose decode steps are computed alike, the model's files being equal.

        A graph compiled for one is right for another of the same key and rank: sizes of the cache
        and of ranks, how experts are reached and how weights are held are constants in it.
        """
        values = {k: v for k, v in asdict(self).items() if k not in _NOT_IN_GRAPHS}
        return json.dumps(values, sort_keys=True)

    def to_json(self) -> str:
        """The configuration as text, for the actor's constructor."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "WorkerConfig":
        """Inverse of `to_json`."""
        values = json.loads(text)
        values["cpu"] = CpuOptions(**values["cpu"])
        values["npu"] = NpuOptions(**values["npu"])
        values["hccl"] = HCCLConfig(**values["hccl"])
        values["transfer"] = KVTransferConfig(**values["transfer"])
        values["tiers"] = TierConfig(**values["tiers"])
        values["parallel"] = ParallelConfig.from_values(values["parallel"])
        return cls(**values)
