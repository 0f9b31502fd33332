"""A configuration that asks of a model what it does not have ends before anything starts."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from pdserve.config_file import load_config
from pdserve.errors import ConfigError
from pdserve.model_files import ModelFiles
from pdserve.model_fit import fit
from pdserve.models import find_model
from tests.engine.gguf_files import tiny_gguf
from tests.engine.quantized_files import FORMATS, write_quantized
from tests.engine.tiny import tiny_hf_llama
from tests.engine.tiny_families import FAMILIES

SMOLLM2_BLOCK = 2 * 30 * 3 * 64 * 4 * 32
"""Keys and values of 30 layers, 3 heads of 64 float32, 32 tokens."""


def refused(model: ModelFiles, *overrides: str) -> list[str]:
    try:
        fit(load_config(None, overrides), model)
    except ConfigError as error:
        return list(error.problems)
    return []


def served(folder: Path) -> ModelFiles:
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return find_model(str(folder))


@pytest.fixture(scope="module")
def packaged() -> ModelFiles:
    return find_model("smollm2-135m-instruct")


def test_the_packaged_model_goes_with_the_defaults(packaged: ModelFiles) -> None:
    assert refused(packaged) == []
    assert refused(packaged, "quantization=native", "prefiller.tp=3", "decoder.tp=3") == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["decoder.kv_cache_bytes=1MiB"],
            f"decoder.kv_cache_bytes is 1048576: must be at least {SMOLLM2_BLOCK}, which one block "
            "of 32 tokens (block_size) takes",
        ),
        (
            ["prefiller.kv_cache_bytes=1MiB", "kv_cache_dtype=int8", "block_size=128"],
            f"prefiller.kv_cache_bytes is 1048576: must be at least {2 * 30 * 3 * 68 * 128}, "
            "which one block of 128 tokens (block_size) takes",
        ),
        (["max_model_len=8193"], "max_model_len is 8193: the model takes 8192 tokens at most"),
        (
            ["decoder.kv_cache_bytes=32MiB", "max_model_len=1000"],
            f"decoder.kv_cache_bytes is {32 << 20}: max_model_len 1000 needs at least "
            f"{32 * SMOLLM2_BLOCK}",
        ),
        (["decoder.tp=2"], "decoder.tp: num_heads is 9, not a multiple of tp_size 2"),
        (["prefiller.pp=31"], "prefiller.pp: pp is 31, the model has 30 layers"),
        (
            ["prefiller.pp=2", "prefiller.pp_layers=[10, 21]"],
            "prefiller.pp: pp_layers is [10, 21]: must be 2 numbers above 0, of the model's 30 "
            "layers together",
        ),
        (
            ["decoder.dp=2", "decoder.ep=2"],
            "decoder.ep: ep_size is 2, the model has no experts",
        ),
        (
            ["decoder.dp=2", "decoder.layer_sharding=[o_projj]"],
            "decoder.layer_sharding: layer_sharding names o_projj: the model has down_proj, "
            "gate_proj, gate_up_proj, k_proj, o_proj, q_proj, qkv_proj, up_proj, v_proj",
        ),
        (
            ["speculation=mtp"],
            "speculation is mtp, but the model has no MTP layer: use ngram or none",
        ),
    ],
)
def test_a_value_that_does_not_go_with_the_model_is_refused_with_its_limit(
    overrides: list[str], problem: str, packaged: ModelFiles
) -> None:
    assert refused(packaged, *overrides) == [problem]


def test_as_many_bytes_as_a_block_takes_are_enough(packaged: ModelFiles) -> None:
    size = f"decoder.kv_cache_bytes={SMOLLM2_BLOCK}"
    assert refused(packaged, size) == []
    assert refused(packaged, size, "block_size=33") != []
    assert refused(packaged, size, "block_size=1024", "decoder.num_blocks=1") == []
    assert refused(packaged, size, "block_size=64", "decoder.tp=3") == []
    two = f"decoder.kv_cache_bytes={2 * SMOLLM2_BLOCK}"
    assert refused(packaged, two, "max_model_len=64") == []
    assert refused(packaged, two, "max_model_len=65") != []
    assert refused(packaged, "max_model_len=8192") == []
    assert refused(packaged, "prefiller.kv_cache_bytes=2MiB", "max_model_len=8192") == []


def test_a_role_without_workers_is_not_looked_at(packaged: ModelFiles) -> None:
    small = ["prefiller.kv_cache_bytes=1MiB"]
    assert refused(packaged, *small) != []
    assert refused(packaged, *small, "prefiller.replicas=0") == []
    assert refused(packaged, "prefiller.replicas=0", "prefiller.tp=2") == []


def test_every_problem_of_both_roles_is_named(packaged: ModelFiles) -> None:
    found = refused(packaged, "prefiller.tp=2", "decoder.kv_cache_bytes=1MiB")
    assert [problem.split()[0] for problem in found] == [
        "prefiller.tp:",
        "decoder.kv_cache_bytes",
    ]


NATIVE = "holds no weights in a form that can be kept: use auto, none, int8 or int4"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_native_takes_a_folder_of_weights_in_16_bits(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    make: Callable[[], PreTrainedModel] = FAMILIES[name]
    make().to(dtype).save_pretrained(tmp_path)
    found = refused(served(tmp_path), "quantization=native")
    if dtype == torch.float32:
        assert found == [f"quantization is native, but {tmp_path} {NATIVE}"]
    else:
        assert found == []
    assert refused(served(tmp_path), "quantization=auto") == []


@pytest.mark.parametrize("name", FORMATS)
def test_native_takes_the_formats_that_can_be_kept(name: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, name)
    is_kept = FORMATS[name][2]
    # In which order GPTQ has its inputs is in no header: the workers refuse it.
    is_taken = is_kept or name == "gptq, desc_act"
    assert (refused(served(tmp_path), "quantization=native") == []) == is_taken


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q4_0, Type.Q8_0], ids=lambda k: k.name)
def test_native_takes_a_gguf_file_that_is_not_in_float32(kind: Type, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_gguf(path, kind)
    found = refused(find_model(str(path)), "quantization=native")
    assert found == ([f"quantization is native, but {path} {NATIVE}"] if kind == Type.F32 else [])


def test_up_says_so_at_once_with_status_2(tmp_path: Path) -> None:
    tiny_hf_llama().save_pretrained(tmp_path)
    served(tmp_path)
    command = [sys.executable, "-m", "pdserve", "up", "--model", str(tmp_path)]
    command += ["--set", "quantization=native", "--set", "decoder.tp=3"]
    done = subprocess.run(
        [*command, "--state-dir", str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert re.fullmatch(f"error: quantization is native, but .* {NATIVE}", first)
    assert second == "error: decoder.tp: num_heads is 4, not a multiple of tp_size 3"
