"""Whether a model goes with the ranks that an engine is spread over, from its configuration alone.

Needs no torch: whoever starts a service asks before anything runs. Building the model checks the
same again, and more.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from engine.config import ModelConfig, Speculation
from engine.errors import UnsupportedModel
from engine.expert_files import read_placements
from engine.expert_placement import ExpertPlacement
from engine.expert_planner import check_slots
from engine.parallel_config import ParallelConfig
from engine.split import Rank, split_evenly, split_kv_heads
from engine.stages import split_layers

_MLP_LINEARS = frozenset({"gate_up_proj", "gate_proj", "up_proj", "down_proj"})
_SPLIT_LINEARS = frozenset({"qkv_proj", "q_proj", "k_proj", "v_proj", "q_b_proj", "o_proj"})


def with_draft_layers(
    model: ModelConfig, speculation: Speculation, num_draft_tokens: int
) -> ModelConfig:
    """The model with as many of its MTP layers in use as there are drafts.

    Raises: UnsupportedModel: `speculation` is mtp, and it has none.
    """
    if speculation != "mtp":
        return model
    if not model.num_mtp_layers:
        raise UnsupportedModel(
            "speculation is mtp, but the model has no MTP layer: use ngram or none"
        )
    num_layers = min(model.num_mtp_layers, max(num_draft_tokens, 1))
    return replace(model, num_draft_layers=num_layers)


def rank_problems(
    model: ModelConfig, parallel: ParallelConfig, *, reads_files: bool = True
) -> dict[str, str]:
    """Why the model cannot be spread like this, by the setting that asks for it.

    reads_files: files that the configuration names are on this machine, and are looked at.
    """
    checks: dict[str, Callable[[], object]] = {
        "tp": lambda: _check_widths(model, parallel),
        "pp": lambda: split_layers(model.num_layers, parallel.pp_size, parallel.pp_layers),
        "ep": lambda: _check_experts(model, parallel),
        "layer_sharding": lambda: _check_sharding(model, parallel),
    }
    if reads_files:
        checks["eplb"] = lambda: _check_expert_files(model, parallel)
    return {name: problem for name, check in checks.items() if (problem := _problem(check))}


def linear_names(model: ModelConfig) -> Collection[str]:
    """What `layer_sharding` may name in this model."""
    names = {"o_proj"}
    if model.mla is None:
        names |= {"qkv_proj", "q_proj", "k_proj", "v_proj"}
    elif model.mla.q_lora_rank is None:
        names |= {"q_proj", "kv_a_proj", "kv_a_proj_with_mqa"}
    else:
        names |= {"a_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"}
    if _has_dense_layers(model) or (model.moe and model.moe.shared_intermediate_size):
        names |= _MLP_LINEARS
    if model.moe is not None:
        names.add("gate")
    if model.num_draft_layers:
        names.add("eh_proj")
    return names


def _problem(check: Callable[[], object]) -> str:
    try:
        check()
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def _check_widths(model: ModelConfig, parallel: ParallelConfig) -> None:
    place, moe = Rank(0, parallel.tp_size), model.moe
    split_evenly("num_heads", model.num_heads, place)
    if model.mla is None:
        split_kv_heads(model.num_kv_heads, place)
    if _has_dense_layers(model):
        split_evenly("intermediate_size", model.intermediate_size, place)
    if moe is None:
        return
    if parallel.ep_size == 1:
        split_evenly("moe intermediate_size", moe.intermediate_size, place)
    if parallel.ep_size == 1 or parallel.shared_experts == "tp":
        split_evenly("intermediate_size of shared experts", moe.shared_intermediate_size, place)


def _check_experts(model: ModelConfig, parallel: ParallelConfig) -> None:
    moe, eplb, ep_size = model.moe, parallel.eplb, parallel.ep_size
    if ep_size == 1:
        return
    if moe is None:
        raise ValueError(f"ep_size is {ep_size}, the model has no experts")
    if eplb.is_on:
        check_slots(moe.num_experts, eplb.num_redundant_experts, ep_size)
    else:
        ExpertPlacement.contiguous(moe.num_experts, ep_size)


def _check_expert_files(model: ModelConfig, parallel: ParallelConfig) -> None:
    moe, eplb = model.moe, parallel.eplb
    if moe is None or parallel.ep_size == 1:
        return
    eplb.check_heat_file()
    if eplb.mode != "off" and eplb.file:
        read_placements(
            Path(eplb.file),
            sorted(i for i in moe.layers if i < model.num_kv_layers),
            num_experts=moe.num_experts,
            num_redundant=eplb.num_redundant_experts,
            num_ranks=parallel.ep_size,
            num_nodes=eplb.num_nodes,
            num_groups=1 if moe.gating is None else moe.gating.num_groups,
        )


def _check_sharding(model: ModelConfig, parallel: ParallelConfig) -> None:
    split = _SPLIT_LINEARS | (_MLP_LINEARS if _has_dense_layers(model) else set())
    has_replicas = parallel.tp_size == 1 or parallel.dp_size * parallel.cp_size > 1
    for name in parallel.layer_sharding:
        if name not in (names := linear_names(model)):
            raise ValueError(
                f"layer_sharding names {name}: the model has {', '.join(sorted(names))}"
            )
        if name in _MLP_LINEARS and parallel.shared_experts_beside:
            raise ValueError(
                f"layer_sharding of {name} and shared_experts_beside: only one of them"
            )
        if name in split and not has_replicas:
            raise ValueError(
                f"layer_sharding of {name}: no other rank holds the same weights; they are split "
                f"over tp_size {parallel.tp_size}, so it takes dp or cp above 1"
            )


def _has_dense_layers(model: ModelConfig) -> bool:
    return model.moe is None or not set(range(model.num_kv_layers)) <= model.moe.layers
