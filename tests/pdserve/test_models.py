"""From `model:` to files that can be served, or to a refusal that says what is wrong with them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pdserve.errors import BadModel, ModelNotFound
from pdserve.models import default_served_name, resolve_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOKENIZER = {"model": {"vocab": {"a": 0}}}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a model; its contents are the workers' business."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    save_file({"w": torch.ones(100, 10)}, tmp_path / "model.safetensors")
    return tmp_path


def write_gguf(
    path: Path,
    architecture: str = "llama",
    tokens: tuple[str, ...] = ("a",),
    **values: str,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    if tokens:
        writer.add_token_list(tokens)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in values.items():
        writer.add_string(key, value)
    writer.add_tensor("token_embd.weight", np.ones((64, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_packaged_model_is_found_without_importing_its_package() -> None:
    path = resolve_model("smollm2-135m-instruct")
    assert path.suffix == ".gguf"
    assert path.read_bytes()[:4] == b"GGUF"


def test_a_folder_and_a_gguf_file_are_taken_as_they_are(folder: Path) -> None:
    path = write_gguf(folder / "x.gguf")
    assert resolve_model(str(folder)) == folder
    assert resolve_model(str(path)) == path
    assert default_served_name(str(path)) == "x"
    assert default_served_name(str(folder)) == folder.name


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_is_refused_with_what_it_lacks(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(BadModel, match=f"{folder} has no .*{missing.removeprefix('model')}"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "config.json",
            {"architectures": ["Mamba"]},
            r"architectures is ..Mamba.., supported: .*Lla",
        ),
        ("config.json", {}, "architectures is null, supported: .*LlamaForCausalLM"),
        ("config.json", {"architectures": [["x"]]}, "architectures is .*, supported: "),
        ("config.json", {"vocab_size": None}, "config.json has no vocab_size"),
        ("config.json", {"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: silu"),
        ("config.json", {"num_attention_heads": "four"}, "a value is not of its kind: .*four"),
        (
            "config.json",
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope type is 'longrope', supported: default, linear, llama3, yarn, dynamic",
        ),
        (
            "config.json",
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method is 'bitsandbytes', supported: fp8, awq, gptq",
        ),
        ("config.json", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention, supported"),
        (
            "quant_model_description.json",
            {"model.layers.0.mlp.up_proj.weight": "W4A8"},
            "has W4A8, supported: FLOAT, W8A8",
        ),
        ("config.json", '{"architectures": ["Lla', "is no JSON, or damaged: .*line 1"),
        ("config.json", "[]", "holds no JSON object"),
        ("config.json", b"\xff\xfe", "is no JSON, or damaged: "),
        ("tokenizer.json", "", "is no JSON, or damaged: "),
        ("tokenizer.json", "[" * 100_000, "is no JSON, or damaged: "),
        ("tokenizer.json", {"model": {"vocab": {}}}, "model.vocab is missing or empty"),
        ("tokenizer_config.json", "{", "is no JSON, or damaged: "),
        ("generation_config.json", "3", "holds no JSON object"),
        (INDEX, {"weight_map": {"w": "gone.safetensors"}}, "names gone.safetensors, which is not"),
        (INDEX, {"weight_map": 3}, "weight_map is missing or empty"),
        ("model.safetensors", b"\x10", "is damaged: it has 1 bytes"),
        ("model.safetensors", b"<html>not found</html>", "wrong length of its header"),
        ("model.safetensors", b"\x04" + bytes(7) + b"{}}}", "its header cannot be read"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name_and_what_is_wrong(
    folder: Path, name: str, content: Any, message: str
) -> None:
    if isinstance(content, dict):
        whole = CONFIG if name == "config.json" and content else {}
        content = json.dumps(whole | content)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadModel, match=f"{re.escape(str(folder / name))}.*{message}"):
        resolve_model(str(folder))


def test_weights_that_were_cut_off_are_refused_with_both_sizes(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    message = f"it has {len(whole) - 1} bytes, and should have {len(whole)} by its header"
    with pytest.raises(BadModel, match=message):
        resolve_model(str(folder))


def test_a_gguf_file_that_was_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf")
    whole = path.read_bytes()
    for length in (0, 3, 20, 60, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BadModel, match=f"{path} is no GGUF file, or damaged|it is empty"):
            resolve_model(str(path))


def test_a_gguf_file_of_another_architecture_or_without_tokens_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "mamba")
    with pytest.raises(BadModel, match=r'general.architecture is "mamba", supported: .*llama, '):
        resolve_model(str(path))
    with pytest.raises(BadModel, match=r"tokenizer\.ggml.tokens is missing"):
        resolve_model(str(write_gguf(tmp_path / "y.gguf", tokens=())))
    path = write_gguf(tmp_path / "z.gguf", **{"llama.rope.scaling.type": "longrope"})
    with pytest.raises(BadModel, match=r"z\.gguf: rope\.scaling\.type is 'longrope'.*supported"):
        resolve_model(str(path))


def test_tensors_of_a_type_that_is_not_read_are_refused_by_name(
    folder: Path, tmp_path: Path
) -> None:
    path = folder / "model.safetensors"
    save_file({"w": torch.ones(100, 10, dtype=torch.int8)}, path)
    with pytest.raises(BadModel, match=f"^w in {path} is I8, supported: BF16, F16, F32$"):
        resolve_model(str(folder))
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq"}})
    )
    assert resolve_model(str(folder)) == folder
    path = write_gguf(tmp_path / "x.gguf")
    whole = path.read_bytes()
    place = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    assert whole[place : place + 4] == bytes(4)  # F32
    path.write_bytes(whole[:place] + bytes([20, 0, 0, 0]) + whole[place + 4 :])
    with pytest.raises(BadModel, match=f"^tensor token_embd.weight in {path} is IQ4_NL, supported"):
        resolve_model(str(path))


def test_looking_at_files_needs_no_torch() -> None:
    code = "import sys, pdserve.model_fit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_name_that_is_nothing_is_refused_with_what_it_could_be(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m-instruct"):
        resolve_model("smolm2")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))
