"""What runs on an Ascend host alone: pytest -m npu tests/npu. Nothing of it has run anywhere yet.

The reference computes in float32 on the host, the NPU in bfloat16: results are compared within what
bfloat16 keeps, about three digits.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import Batch, KVBatch
from kernels.reference import ReferenceOps

pytestmark = pytest.mark.npu
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}


@pytest.fixture(scope="module")
def npu() -> Any:
    """NpuOps on this process's NPU."""
    torch_npu = pytest.importorskip(
        "torch_npu", reason="torch_npu is not installed", exc_type=ImportError
    )
    if not torch_npu.npu.is_available():
        pytest.skip("no NPU: torch_npu finds none on this machine")
    options = importlib.import_module("kernels.ascend.options")
    ops = importlib.import_module("kernels.npu").load(options.DEFAULT_OPTIONS)
    ops.bind_thread()
    return ops


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float().cpu(), expected.float(), **TOLERANCE)


def random(*shape: int) -> Tensor:
    """In bfloat16's numbers, so that both sides get the same."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16().float()


OPS: dict[str, Callable[[Any, Callable[[Tensor], Tensor]], Tensor]] = {
    "rms_norm": lambda ops, at: ops.rms_norm(at(random(5, 256)), at(random(256)), 1e-6),
    "add_rms_norm": lambda ops, at: ops.add_rms_norm(
        at(random(5, 256)), at(random(6, 256)[:5]), at(random(256)), 1e-6
    )[0],
    "silu_mul": lambda ops, at: ops.silu_mul(at(random(5, 512))),
    "linear": lambda ops, at: ops.linear(random(64, 256) / 16, random(64))(at(random(5, 256))),
    "grouped_linear": lambda ops, at: ops.grouped_linear(random(3, 64, 256) / 16)(
        at(random(6, 256)), torch.tensor([2, 0, 4]).to(at(random(1)).device)
    ),
    "head_matmul": lambda ops, at: ops.head_matmul(at(random(5, 2, 128)), at(random(2, 128, 512))),
    "top_k_top_p": lambda ops, at: ops.top_k_top_p(
        at(random(4, 300)).float(),
        torch.tensor([3, 20, 300, 1], dtype=torch.int32).to(at(random(1)).device),
        torch.tensor([0.5, 0.9, 0.3, 1.0]).to(at(random(1)).device),
    ).isfinite(),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", OPS)
def test_an_op_computes_what_the_reference_does(npu: Any, name: str) -> None:
    expected = OPS[name](ReferenceOps(), lambda x: x)
    close(OPS[name](npu, npu.parameter), expected)


def decodes(ops: Any, dtype: torch.dtype, num_seqs: int = 3) -> tuple[Batch, list[list[Tensor]]]:
    """A decode step after contexts of 130 keys, and its caches."""
    from tests.npu.families import caches, family

    made = caches(family("qwen3", ReferenceOps()), 2 * num_seqs)
    parts = []
    for cache_list in (made.k, made.v):
        filled = []
        for cache in cache_list:
            cache.copy_(random(*cache.shape))
            filled.append(cache.to(ops.device, dtype))
        parts.append(filled)
    blocks = torch.arange(2 * num_seqs, dtype=torch.int32).view(num_seqs, 2)
    kv = KVBatch(
        k_caches=parts[0],
        v_caches=parts[1],
        slot_mapping=(blocks[:, 1] * 128 + 2).int().to(ops.device),
        block_table=blocks.to(ops.device),
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32),
        context_lens=torch.full((num_seqs,), 131, dtype=torch.int32),
        max_seqlen_q=1,
        num_decode_seqs=num_seqs,
        num_decode_tokens=num_seqs,
    )
    ids = torch.tensor([5, 7, 11], dtype=torch.int32).to(ops.device)
    positions = torch.full((num_seqs,), 130, dtype=torch.int32).to(ops.device)
    return Batch(ids, positions, kv, positions[:0]), parts


@torch.inference_mode()
def test_a_decode_step_of_a_model_is_the_reference_s(npu: Any) -> None:
    from tests.npu.families import family

    states = []
    for ops, dtype in ((ReferenceOps(), torch.float32), (npu, torch.bfloat16)):
        batch, _ = decodes(ops, dtype)
        states.append(family("qwen3", ops)(batch.input_ids, batch.positions, batch.kv).float())
    found, expected = states[1].cpu(), states[0]
    assert (found - expected).norm() / expected.norm() < 0.05


@torch.inference_mode()
@pytest.mark.parametrize("mode", ["torchair", "aclgraph"])
def test_a_replayed_graph_computes_what_the_eager_model_does(npu: Any, mode: str) -> None:
    from decoder.graph import GraphRunner, select_backend
    from engine.runner import ForwardMemory
    from tests.npu.families import family

    model = family("qwen3", npu)
    batch, parts = decodes(npu, torch.bfloat16)
    runner = GraphRunner(model, ForwardMemory(*parts, 4, 2), select_backend(mode, npu, model))
    runner.capture(lambda phase, progress: None)
    expected = model(batch.input_ids, batch.positions, batch.kv).clone()
    # Other lengths than those of the capture, and a row of padding.
    shorter = replace(batch.kv, context_lens=batch.kv.context_lens - 1)
    runner(replace(batch, kv=shorter))
    found = runner(batch)
    assert runner.stats.num_replays == 2
    assert torch.equal(found.cpu(), expected.cpu())


def test_mooncake_moves_device_memory_over_its_ascend_protocol(npu: Any) -> None:
    from kvtransfer.config import KVTransferConfig
    from kvtransfer.registration import KVMemory
    from kvtransfer.transports.base import Segment
    from kvtransfer.transports.loading import load_transports
    from tests.kvtransfer.harness import LAYOUT

    memory = KVMemory.on_device(LAYOUT, 4, npu.device, npu.bind_thread, npu.mark)
    config = KVTransferConfig(transport="mooncake", mooncake_protocol="ascend", checksum="off")
    transports = load_transports(config, memory)
    try:
        transport = transports.named("mooncake")
        deadline_s = time.monotonic() + 60
        connection = transport.connect(transport.endpoint(), deadline_s)
        memory.k_caches[0][0] = 3.0
        source, target = memory.regions[0], memory.regions[2]
        segment = Segment(source.base_address, target.base_address, source.block_bytes)
        connection.write([segment], deadline_s)
        assert torch.equal(memory.k_caches[1][0].cpu(), memory.k_caches[0][0].cpu())
        connection.close()
    finally:
        transports.close()
        memory.close()
