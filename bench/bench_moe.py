"""Show that a mixture of experts costs what its active experts cost: `python bench/bench_moe.py`.

One sparse layer, T tokens. `active` runs the layer with its k experts per token; `all` runs the
same weights with every expert for every token; `dense` is one MLP as wide as k experts. The last
two columns are what matters: `active / all` should be near the share of experts that got rows, and
grow with it; `active / dense` is the price of routing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.config import MoEConfig
from engine.layers.layer import named_weights, pack_weights
from engine.layers.mlp import GatedMLP
from engine.layers.moe import MoE
from engine.parallel import Parallel
from kernels.ops import BACKENDS, Ops, select_ops

Layer = TypeVar("Layer", bound=nn.Module)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    num_tokens: int
    active_experts: int
    """Experts that got rows."""
    active_ms: float
    all_ms: float
    dense_ms: float


def ready(layer: Layer) -> Layer:
    """Fill the layer with random weights and pack it."""
    for weight in named_weights(layer).values():
        weight.normal_(std=0.05)
    pack_weights(layer)
    return layer


def measure(contenders: Mapping[str, Callable[[], object]], budget_s: float) -> dict[str, float]:
    """Median time of each in ms; they alternate until the budget is spent."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    deadline_s = time.perf_counter() + budget_s
    while time.perf_counter() < deadline_s or len(next(iter(times.values()))) < 3:
        for name, run in contenders.items():
            started_s = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - started_s))
    return {name: statistics.median(values) for name, values in times.items()}


def bench(ops: Ops, config: MoEConfig, hidden_size: int, args: argparse.Namespace) -> list[Row]:
    """One row per batch size."""
    k, num_experts = config.num_experts_per_tok, config.num_experts
    moe = ready(MoE(hidden_size, config, ops=ops, parallel=Parallel()))
    dense = ready(
        GatedMLP(
            hidden_size, k * config.intermediate_size, bias=False, ops=ops, parallel=Parallel()
        )
    )
    rows = []
    for num_tokens in args.tokens:
        x = torch.randn(num_tokens, hidden_size)
        weights, ids = ops.moe_gating_topk_softmax(moe.gate(x), k)
        all_weights, all_ids = ops.moe_gating_topk_softmax(moe.gate(x), num_experts)
        times = measure(
            {
                "active": lambda x=x, w=weights, i=ids: moe.experts(x, w, i),
                "all": lambda x=x, w=all_weights, i=all_ids: moe.experts(x, w, i),
                "dense": lambda x=x: dense(x),
            },
            args.budget_s,
        )
        rows.append(
            Row(
                num_tokens=num_tokens,
                active_experts=len(ids.unique()),
                active_ms=times["active"],
                all_ms=times["all"],
                dense_ms=times["dense"],
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--width", type=int, default=256, help="of an expert")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 128])
    parser.add_argument("--budget-s", type=float, default=1.0, help="per row of the table")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = MoEConfig(
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        intermediate_size=args.width,
        norm_topk_prob=True,
        layers=frozenset({0}),
    )
    ops = select_ops(args.backend)
    with torch.inference_mode():
        rows = bench(ops, config, args.hidden_size, args)
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{ops.name}, {args.experts} experts, {args.top_k} per token")
    print("tokens  active experts  active ms   all ms  dense ms  active/all  active/dense")
    for row in rows:
        print(
            f"{row.num_tokens:6}  {row.active_experts:8} {row.active_experts / args.experts:4.0%}  "
            f"{row.active_ms:9.3f} {row.all_ms:8.3f} {row.dense_ms:9.3f}  "
            f"{row.active_ms / row.all_ms:10.1%}  {row.active_ms / row.dense_ms:12.2f}"
        )


if __name__ == "__main__":
    main()
