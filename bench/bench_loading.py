"""Peak memory while weights are loaded, over what they take: `python bench/bench_loading.py`.

Writes random models in every form that a checkpoint may have, and loads each in a process of its
own. The peak is that of the resident set, mapped files included, above what the process had before
the model was built; the weights are all tensors that are there at the end. The aim is 1.15.
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type
from gguf_formats import write_gguf
from safetensors_formats import folder_formats, write_folder
from torch import Tensor

from engine.checkpoint.config import parse_model_config
from engine.config import Quantization
from engine.layers.layer import named_weights
from engine.models import build_model
from engine.models.decoder import DecoderForCausalLM
from engine.weights import load_model_config, load_weights
from kernels.ops import Ops, select_ops

QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    form: str
    weights_mb: float
    peak_mb: float
    read_mb: float

    @property
    def ratio(self) -> float:
        """What there is at most, over what stays."""
        return self.peak_mb / self.weights_mb


def model_config(size: int, num_layers: int) -> dict[str, object]:
    """A Llama with four KV heads, and a tied vocabulary as wide as eight states."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8 * size,
        "hidden_size": size,
        "intermediate_size": 3 * size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": size // 64,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }


SMALL = model_config(256, 1)
FOLDERS = folder_formats(group_size=128)
GGUFS = {"GGUF Q4_0": Type.Q4_0, "GGUF Q8_0": Type.Q8_0, "GGUF Q4_K": Type.Q4_K}
LOADS: dict[str, tuple[Quantization, ...]] = {
    "float32": ("none", "int8", "int4"),
    "bfloat16": ("none", "int8", "int4"),
    "AWQ": ("native", "none"),
    "GPTQ": ("native", "none"),
    "W8A8": ("native", "int4"),
    "FP8": ("none", "int8"),
    "GGUF Q4_0": ("native", "none"),
    "GGUF Q8_0": ("native", "int4"),
    "GGUF Q4_K": ("none", "int4"),
}


def write_model(folder: Path, form: str, config: dict[str, object], ops: Ops) -> Path:
    """A model of random weights in this form: a folder, or a GGUF file in this one."""
    parsed = parse_model_config(config, None)
    shapes = {name: w.shape for name, w in named_weights(build_model(parsed, ops)).items()}
    if form not in GGUFS:
        weights = ((name, torch.randn(shape)) for name, shape in shapes.items())
        write_folder(folder, config, FOLDERS[form], weights)
        return folder
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, parsed.num_layers)

    def tensors() -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        for name, shape in shapes.items():
            target = names.get_name(name, try_suffixes=(".weight",))
            assert target is not None, name
            yield target, torch.randn(shape).numpy()

    path = folder / "model.gguf"
    write_gguf(path, SimpleNamespace(**config), GGUFS[form], tensors())
    return path


def resident_bytes(key: str) -> int:
    """VmRSS now, or VmHWM, the most since `measure` began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(key))
    return int(line.split()[1]) << 10


def tensor_bytes() -> int:
    """Of all tensors that are there."""
    storages = [o.untyped_storage() for o in gc.get_objects() if type(o) is Tensor]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def measure(path: Path, small: Path, form: str, quantization: Quantization, ops: Ops) -> Row:
    """Load the model, in a process that does nothing else."""
    # All code that loading needs is mapped then, and is no part of the peak.
    load_weights(small, build_model(load_model_config(small), ops), quantization=quantization)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    others = tensor_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident_bytes("VmRSS")
    model: DecoderForCausalLM = build_model(load_model_config(path), ops)
    num_read = load_weights(path, model, quantization=quantization)
    peak = resident_bytes("VmHWM") - before
    weights = tensor_bytes() - others
    del model
    label = form if quantization == "none" else f"{form}, {quantization}"
    return Row(label, weights / 1e6, peak / 1e6, num_read / 1e6)


def bench(size: int, num_layers: int, forms: list[str], loads: list[str]) -> Iterator[Row]:
    """One row per form and way to load it, of these."""
    ops = select_ops("auto")
    # NOTE: a fork, before any thread exists: it has torch and the kernels already.
    context = multiprocessing.get_context("fork")
    for form in forms:
        with context.Pool(1) as writers, tempfile.TemporaryDirectory() as folder:
            paths = []
            for name, config in (("model", model_config(size, num_layers)), ("small", SMALL)):
                made = Path(folder) / name
                made.mkdir()
                paths.append(writers.apply(write_model, (made, form, config, ops)))
            for quantization in LOADS[form]:
                if quantization not in loads:
                    continue
                with context.Pool(1) as loaders:
                    yield loaders.apply(measure, (*paths, form, quantization, ops))


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1024, help="width of the model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--forms", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--loads", nargs="+", choices=QUANTIZATIONS, default=QUANTIZATIONS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print("| | weights MB | peak while loading MB | ratio | read MB |\n|---|---|---|---|---|")
    rows = []
    for row in bench(args.size, args.layers, args.forms, args.loads):
        rows.append(asdict(row) | {"ratio": row.ratio})
        if not args.json:
            print(
                f"| {row.form} | {row.weights_mb:.0f} | {row.peak_mb:.0f} | {row.ratio:.2f} "
                f"| {row.read_mb:.0f} |",
                flush=True,
            )
    if args.json:
        json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
