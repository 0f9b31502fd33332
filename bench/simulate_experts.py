"""Estimate expert-parallel decoders larger than tests here: `python bench/simulate_experts.py`.

What is real: the router's choice of experts (kernels.routing), the planner (engine.expert_planner),
the map from experts to slots (engine.expert_placement) and the number of moves. What is estimated:
bytes, from the formulas of docs/parallel.md that tests count on real processes; and times, from a
roofline with the figures of `Machine`. Router logits are random: an expert's popularity, which is
log-normal with `--skew`, plus noise per token; popularities drift between the window that a plan is
made from and the window that it is judged by.

Columns: `hottest` is the rows of the hottest rank over the mean, mean over layers and worst layer;
`MB sent` is what one rank sends in a layer, of dispatch, combine and attention's collectives;
`step` and `tokens/s` are the roofline's, for the whole decoder.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.expert_placement import ExpertPlacement, moves
from engine.expert_planner import near, plan
from engine.slot_table import SlotTable
from kernels.gating import Gating
from kernels.routing import gating_topk

GATING = Gating(
    num_experts_per_tok=8,
    scoring="sigmoid",
    num_groups=8,
    num_groups_per_tok=4,
    group_scoring="top2_sum",
    is_normalized=True,
    scaling_factor=2.5,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """DeepSeek-V3 (arXiv 2412.19437), weights of one byte, activations of two."""

    hidden: int = 7168
    width: int = 2048
    num_experts: int = 256
    num_layers: int = 58
    num_dense_layers: int = 3
    dense_width: int = 18432
    attention_params: int = 187_107_328
    """Of one layer."""
    latent_bytes: int = 576 * 2
    """KV cache of one token in one layer."""
    weight_bytes: int = 1
    row_bytes: int = 2 * 7168

    @property
    def expert_params(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One NPU and its links, of the order of an Atlas 800 A2; nothing of it is measured here."""

    memory_bytes_per_s: float = 1.6e12
    flops_per_s: float = 350e12
    link_bytes_per_s: float = 150e9
    """Between NPUs of one host, per NPU."""
    network_bytes_per_s: float = 25e9
    """Between hosts, per NPU (200 Gbit/s)."""
    collective_s: float = 20e-6
    """Of a collective that moves nothing."""
    efficiency: float = 0.6
    """Share of the figures above that is reached."""
    ranks_per_host: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """An engine: attention over dp x tp ranks, experts over all of them."""

    dp: int
    tp: int
    num_redundant: int

    @property
    def num_ranks(self) -> int:
        """Of attention and of experts."""
        return self.dp * self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    layout: str
    placement: str
    moe_comm: str
    hottest: float
    hottest_layer: float
    mb_sent: float
    step_ms: float
    tokens_per_s: float
    moved_experts: float
    """Per layer, from experts in order to the plan."""
    move_ms: float
    """Of the weights of one layer, over the network."""


def route(popularity: Tensor, num_rows: int, model: Model, generator: torch.Generator) -> Tensor:
    """[num_rows, k]: experts that the router picks."""
    noise = torch.randn(num_rows, model.num_experts, generator=generator)
    _, topk_ids = gating_topk(popularity + noise, GATING, None)
    return topk_ids.long()


def dispatched(topk_ids: Tensor, placement: ExpertPlacement, num_ranks: int) -> Tensor:
    """[from rank, to rank]: rows that go, with rows dealt out over ranks as the engine does."""
    table = SlotTable(placement)
    parts = topk_ids.chunk(num_ranks)
    return torch.stack(
        [
            torch.bincount(
                table(part, rank).flatten() // placement.slots_per_rank, minlength=num_ranks
            )
            for rank, part in enumerate(parts)
        ]
    )


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """What one sparse layer asks of the ranks."""

    sent: Tensor
    """[from rank, to rank] rows."""
    touched: int
    """Experts with rows on the rank that has most of them."""


def loads(
    layout: Layout, is_planned: bool, args: argparse.Namespace, model: Model
) -> Iterator[tuple[LayerLoad, int]]:
    """Per simulated layer, and how many experts a plan moves there."""
    ranks, rows = layout.num_ranks, args.tokens_per_rank * layout.num_ranks
    for layer in range(args.layers):
        generator = torch.Generator().manual_seed(layer)
        popularity = args.skew * torch.randn(model.num_experts, generator=generator)
        drift = args.drift * torch.randn(model.num_experts, generator=generator)
        placement, num_moved = ExpertPlacement.contiguous(model.num_experts, ranks), 0
        if is_planned:
            seen = route(popularity, args.window * rows, model, generator)
            heat = torch.bincount(seen.flatten(), minlength=model.num_experts).tolist()
            even = plan(
                [1.0] * model.num_experts, num_redundant=layout.num_redundant, num_ranks=ranks
            )
            placement = near(plan(heat, num_redundant=layout.num_redundant, num_ranks=ranks), even)
            size = placement.slots_per_rank
            num_moved = sum(m.source // size != m.target // size for m in moves(even, placement))
        topk_ids = route(popularity + drift, rows, model, generator)
        sent = dispatched(topk_ids, placement, ranks)
        slots = SlotTable(placement)(topk_ids, 0).unique() // placement.slots_per_rank
        yield LayerLoad(sent, int(torch.bincount(slots).max())), num_moved


def attention_bytes(layout: Layout, tokens: int, moe_comm: str, model: Model) -> float:
    """Sent by one rank in one layer besides dispatch and combine; see docs/parallel.md."""
    if layout.tp == 1:
        return 0.0
    half = tokens * layout.tp * model.row_bytes * (layout.tp - 1) / layout.tp
    # With latent attention the delayed AllGather carries latents: q_lora_rank + 576 numbers.
    latents = half * (1536 + 576) / model.hidden
    return half + latents if moe_comm == "zero_redundancy" else 3 * half


def step_s(
    load: LayerLoad,
    layout: Layout,
    moe_comm: str,
    args: argparse.Namespace,
    model: Model,
    machine: Machine,
) -> float:
    """Of one sparse layer: the slowest rank in every part."""
    memory = machine.memory_bytes_per_s * machine.efficiency
    flops = machine.flops_per_s * machine.efficiency
    tokens = args.tokens_per_rank * layout.tp  # of one data-parallel rank
    weights = model.attention_params / layout.tp * model.weight_bytes
    kv = tokens * args.context * model.latent_bytes  # every tensor-parallel rank has all latents
    attention = max((weights + kv) / memory, 2 * tokens * weights / flops)
    rows = load.sent.sum(dim=0).max().item()
    expert = model.expert_params
    shared = expert * model.weight_bytes / memory
    experts = max(load.touched * expert * model.weight_bytes / memory, 2 * rows * expert / flops)
    # Into the hottest rank, and back: what crosses hosts goes over the network.
    hosts = torch.arange(layout.num_ranks) // machine.ranks_per_host
    is_far = hosts[:, None] != hosts[None]
    is_near = ~is_far & ~torch.eye(layout.num_ranks, dtype=torch.bool)
    rate = machine.efficiency * model.row_bytes**-1
    far = (load.sent * is_far).sum(dim=0).max().item() / (rate * machine.network_bytes_per_s)
    close = (load.sent * is_near).sum(dim=0).max().item() / (rate * machine.link_bytes_per_s)
    gathers = attention_bytes(layout, args.tokens_per_rank, moe_comm, model) / (
        machine.efficiency * machine.link_bytes_per_s
    )
    num_collectives = 3 if layout.tp == 1 else 5
    return (
        attention
        + experts
        + shared
        + 2 * max(far, close)
        + gathers
        + (num_collectives * machine.collective_s)
    )


def simulate(layout: Layout, is_planned: bool, moe_comm: str, args: argparse.Namespace) -> Row:
    """All simulated layers of one layout, as one line."""
    model, machine = Model(), Machine()
    found = list(loads(layout, is_planned, args, model))
    ratios = []
    for load, _ in found:
        rows = load.sent.sum(dim=0).double()
        ratios.append(float(rows.max() / rows.mean()))
    diagonal = torch.eye(layout.num_ranks, dtype=torch.bool)
    remote = sum(
        float(load.sent.masked_fill(diagonal, 0).sum()) / layout.num_ranks for load, _ in found
    ) / len(found)
    sent = 2 * remote * model.row_bytes + attention_bytes(
        layout, args.tokens_per_rank, moe_comm, model
    )
    per_layer = sum(
        step_s(load, layout, moe_comm, args, model, machine) for load, _ in found
    ) / len(found)
    step = per_layer * (model.num_layers + model.num_dense_layers)
    moved = sum(n for _, n in found) / len(found)
    move_s = (
        moved
        / layout.num_ranks
        * model.expert_params
        * model.weight_bytes
        / (machine.network_bytes_per_s * machine.efficiency)
    )
    return Row(
        layout=f"DP{layout.dp} x TP{layout.tp} x EP{layout.num_ranks}",
        placement=f"planned, +{layout.num_redundant}" if is_planned else "in order",
        moe_comm=moe_comm,
        hottest=sum(ratios) / len(ratios),
        hottest_layer=max(ratios),
        mb_sent=sent / 1e6,
        step_ms=1e3 * step,
        tokens_per_s=args.tokens_per_rank * layout.num_ranks / step,
        moved_experts=moved,
        move_ms=1e3 * move_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens-per-rank", type=int, default=32, help="rows a rank routes")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--skew", type=float, default=0.8, help="of the experts' popularity")
    parser.add_argument("--drift", type=float, default=0.05, help="of popularity after the plan")
    parser.add_argument("--layers", type=int, default=12, help="sparse layers that are simulated")
    parser.add_argument("--window", type=int, default=64, help="steps that a plan looks at")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    layouts = [Layout(dp=4, tp=4, num_redundant=16), Layout(dp=64, tp=1, num_redundant=64)]
    rows = []
    for layout in layouts:
        comms = ["allreduce", "zero_redundancy"] if layout.tp > 1 else ["zero_redundancy"]
        rows += [simulate(layout, planned, comm, args) for comm in comms for planned in (0, 1)]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print("ESTIMATES: DeepSeek-V3's shape on assumed NPUs; see the docstring")
    print(
        "| layout | experts | `moe_comm` | hottest, worst layer "
        "| MB sent | step | tokens/s | moves |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.layout} | {row.placement} | `{row.moe_comm}` | {row.hottest:.2f}, "
            f"{row.hottest_layer:.2f} | {row.mb_sent:.2f} | {row.step_ms:.1f} ms | "
            f"{row.tokens_per_s:,.0f} | {row.moved_experts:.0f} a layer, {row.move_ms:.0f} ms |"
        )


if __name__ == "__main__":
    main()
