from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bench.gguf_formats import gguf_writer, round_to
from engine.checkpoint.tensor_types import GGUF_TYPES
from engine.config import Quantization
from engine.errors import UnsupportedModel, WeightsError
from engine.layers.embedding import LMHead
from engine.layers.layer import named_weights
from engine.layers.linear import FusedLinear
from engine.models import build_model
from engine.weights import load_model_config, load_weights
from engine.weights.gguf import dequantize, halves_from_pairs
from engine.weights.gguf_file import read_gguf
from kernels.cpu.ops import CpuQuantizedLinear
from kernels.ops import Ops, select_ops
from tests.engine.family_configs import LLAMA3, YARN
from tests.engine.gguf_files import (
    assert_same_logits,
    pairs_from_halves,
    tiny_gguf,
    write_gguf,
    write_metadata,
    write_tensors,
)
from tests.engine.kept_weights import (
    assert_close_but_for_inputs,
    assert_inputs_are_rounded,
    assert_same_weights,
    with_8_bits,
)
from tests.engine.tiny import PoisonedCache, load, logits_by_steps, random_token_ids, tiny_hf_llama
from tests.oracle import hf_smollm2, packaged_model_path


@pytest.mark.parametrize(
    "quantization",
    [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0],
    ids=lambda quantization: quantization.name,
)
def test_a_model_stored_in_any_type_gives_the_logits_of_transformers(
    quantization: Type, ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_gguf(tmp_path / "tiny.gguf", quantization)
    assert_same_logits(tmp_path / "tiny.gguf", hf, ops)


@pytest.mark.parametrize(
    "quantization", [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K], ids=lambda q: q.name
)
def test_a_model_of_k_quants_gives_the_logits_of_the_dequantised_weights(
    quantization: Type, ops: Ops, tmp_path: Path
) -> None:
    # Blocks have 256 values. Weights of this size keep logits near those of narrower models.
    shape = {"hidden_size": 256, "intermediate_size": 256}
    hf = tiny_hf_llama(**shape)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.mul_(0.5 if parameter.dim() == 2 else 1)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, hf, quantization)
    assert_same_logits(path, hf, ops)
    kinds = {tensor.quantization for tensor in read_gguf(path).tensors if len(tensor.shape) == 2}
    assert kinds == {quantization}


@pytest.mark.parametrize(
    "options",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    ],
    ids=["tied", "mqa", "biases", "theta"],
)
def test_what_the_file_holds_decides_the_architecture(
    options: dict[str, Any], ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_gguf(tmp_path / "tiny.gguf", **options)
    config = load_model_config(tmp_path / "tiny.gguf")
    assert config.tie_word_embeddings == hf.config.tie_word_embeddings
    assert config.attention_bias == hf.config.attention_bias
    assert config.mlp_bias == hf.config.mlp_bias
    assert (config.eos_token_ids, config.bos_token_id) == ({2}, 1)
    assert_same_logits(tmp_path / "tiny.gguf", hf, ops)


LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}


@pytest.mark.parametrize("rope", [LLAMA3, YARN, LINEAR], ids=["llama3", "yarn", "linear"])
def test_scaled_rope_is_read_from_the_metadata_or_the_frequency_table(
    rope: dict[str, Any], ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_hf_llama(rope_parameters=rope)
    plain = tiny_hf_llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    path = tmp_path / "tiny.gguf"
    with gguf_writer(path) as writer:
        write_metadata(writer, hf)
        write_tensors(writer, hf, Type.F32)
        if rope is LLAMA3:
            divisors = plain.model.rotary_emb.inv_freq / hf.model.rotary_emb.inv_freq
            writer.add_tensor("rope_freqs.weight", divisors.numpy().astype(np.float32))
        else:
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(64)
    assert_same_logits(path, hf, ops)


@pytest.mark.parametrize("name", GGUF_TYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 600])
def test_dequantisation_is_that_of_the_gguf_package(name: str, num_rows: int) -> None:
    quantization = Type[name]
    _, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    # Bytes below 64 keep the scales, which are float16, finite.
    rng = np.random.default_rng(0)
    data = rng.integers(0, 64, (num_rows, 8 * block_bytes), np.uint8)
    expected = quants.dequantize(data, quantization)
    found = dequantize(data, quantization).reshape(expected.shape)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "num_steps", "spread"),
    [
        # Of normal numbers: from the least to the greatest of 16 or 32; the farthest of 16 from 0.
        (Type.Q2_K, 3, 3.53),
        (Type.Q3_K, 4, 2.07),
        (Type.Q4_K, 15, 4.14),
        (Type.Q5_K, 31, 4.14),
        (Type.Q6_K, 32, 2.07),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_rounding_to_k_quants_errs_as_evenly_spaced_steps_do(
    kind: Type, num_steps: int, spread: float
) -> None:
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).numpy()
    values[0], values[1, :16] = 0, 0
    blocks = round_to(values, kind)
    assert blocks.shape[-1] == 2 * gguf.GGML_QUANT_SIZES[kind][1]
    error = quants.dequantize(blocks, kind) - values
    assert not error[0].any()
    # An even step errs by a twelfth of its square in the mean; scales are rounded too.
    expected = spread / num_steps / 12**0.5
    assert float((error[2:] ** 2).mean()) ** 0.5 == pytest.approx(expected, rel=0.1)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 3))
def test_unpermuting_undoes_the_converters_order(heads: int, half: int, columns: int) -> None:
    rows = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(-1, columns)
    permuted = pairs_from_halves(rows, heads)
    np.testing.assert_array_equal(halves_from_pairs(permuted, 2 * half), rows)


def logits_of(path: Path, ops: Ops, quantization: Quantization) -> torch.Tensor:
    model = load(path, ops, quantization=quantization)
    cache = PoisonedCache(model, num_blocks=8, block_size=8)
    (logits,) = logits_by_steps(model, cache, [random_token_ids(40, 0)], lambda _, left: left)
    return logits


@pytest.mark.parametrize(
    "quantization",
    [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0],
    ids=lambda q: q.name,
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_blocks_kept_as_they_are_are_the_same_numbers(
    quantization: Type, is_tied: bool, cpu: Ops, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf(path, quantization, tie_word_embeddings=is_tied, attention_bias=True)
    model = load(path, cpu, quantization="native")
    kept = [m for m in model.modules() if isinstance(m, FusedLinear | LMHead)]
    assert all(isinstance(layer._linear, CpuQuantizedLinear) for layer in kept)
    assert_same_weights(model, load(path, cpu, quantization="none"))
    native, plain = (logits_of(path, cpu, quantization) for quantization in ("native", "none"))
    coarser = logits_of(path, with_8_bits(), "native")
    if quantization in (Type.F16, Type.BF16):
        assert torch.equal(native, plain)
    else:
        assert_close_but_for_inputs(native, plain)
    if quantization in (Type.Q4_0, Type.Q4_1):
        assert_close_but_for_inputs(coarser, plain, bits=8)
        assert_inputs_are_rounded(coarser, plain, bits=8)
    else:
        assert torch.equal(coarser, native)


def test_the_packaged_model_kept_as_it_is_is_the_same_numbers(cpu: Ops) -> None:
    path = packaged_model_path()
    assert_same_weights(*(load(path, cpu, quantization=q) for q in ("native", "none")))
    plain = logits_of(path, cpu, "none")
    assert_close_but_for_inputs(logits_of(path, cpu, "native"), plain)
    assert_close_but_for_inputs(logits_of(path, with_8_bits(), "native"), plain, bits=8)


def test_the_packaged_model_is_what_transformers_own_loader_makes_of_it() -> None:
    path = packaged_model_path()
    config = load_model_config(path)
    model = build_model(config, select_ops("reference"))
    weights = named_weights(model)
    load_weights(path, model)

    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=hf_smollm2())
    read = expected["config"]
    assert config.rope.theta == read["rope_theta"]
    assert config.rms_norm_eps == read["rms_norm_eps"]
    assert config.max_position_embeddings == read["max_position_embeddings"]
    assert config.head_dim == read["head_dim"]
    assert config.eos_token_ids == {read["eos_token_id"]}
    assert config.tie_word_embeddings == read["tie_word_embeddings"]
    assert weights.keys() == expected["tensors"].keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected["tensors"][name]), name


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mamba.gguf"
    with gguf_writer(path, "mamba") as writer:
        writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    with pytest.raises(UnsupportedModel, match=r"'mamba' .*supported: .*llama"):
        load_model_config(path)


def test_a_split_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny-00001-of-00002.gguf"
    with gguf_writer(path) as writer:
        write_metadata(writer, tiny_hf_llama())
        writer.add_uint16("split.count", 2)
        writer.add_tensor("token_embd.weight", np.zeros((96, 64), np.float32))
    with pytest.raises(UnsupportedModel, match="one of 2 files"):
        load_model_config(path)


def test_another_quantisation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    hf = tiny_hf_llama()
    with gguf_writer(path) as writer:
        write_metadata(writer, hf)
        data = np.zeros((96, 64 // 32 * 18), np.uint8)
        writer.add_tensor("token_embd.weight", data, raw_dtype=Type.IQ4_NL)
    with pytest.raises(UnsupportedModel, match=r"token_embd.weight .* is IQ4_NL, supported: F32"):
        load(path, select_ops("reference"))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    hf = tiny_hf_llama()
    with gguf_writer(path) as writer:
        write_metadata(writer, hf)
        writer.add_tensor("token_embd.weight", np.zeros((96, 64), np.float32))
    with pytest.raises(WeightsError, match=r"missing: .*norm\.weight \[64\]"):
        load(path, select_ops("reference"))


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    hf = tiny_hf_llama()
    with gguf_writer(path) as writer:
        write_metadata(writer, hf)
        write_tensors(writer, hf, Type.F32)
        writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 4), np.float32))
    with pytest.raises(WeightsError, match=r"blk\.0\.ffn_gate_exps"):
        load(path, select_ops("reference"))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf(path)
    return path


@settings(max_examples=60, deadline=None)
@given(keep=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_an_error_of_ours(
    intact: Path, tmp_path_factory: pytest.TempPathFactory, keep: float
) -> None:
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    whole = intact.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(WeightsError):
        load(path, select_ops("reference"))


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 1500), value=st.integers(0, 255))
def test_a_damaged_header_is_an_error_of_ours_or_harmless(
    intact: Path, tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    whole = intact.read_bytes()
    path.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
    try:
        read_gguf(path)
    except WeightsError:
        return
