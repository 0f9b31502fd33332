"""Decode steps by graphs against eager ones, form by form: `python bench/bench_graphs.py`.

Random models of a few layers, hidden states only. Both ways are taken in turns on the same batch;
the ratio is the median over the turns. What a graph saves is Python's work between kernels, so it
shows most where kernels are short: in small batches, and with small experts. With --compile
torch.compile's inductor takes its turns too, where it takes the whole model.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decoder.graph import GraphRunner
from decoder.native_graph import NativeBackend
from engine.batch import Batch, BatchBuilder
from engine.config import MLAConfig, ModelConfig, MoEConfig
from engine.kv_layout import kv_layout
from engine.layers.layer import named_weights, pack_weights
from engine.models import CausalLM, build_model
from engine.request import Request, SamplingParams
from engine.runner import ForwardMemory
from engine.scheduler_output import ScheduledRequest
from kernels.gating import Gating
from kernels.ops import select_ops

BLOCK_SIZE, CONTEXT, NUM_DRAFTS = 32, 96, 3
LAYERS = 12
DENSE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=LAYERS,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
)
EXPERTS = MoEConfig(
    num_experts=32,
    num_experts_per_tok=4,
    intermediate_size=192,
    norm_topk_prob=True,
    layers=frozenset(range(LAYERS)),
)
MLA = MLAConfig(
    q_lora_rank=None,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    softmax_scale=96**-0.5,
)
GATING = Gating(num_experts_per_tok=4, scoring="sigmoid", num_groups=4, num_groups_per_tok=2)
SPARSE = replace(DENSE, architecture="Qwen3MoeForCausalLM", moe=EXPERTS)
LATENT = replace(
    DENSE,
    architecture="DeepseekV3ForCausalLM",
    num_heads=8,
    num_kv_heads=8,
    head_dim=96,
    mla=MLA,
    moe=replace(EXPERTS, layers=frozenset()),
)
DEEPSEEK = replace(
    LATENT, moe=replace(EXPERTS, gating=GATING, shared_intermediate_size=384, norm_topk_prob=False)
)
FORMS = {
    "dense": (DENSE, 1),
    f"dense, {NUM_DRAFTS} drafts": (DENSE, 1 + NUM_DRAFTS),
    "latent attention": (LATENT, 1),
    "experts": (SPARSE, 1),
    "latent attention and experts": (DEEPSEEK, 1),
    f"the same, {NUM_DRAFTS} drafts": (DEEPSEEK, 1 + NUM_DRAFTS),
}


def random_model(config: ModelConfig) -> CausalLM:
    """On the C++ kernels."""
    model = build_model(config, select_ops("cpu"))
    generator = torch.Generator().manual_seed(0)
    for weight in named_weights(model).values():
        weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    pack_weights(model)
    return model


def decode_batch(builder: BatchBuilder, num_seqs: int, num_rows: int) -> Batch:
    """The last rows of sequences with CONTEXT keys."""
    blocks, entries = -(-CONTEXT // BLOCK_SIZE), []
    for i in range(num_seqs):
        request = Request(f"{i}", 0, [7 + i] * CONTEXT, CONTEXT, SamplingParams())
        request.num_computed_tokens = CONTEXT - num_rows
        request.block_ids = list(range(i * blocks, (i + 1) * blocks))
        entries.append(ScheduledRequest(request, num_rows))
    return builder.build(entries)


def in_turns(ways: list[Callable[[], Tensor]], budget_s: float) -> list[list[float]]:
    """Seconds of each way, turn by turn, until the budget is spent."""
    for way in ways:
        way()
    turns: list[list[float]] = []
    deadline_s = time.perf_counter() + budget_s
    while time.perf_counter() < deadline_s or len(turns) < 3:
        taken = []
        for way in ways:
            started_s = time.perf_counter()
            way()
            taken.append(time.perf_counter() - started_s)
        turns.append(taken)
    return turns


def compiled(model: CausalLM, batch: Batch) -> tuple[Callable[[], Tensor], str] | None:
    """The model's forward pass by inductor, and the seconds it took; None where that fails."""
    run = torch.compile(model, fullgraph=True, dynamic=False)
    started_s = time.perf_counter()
    try:
        run(batch.input_ids, batch.positions, batch.kv)
    except torch._dynamo.exc.TorchDynamoException as error:
        print(f"no torch.compile: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    took_s = time.perf_counter() - started_s
    return lambda: run(batch.input_ids, batch.positions, batch.kv), f"{took_s:.1f}"


@torch.inference_mode()
def main() -> None:
    """Print a row per form and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--form", default="", help="regular expression: of a form's name")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--budget-s", type=float, default=4.0, help="per row of the table")
    parser.add_argument(
        "--compile", action="store_true", help="and torch.compile, half a minute each"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.threads} threads, {LAYERS} layers, medians")
    print(
        "| form | sequences | eager ms | replay ms | replay / eager | graphs | their MB "
        "| compiled ms | after s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    most = max(arguments.batch)
    forms = {name: form for name, form in FORMS.items() if re.search(arguments.form, name)}
    models = {config: random_model(config) for config, _ in forms.values()}
    for name, (config, num_rows) in forms.items():
        model, layout = models[config], kv_layout(config, BLOCK_SIZE)
        sizes = layout.shapes(most * -(-CONTEXT // BLOCK_SIZE))
        k_caches, v_caches = ([torch.zeros(s) for _ in range(LAYERS)] for s in sizes)
        memory = ForwardMemory(k_caches, v_caches, most, 8, num_draft_tokens=num_rows - 1)
        graphs = GraphRunner(model, memory, NativeBackend())
        graphs.capture(lambda phase, progress: None)
        builder = BatchBuilder(k_caches, v_caches, BLOCK_SIZE)
        for num_seqs in arguments.batch:
            batch = decode_batch(builder, num_seqs, num_rows)
            assert graphs.graph_size([batch]), f"{name}: {dict(graphs.stats.eager)}"
            ways = [
                lambda m=model, b=batch: m(b.input_ids, b.positions, b.kv),
                lambda g=graphs, b=batch: g(b),
            ]
            inductor = compiled(model, batch) if arguments.compile else None
            if inductor is not None:
                ways.append(inductor[0])
            turns = in_turns(ways, arguments.budget_s)
            eager_s, replay_s, *compiled_s = (
                statistics.median(turn[i] for turn in turns) for i in range(len(ways))
            )
            ratio = statistics.median(turn[1] / turn[0] for turn in turns)
            stats = graphs.stats
            print(
                f"| {name} | {num_seqs} | {1e3 * eager_s:.2f} | {1e3 * replay_s:.2f} "
                f"| {ratio:.2f} | {stats.num_graphs} | {stats.num_graph_bytes / 1e6:.1f} "
                f"| {f'{1e3 * compiled_s[0]:.2f}' if inductor else ''} "
                f"| {inductor[1] if inductor else ''} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
