"""The wheel's own schemas and shape functions take every call that published models make.

The models are built at full width on the meta device, a few layers of them, and run a prefill and a
decode step. A wrong argument raises in the wheel; a wrong shape or dtype raises in the next call.
"""

import pytest
import torch

from engine.checkpoint.config import parse_model_config
from engine.layers.layer import pack_weights
from engine.models import CausalLM, build_model
from kernels.ascend.options import NpuOptions
from kernels.npu import NpuOps
from tests.npu.meta import META, Calls, meta_batch
from tests.npu.published import PUBLISHED, one_rank
from tests.npu.wheel import torch_npu

assert torch_npu  # its shape functions work without a device
ATTENTION = {"npu_fused_infer_attention_score_v2"}
ALWAYS = {"npu_rms_norm", "npu_add_rms_norm", "npu_swiglu"} | ATTENTION
GQA = {"npu_rotary_mul", "npu_scatter_nd_update_"}
MLA = {"npu_interleave_rope", "npu_kv_rmsnorm_rope_cache", "npu_transpose_batchmatmul"}
EXPERTS = {"npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_moe_finalize_routing"}
EXPECTED = {
    "Qwen2.5-3B": ALWAYS | GQA,
    "Qwen3-30B-A3B": ALWAYS | GQA | EXPERTS | {"npu_moe_gating_top_k_softmax"},
    "DeepSeek-V3": ALWAYS | MLA | EXPERTS | {"npu_moe_gating_top_k"},
}


def meta_model(name: str, ops: NpuOps, tp_size: int, quantization: str) -> CausalLM:
    config = parse_model_config(PUBLISHED[name] | {"num_hidden_layers": 2})
    with META:
        model = build_model(config, ops, one_rank(tp_size))
        pack_weights(model, quantization)  # type: ignore[arg-type]
    return model


@torch.inference_mode()
@pytest.mark.usefixtures("all_shapes")
@pytest.mark.parametrize("quantization", ["none", "int8", "w8a8", "int4"])
@pytest.mark.parametrize("tp_size", [1, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_wheel_takes_every_call(name: str, tp_size: int, quantization: str) -> None:
    ops = NpuOps(device=META, options=NpuOptions(quantize_activations=quantization == "w8a8"))
    model = meta_model(name, ops, tp_size, "int8" if quantization == "w8a8" else quantization)
    calls = Calls()
    for seqlens, contexts in (([300, 1, 77], [300, 900, 205]), ([1] * 32, [100] * 32)):
        kv = meta_batch(model, tp_size, seqlens, contexts)
        token_ids = torch.zeros(sum(seqlens), dtype=torch.int32, device=META)
        with calls:
            hidden = model(token_ids, token_ids, kv)
            logits = model.logits(hidden[:3])
        assert hidden.shape == (sum(seqlens), model.config.hidden_size)
        assert logits.shape == (3, model.config.vocab_size)
        assert hidden.dtype == logits.dtype == torch.bfloat16
    expected = set(EXPECTED[name])
    if "npu_interleave_rope" in expected:
        expected.add("npu_gather_pa_kv_cache")
        if quantization == "none":
            expected.add("npu_mla_prolog_v2")  # of decode steps alone
    if quantization in ("int8", "int4"):
        expected.add("npu_weight_quant_batchmatmul")
    if quantization == "w8a8":
        expected |= {"npu_dynamic_quant", "npu_quant_matmul"}
        if "npu_grouped_matmul" in expected:
            expected.add("npu_grouped_matmul_swiglu_quant_v2")
        if name == "Qwen3-30B-A3B":
            expected.remove("npu_swiglu")  # every layer is sparse: it is in the products
    assert calls.names == expected


@torch.inference_mode()
@pytest.mark.usefixtures("all_shapes")
def test_the_wheel_takes_every_call_on_an_int8_cache() -> None:
    name = "Qwen2.5-3B"
    model = meta_model(name, NpuOps(device=META), 1, "none")
    calls = Calls()
    for seqlens, contexts in (([300, 1, 77], [300, 900, 205]), ([1] * 32, [100] * 32)):
        kv = meta_batch(model, 1, seqlens, contexts, "int8")
        token_ids = torch.zeros(sum(seqlens), dtype=torch.int32, device=META)
        with calls:
            hidden = model(token_ids, token_ids, kv)
        assert hidden.shape == (sum(seqlens), model.config.hidden_size)
        assert hidden.dtype == torch.bfloat16
    assert calls.names == EXPECTED[name] | {"npu_dynamic_quant"}
