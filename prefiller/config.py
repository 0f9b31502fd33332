"""What a user may say about the prefillers."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le

from engine.parallel_config import EplbConfig, MoEComm, MoEExchange, SharedExperts


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillerConfig:
    """Size and bounds of the prefill role."""

    replicas: Annotated[int, Ge(0), Le(1024)] = 1
    """Prefillers at start; `pdserve scale` changes the number."""
    tp: Annotated[int, Ge(1), Le(64)] = 1
    """Processes that share every layer of one prefiller; divides the model's heads and widths."""
    dp: Annotated[int, Ge(1), Le(1024)] = 1
    """Groups of tp processes in one prefiller, each with requests and a KV cache of its own."""
    cp: Annotated[int, Ge(1), Le(64)] = 1
    """Groups of tp processes in one prefiller that share the tokens of every prompt; dp is 1."""
    cp_min_tokens: Annotated[int, Ge(1), Le(1 << 20)] = 64
    """With cp above 1: prompts, or chunks, of fewer tokens are computed whole by one group."""
    ep: Annotated[int, Ge(1), Le(1024)] = 1
    """Of all these, how many share the experts; 1 splits every expert over tp instead."""
    pp: Annotated[int, Ge(1), Le(64)] = 1
    """Stages of tp processes, each with some of the layers: chunks of prompts go through them."""
    pp_layers: tuple[Annotated[int, Ge(1)], ...] = ()
    """Layers of each stage; empty: as many in each, or one more in the last ones."""
    moe_comm: MoEComm = "zero_redundancy"
    """How tokens get to the experts and back, with ep above 1."""
    moe_exchange: MoEExchange = "auto"
    """What carries them between ranks; auto decides at every step, by the numbers of rows."""
    eplb: EplbConfig = field(default_factory=EplbConfig)
    """How the experts' load is balanced over these ranks."""
    shared_experts: SharedExperts = "replicated"
    """Experts of every token, with ep above 1: whole on every rank, or split over tp."""
    shared_experts_beside: bool = False
    """Compute them, replicated, on a second thread beside dispatch and combine."""
    sequence_parallel: bool = False
    """Split the rows of norms and residual over tp in dense models too."""
    dual_batch_overlap: bool = False
    """Compute steps in two halves, one while the other waits in collectives; with tp or ep."""
    dual_batch_min_rows: Annotated[int, Ge(1)] = 32
    """Steps in which no group of tp processes has as many rows are computed as one."""
    layer_sharding: tuple[str, ...] = ()
    """Linears, such as o_proj, that one rank holds for each layer and sends the others ahead."""
    num_threads: Annotated[int, Ge(1), Le(1024)] | None = None
    """Compute threads of one rank; None shares the machine's cores over all ranks."""
    kv_cache_bytes: Annotated[int, Ge(1 << 20)] = 384 << 20
    """Memory of the KV cache of one rank."""
    num_blocks: Annotated[int, Ge(1)] | None = None
    """Blocks of the KV cache of one rank, instead of kv_cache_bytes."""
    max_num_seqs: Annotated[int, Ge(1), Le(65536)] = 16
    """Prompts computed at once, by each group of tp processes."""
    max_num_batched_tokens: Annotated[int, Ge(1), Le(1 << 20)] = 512
    """Tokens of one step of each group of tp processes, of all groups with cp: the chunk of a long
    prompt.
    """
    max_num_waiting: Annotated[int, Ge(1), Le(1 << 20)] = 1024
    """Bound of the queue."""

    @property
    def num_ranks(self) -> int:
        """Processes of one prefiller."""
        return self.tp * self.dp * self.cp * self.pp
