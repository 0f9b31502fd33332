"""Loading keeps few weights in two forms at a time, and reads no more than it must."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from torch import nn

from engine.collectives import SingleGroup
from engine.errors import WeightsError
from engine.layers.linear import FusedLinear
from engine.models import build_model
from engine.parallel import Parallel
from engine.parallel_config import ParallelConfig
from engine.weights import load_model_config, load_weights
from kernels.ops import select_ops
from tests.engine.gguf_files import tiny_gguf
from tests.engine.quantized_files import write_quantized
from tests.engine.tiny_families import tiny_family


def num_packed(model: nn.Module) -> int:
    count = 0
    for layer in model.modules():
        if isinstance(layer, FusedLinear):
            try:
                list(layer.weights())
            except AssertionError:
                count += 1
    return count


def test_a_layer_is_packed_as_soon_as_it_is_filled(tmp_path: Path) -> None:
    tiny_family("qwen2", num_hidden_layers=6).save_pretrained(tmp_path)
    model = build_model(load_model_config(tmp_path), select_ops("reference"))
    assert num_packed(model) == 0
    seen: list[int] = []
    load_weights(tmp_path, model, lambda done, total: seen.append(num_packed(model)), num_threads=1)
    # Of embedding, head, 13 norms and 24 projections, at most the former are done before.
    assert all(packed >= calls - 15 for calls, packed in enumerate(seen, start=1))
    assert seen[-1] == 24


def test_the_peak_is_little_above_the_weights() -> None:
    """In a process of its own, mapped files included. The benchmark has every form."""
    bench = Path(__file__).parents[2] / "bench" / "bench_loading.py"
    command = [sys.executable, str(bench), "--json", "--loads", "native", "int4"]
    # NOTE: some 8 MB are there whatever the model's size: of 72 MB, what 8 layers of AWQ take, they
    # would be most of what is allowed.
    command += ["--forms", "AWQ", "GGUF Q8_0", "--layers", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    ratios = {row["form"]: row["ratio"] for row in json.loads(done.stdout)}
    assert len(ratios) == 3
    assert max(ratios.values()) < 1.15, ratios


@pytest.mark.parametrize("form", ["awq", "gptq", "fp8", "modelslim", "plain", "gguf"])
def test_a_rank_reads_its_share_of_the_files(form: str, tmp_path: Path) -> None:
    path = tmp_path
    if form == "gguf":
        path = tmp_path / "tiny.gguf"
        tiny_gguf(path, GGMLQuantizationType.Q4_0, hidden_size=128)
    elif form == "plain":
        tiny_family("qwen2").save_pretrained(path)
    else:
        write_quantized(path, form)
    config = load_model_config(path)

    def num_bytes_read(size: int, rank: int) -> int:
        group = SingleGroup()
        group.size, group.rank = size, rank
        parallel = Parallel(config=ParallelConfig(tp_size=size, rank=rank), tp=group)
        return load_weights(path, build_model(config, select_ops("reference"), parallel))

    whole = num_bytes_read(1, 0)
    for rank in range(2):
        assert 0.45 * whole < num_bytes_read(2, rank) < 0.6 * whole


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    tiny_family("qwen3").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    model = build_model(load_model_config(tmp_path), select_ops("reference"))
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged"):
        load_weights(tmp_path, model)
