"""Greedy tokens are the same however many threads compute, eagerly or by graphs."""

from pathlib import Path
from typing import Any

import pytest

from decoder.graph import GraphRunner
from decoder.native_graph import NativeBackend
from engine.colocated import ColocatedEngine
from engine.config import Quantization
from engine.models import CausalLM
from engine.runner import ForwardMemory
from engine.scheduler import SchedulerConfig
from kernels.cpu.options import CpuOptions
from kernels.ops import Ops, select_ops
from tests.engine.steps import load
from tests.engine.tiny import make_request, random_token_ids, tiny_hf_llama
from tests.engine.tiny_families import tiny_family
from tests.kernels.threads import COUNTS, computing_with

# Wide enough that every product is cut into several chunks.
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "vocab_size": 512}
MODELS: dict[str, Any] = {
    "llama": lambda: tiny_hf_llama(intermediate_size=640, **WIDE),
    "qwen3-moe": lambda: tiny_family(
        "qwen3-moe", head_dim=32, moe_intermediate_size=160, num_experts=6, **WIDE
    ),
}
LENGTHS = (1, 3, 17, 70, 100)


def tokens_of(folder: Path, ops: Ops, quantization: Quantization, has_graphs: bool) -> Any:
    def with_graphs(model: CausalLM, ops: Ops, memory: ForwardMemory) -> GraphRunner:
        runner = GraphRunner(model, memory, NativeBackend() if has_graphs else None)
        runner.capture(lambda phase, progress: None)
        return runner

    engine = ColocatedEngine(
        load(folder, ops, quantization=quantization),
        ops,
        num_blocks=64,
        block_size=16,
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64
        ),
        make_forward=with_graphs,
    )
    requests = [
        make_request(random_token_ids(length, i), max_tokens=24, ignore_eos=True)
        for i, length in enumerate(LENGTHS)
    ]
    engine.generate(requests)
    return [request.token_ids for request in requests]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_greedy_tokens_do_not_depend_on_the_number_of_threads(
    make: Any, quantization: Quantization, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    ops = select_ops("cpu", cpu=CpuOptions(activation_bits=8))
    found = []
    for count in COUNTS:
        for has_graphs in (False, True):
            with computing_with(count):
                found.append(tokens_of(tmp_path, ops, quantization, has_graphs))
    assert all(tokens == found[0] for tokens in found[1:])
