"""What a user may say about a service, composed from the rooms' own configurations.

pdserve.yaml, --set -> config_file.load_config -> ServiceConfig -> resolve -> ServiceConfig
                                                                              |-> worker_configs
                                                                              |-> proxy_config
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len

from decoder.config import DecoderConfig
from engine.config import KVCacheDtype, Quantization, Speculation
from engine.parallel_config import ParallelConfig
from engine.worker.config import WorkerConfig
from kernels.ascend.environment import HCCLConfig
from kernels.ascend.options import NpuOptions
from kernels.cpu.cores import usable_cores
from kernels.cpu.options import CpuOptions
from kvtransfer.config import KVTransferConfig
from kvtransfer.tiers.config import TierConfig
from pdserve.models import default_served_name
from prefiller.config import PrefillerConfig
from proxy.config import ProxyConfig

DERIVED = {
    "proxy.host": "host",
    "proxy.http_port": "http_port",
    "proxy.grpc_port": "grpc_port",
    "proxy.model_path": "model",
    "proxy.served_model_names": "served_model_name",
    "proxy.max_model_len": "max_model_len",
    "proxy.controller_address": "",
    "proxy.cluster_token": "",
    "transfer.transport": "transport",
    "transfer.host": "host",
}
"""Fields of the rooms that a user states elsewhere (where) or not at all (empty)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    """Where the workers run."""

    address: Annotated[str, Len(1)] = "local"
    """local: an own Ray on this machine; auto: the cluster it belongs to; or host:port."""
    object_store_bytes: Annotated[int, Ge(80 << 20)] = 100 << 20
    """Ray's object store, with address local. Requests and KV never use it."""
    npus_per_worker: Annotated[int, Ge(0)] = 0
    """NPU resources that each worker asks Ray for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuConfig:
    """How CPUs compute."""

    activation_bits: Literal["auto", 8, 16] = "auto"
    """Of the inputs of products with weights in 4 bits: 8 is faster, 16 more exact. auto takes 8
    where a row of them has the same bits however work is split; see `settle`.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """One service. Every field may stand in pdserve.yaml."""

    service: Annotated[str, Len(1, 40)] = "pdserve"
    """Name of the service on this machine, for `down`, `status` and `scale`."""
    model: Annotated[str, Len(1)] = "smollm2-135m-instruct"
    """Packaged model, Hugging Face folder, .gguf file or hub id."""
    served_model_name: Annotated[str, Len(1)] | None = None
    """What clients call it; None takes the model's own name."""
    host: Annotated[str, Len(1)] = "127.0.0.1"
    """Address of the HTTP and gRPC APIs."""
    http_port: Annotated[int, Ge(0), Le(65535)] = 8000
    """Port of the OpenAI API; 0 picks a free one."""
    grpc_port: Annotated[int, Ge(0), Le(65535)] = 8001
    """Port of the gRPC API; 0 picks a free one."""
    insecure: bool = False
    """Allow a host that other machines reach without API keys."""
    block_size: Annotated[int, Ge(1), Le(1024)] = 32
    """Tokens per KV block."""
    max_model_len: Annotated[int, Ge(2)] | None = None
    """Context limit in tokens; None takes the model's."""
    ops: Literal["auto", "reference", "cpu", "npu"] = "auto"
    """Backend of the device operations."""
    quantization: Quantization = "auto"
    """Weights: none in float; int8, int4 rounded at load; native as the model's files have them;
    auto native on CPUs, else none.
    """
    kv_cache_dtype: KVCacheDtype = "auto"
    """KV cache: auto as the backend computes; int8 with a scale per token and head."""
    speculation: Speculation = "none"
    """Where drafts of tokens come from: none, ngram (earlier text), mtp (DeepSeek's MTP layers)."""
    num_draft_tokens: Annotated[int, Ge(1), Le(7)] = 3
    """Drafts that a decode step verifies per request, with speculation."""
    transport: Literal["auto", "memory", "mooncake", "hccl"] = "auto"
    """How KV travels from prefiller to decoder."""
    lease_s: Annotated[float, Gt(0)] = 4.0
    """A request that its proxy does not renew for so long is aborted by the workers."""
    prefiller: PrefillerConfig = field(default_factory=PrefillerConfig)
    """The prefill role."""
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    """The decode role."""
    proxy: ProxyConfig
    """The proxy; fields in DERIVED come from above."""
    transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    """The KV transfer; fields in DERIVED come from above."""
    tiers: TierConfig = field(default_factory=TierConfig)
    """Where prefix blocks are kept beyond the workers' KV caches."""
    cpu: CpuConfig = field(default_factory=CpuConfig)
    """How CPUs compute, with ops cpu."""
    npu: NpuOptions = field(default_factory=NpuOptions)
    """How NPUs compute, with ops npu."""
    hccl: HCCLConfig = field(default_factory=HCCLConfig)
    """Communication between NPUs, with ops npu."""
    ray: RayConfig = field(default_factory=RayConfig)
    """Placement."""

    @property
    def is_local(self) -> bool:
        """Whether everything runs on this machine, on loopback."""
        return self.ray.address == "local"

    @property
    def needs_key(self) -> bool:
        """Whether clients have to show an API key."""
        return bool(self.proxy.api_keys_file or self.proxy.api_key_hashes)

    @property
    def public_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or default_served_name(self.model)


def resolve(config: ServiceConfig, num_cores: int | None = None) -> ServiceConfig:
    """Fill in what was left open: names, threads."""
    cores = num_cores or usable_cores()
    ranks = sum(role.replicas * role.num_ranks for role in (config.prefiller, config.decoder))
    num_threads = max(1, cores // ranks)
    prefiller = replace(config.prefiller, num_threads=config.prefiller.num_threads or num_threads)
    decoder = replace(config.decoder, num_threads=config.decoder.num_threads or num_threads)
    return replace(
        config, served_model_name=config.public_name, prefiller=prefiller, decoder=decoder
    )


def proxy_config(
    config: ServiceConfig, *, model_path: str, controller_address: str, token: str
) -> ProxyConfig:
    """What the proxy process is told."""
    return replace(
        config.proxy,
        model_path=model_path,
        served_model_names=(config.public_name,),
        controller_address=controller_address,
        cluster_token=token,
    )


def settle(config: ServiceConfig, *, is_latent: bool) -> ServiceConfig:
    """Fill in what follows from the model; is_latent: its attention.

    `cpu.activation_bits: auto` is 8, but 16 where sums come in an order of their own, over ranks,
    or in another form, latent attention's. What these differ by is too little to move a token,
    unless it is rounded to 8 bits: then prefillers and decoders that are split or chunk in other
    ways would not give the same tokens. Where no weights can have 4 bits it is 16, and no matter.
    """
    if config.cpu.activation_bits != "auto":
        return config
    sizes = [(role.tp, role.ep) for role in (config.prefiller, config.decoder)]
    is_split = any(max(size) > 1 for size in sizes) or config.prefiller.cp > 1
    has_use = not why_8_bits_are_no_use(config)
    bits: Literal[8, 16] = 8 if has_use and not is_latent and not is_split else 16
    return replace(config, cpu=CpuConfig(activation_bits=bits))


def why_8_bits_are_no_use(config: ServiceConfig) -> list[str]:
    """Settings with which no activation is rounded to 8 bits, and what to set instead."""
    found = []
    if config.ops not in ("auto", "cpu"):
        found.append(f"ops {config.ops}, use auto or cpu")
    if config.quantization in ("none", "int8"):
        found.append(f"quantization {config.quantization}, use int4, native or auto")
    return found


def worker_configs(
    config: ServiceConfig, *, model_path: str, token: str, cores_folder: str = ""
) -> tuple[WorkerConfig, WorkerConfig]:
    """What a prefiller and a decoder are told; engine_id and host are filled in at their start.

    config: settled. `cores_folder` is where workers that share a machine find each other.
    """
    assert config.cpu.activation_bits != "auto", "to be settled first"
    cpu = CpuOptions(activation_bits=config.cpu.activation_bits)
    num_drafts = 0 if config.speculation == "none" else config.num_draft_tokens

    def common(role: PrefillerConfig | DecoderConfig, num_batched: int) -> dict[str, Any]:
        return {
            "engine_id": "",
            "model_path": model_path,
            "model_name": config.public_name,
            "cluster_token": token,
            "block_size": config.block_size,
            "kv_cache_bytes": role.kv_cache_bytes,
            "num_blocks": role.num_blocks,
            "max_model_len": config.max_model_len,
            "max_num_seqs": role.max_num_seqs,
            "max_num_batched_tokens": num_batched,
            "max_num_waiting": role.max_num_waiting,
            "num_threads": role.num_threads or 1,
            "cores_folder": cores_folder,
            "ops_backend": config.ops,
            "cpu": cpu,
            "npu": config.npu,
            "hccl": config.hccl,
            "quantization": config.quantization,
            "kv_cache_dtype": config.kv_cache_dtype,
            "speculation": config.speculation,
            "num_draft_tokens": num_drafts,
            "lease_s": config.lease_s,
            "transfer": config.transfer,
            "tiers": config.tiers,
            "parallel": _parallel_config(role),
        }

    prefiller, decoder = config.prefiller, config.decoder
    num_decode_tokens = decoder.max_num_seqs * (1 + num_drafts)
    return (
        WorkerConfig(**common(prefiller, prefiller.max_num_batched_tokens)),
        WorkerConfig(
            **common(decoder, num_decode_tokens + decoder.max_prefill_tokens),
            max_prefill_tokens=decoder.max_prefill_tokens,
            graph_mode=decoder.graph_mode,
            async_scheduling=decoder.async_scheduling,
        ),
    )


def _parallel_config(role: PrefillerConfig | DecoderConfig) -> ParallelConfig:
    spread: dict[str, Any] = {}
    if isinstance(role, PrefillerConfig):
        spread = {
            "cp_size": role.cp,
            "cp_min_tokens": role.cp_min_tokens,
            "pp_size": role.pp,
            "pp_layers": role.pp_layers,
        }
    return ParallelConfig(
        tp_size=role.tp,
        dp_size=role.dp,
        ep_size=role.ep,
        moe_comm=role.moe_comm,
        moe_exchange=role.moe_exchange,
        eplb=role.eplb,
        layer_sharding=role.layer_sharding,
        shared_experts=role.shared_experts,
        shared_experts_beside=role.shared_experts_beside,
        sequence_parallel=role.sequence_parallel,
        **spread,
        dual_batch_overlap=role.dual_batch_overlap,
        dual_batch_min_rows=role.dual_batch_min_rows,
    )


def user_values(config: ServiceConfig) -> dict[str, Any]:
    """Everything a pdserve.yaml may say, as plain values; loading them gives an equal config."""
    values = asdict(config)
    for path in DERIVED:
        section, name = path.split(".")
        del values[section][name]
    for section in values.values():
        if isinstance(section, dict):
            section |= {name: list(v) for name, v in section.items() if isinstance(v, tuple)}
    return values
