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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.config import Quantization
from engine.layers.layer import named_weights
from engine.models import build_model
from engine.models.decoder import DecoderForCausalLM
from engine.weights import load_model_config, load_weights
from kernels.ops import Ops, select_ops
from tests.gguf_writer import gguf_writer, write_shape

GROUP = 128
W8A8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
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
        "tie_word_embeddings": True,
    }


def words(rows: int, columns: int) -> Tensor:
    """Eight random values each."""
    return torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32)


def awq(name: str, out: int, size: int) -> dict[str, Tensor]:
    """In four bits, outputs side by side."""
    stem, groups = name.removesuffix(".weight"), size // GROUP
    return {
        f"{stem}.qweight": words(size, out // 8),
        f"{stem}.qzeros": words(groups, out // 8),
        f"{stem}.scales": torch.rand(groups, out).half(),
    }


def gptq(name: str, out: int, size: int) -> dict[str, Tensor]:
    """In four bits, inputs side by side."""
    parts = awq(name, out, size)
    return parts | {f"{name.removesuffix('.weight')}.qweight": words(size // 8, out)}


def w8a8(name: str, out: int, size: int) -> dict[str, Tensor]:
    """In eight bits, a scale per output."""
    values = torch.randint(-127, 127, (out, size), dtype=torch.int8)
    return {name: values, f"{name}_scale": torch.rand(out, 1)}


def fp8(name: str, out: int, size: int) -> dict[str, Tensor]:
    """In blocks."""
    scale = torch.rand(-(-out // 128), -(-size // 128))
    return {name: torch.randn(out, size).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def plain(dtype: torch.dtype) -> Callable[[str, int, int], dict[str, Tensor]]:
    """In floats."""
    return lambda name, out, size: {name: torch.randn(out, size).to(dtype)}


SMALL = model_config(256, 1)
Pack = Callable[[str, int, int], dict[str, Tensor]]
FOLDERS: dict[str, tuple[Pack, dict[str, object] | None]] = {
    "float32": (plain(torch.float32), None),
    "bfloat16": (plain(torch.bfloat16), None),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "W8A8": (
        w8a8,
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": W8A8}}},
    ),
    "FP8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}
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


def write_folder(folder: Path, form: str, config: dict[str, object], ops: Ops) -> Path:
    """A model folder whose projections are in this form, and the rest in bfloat16."""
    pack, quantization_config = FOLDERS[form]
    if quantization_config is not None:
        config = config | {"quantization_config": quantization_config}
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, weight in named_weights(build_model(load_model_config(folder), ops)).items():
        if "_proj." in name or (quantization_config is None and weight.dim() == 2):
            tensors |= pack(name, weight.shape[0], weight.shape[1])
        else:
            tensors[name] = torch.randn(weight.shape).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_gguf(folder: Path, form: str, config: dict[str, object], ops: Ops) -> Path:
    """A GGUF file whose matrices are in this form."""
    (folder / "config.json").write_text(json.dumps(config))
    parsed = load_model_config(folder)
    kind, path = GGUFS[form], folder / "model.gguf"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, parsed.num_layers)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    with gguf_writer(path) as writer:
        defaults = {
            "max_position_embeddings": parsed.max_position_embeddings,
            "rms_norm_eps": parsed.rms_norm_eps,
        }
        write_shape(writer, SimpleNamespace(**(defaults | config)))
        for name, weight in named_weights(build_model(parsed, ops)).items():
            target = names.get_name(name, try_suffixes=(".weight",))
            if weight.dim() == 1:
                writer.add_tensor(target, np.ones(weight.shape, np.float32))
                continue
            # Bytes below 64 keep the scales, which are float16, finite.
            shape = (weight.shape[0], weight.shape[1] // block_size * block_bytes)
            writer.add_tensor(target, rng.integers(0, 64, shape, np.uint8), raw_dtype=kind)
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
            write = write_gguf if form in GGUFS else write_folder
            paths = []
            for name, config in (("model", model_config(size, num_layers)), ("small", SMALL)):
                made = Path(folder) / name
                made.mkdir()
                paths.append(writers.apply(write, (made, form, config, ops)))
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
