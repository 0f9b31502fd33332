import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from engine.errors import EngineError, UnsupportedModel, WeightsError
from engine.layers.layer import named_weights
from engine.models import build_model
from engine.weights import load_model_config, load_weights
from kernels.ops import Ops, select_ops
from tests.engine.tiny import (
    PoisonedCache,
    from_hf,
    hf_logits,
    load,
    logits_by_steps,
    random_token_ids,
    tiny_hf_llama,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_hf_llama().save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the single file, or remove those given as None."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()} | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, path)


def reference_load(folder: Path) -> None:
    load(folder, select_ops("reference"))


def logits(model, token_ids: list[int]) -> torch.Tensor:
    cache = PoisonedCache(model, num_blocks=8, block_size=8)
    return logits_by_steps(model, cache, [token_ids], lambda _, left: left)[0]


def test_sharded_files_give_the_same_model(ops: Ops, tmp_path: Path) -> None:
    hf = tiny_hf_llama()
    hf.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert (tmp_path / "model.safetensors.index.json").exists()
    token_ids = random_token_ids(20, 0)
    torch.testing.assert_close(
        logits(load(tmp_path, ops), token_ids), hf_logits(hf, token_ids), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_widened(dtype: torch.dtype, ops: Ops, tmp_path: Path) -> None:
    model = from_hf(tiny_hf_llama().to(dtype), tmp_path, ops)
    assert model.config.dtype == str(dtype).removeprefix("torch.")
    token_ids = random_token_ids(20, 0)
    hf = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = hf_logits(hf, token_ids)
    torch.testing.assert_close(logits(model, token_ids), expected, rtol=0, atol=1e-3)


def test_every_weight_arrives_exactly(folder: Path) -> None:
    model = build_model(load_model_config(folder), select_ops("reference"))
    weights = named_weights(model)
    load_weights(folder, model)
    stored = load_file(folder / "model.safetensors")
    assert weights.keys() == stored.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, stored[name]), name


def test_progress_rises_to_the_total(folder: Path) -> None:
    model = build_model(load_model_config(folder), select_ops("reference"))
    calls: list[tuple[int, int]] = []
    load_weights(folder, model, lambda done, total: calls.append((done, total)))
    total = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert {call[1] for call in calls} == {total}
    assert calls[-1] == (total, total)


def test_missing_unexpected_and_mismatching_tensors_are_all_named_with_shapes(folder: Path) -> None:
    edit(
        folder,
        **{
            "model.layers.1.self_attn.k_proj.weight": None,
            "model.layers.9.mlp.up_proj.weight": torch.zeros(2, 3),
            "model.norm.weight": torch.zeros(65),
        },
    )
    with pytest.raises(WeightsError) as raised:
        reference_load(folder)
    message = str(raised.value)
    assert "missing: model.layers.1.self_attn.k_proj.weight [32, 64]" in message
    assert "unexpected: model.layers.9.mlp.up_proj.weight [2, 3]" in message
    assert "model.norm.weight [65], the model has [64]" in message


def test_a_long_list_of_missing_tensors_is_cut(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    edit(folder, **{name: None for name in names if "layers.1" in name})
    with pytest.raises(WeightsError, match="and 4 more"):
        reference_load(folder)


def test_the_copy_of_a_tied_weight_and_old_buffers_are_ignored(tmp_path: Path) -> None:
    tiny_hf_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    edit(
        tmp_path,
        **{
            "lm_head.weight": torch.zeros(96, 64),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        },
    )
    reference_load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UnsupportedModel, match=f"pickled weights .{name}.*safetensors"):
        reference_load(folder)


def test_a_folder_without_weights_is_an_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="holds no safetensors file"):
        reference_load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_hf_llama().save_pretrained(tmp_path, max_shard_size="50KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(WeightsError, match=victim.name):
        reference_load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, 3000, -10])
def test_a_cut_file_is_an_error_of_ours(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged"):
        reference_load(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    edit(folder, **{"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match=r"model.norm.weight .* is I8"):
        reference_load(folder)


def test_a_path_that_holds_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"neither a \.gguf file nor a folder"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", json.dumps({"model_type": "llama"})])
def test_a_config_that_makes_no_sense_is_an_error_of_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError):
        load_model_config(tmp_path)
