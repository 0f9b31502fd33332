"""Weights in float, int8, int4 and as the GGUF file has them: decode steps and perplexity.

One engine of each, in turns in one run; shown are medians and ratios to float. Activations that
meet weights of 4 bits are of 8 bits, and of 16 where it says so. With --llama-cpp
FOLDER, in which `npm install node-llama-cpp` was run, llama.cpp decodes the same file in turns too.
--formats times decode steps of each format that is kept, beside float32 that takes turns with it.
--perplexity compares them on the text of the licence, a fixed one, and beside them the same weights
rounded to nearest in every format that checkpoints have: each is written, and loaded as it is held.
What it is compared with is loaded from a file of the float32 numbers that it stands for.
"""

import argparse
import gc
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_args

import torch
from gguf import GGMLQuantizationType as Type
from gguf_formats import write_gguf
from packaged_model import gguf_weights, hf_config, hf_weights
from safetensors_formats import folder_formats, write_folder
from text_perplexity import TEXT, perplexity
from worker_engine import BenchEngine, default_output

from engine.config import Quantization
from kernels.cpu.options import ActivationBits, CpuOptions
from kernels.ops import select_ops
from pdserve.models import resolve_model
from proxy.tokenizer import load_tokenizer

BATCHES = (1, 4, 8, 16, 32)
FORMAT_BATCHES = (1, 32)
CONTEXT, PROMPT = 96, 1024
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4", "native")
EIGHT_BITS, SIXTEEN_BITS = CpuOptions(activation_bits=8), CpuOptions(activation_bits=16)
"""Of what meets 4-bit weights; the first is what a service takes."""
ENGINES = {
    **{name: (name, EIGHT_BITS) for name in QUANTIZATIONS},
    "int4, 16 bits": ("int4", SIXTEEN_BITS),
    "native, 16 bits": ("native", SIXTEEN_BITS),
}
# Of the packaged model's widths, 576 and 1536, no larger power of two divides both.
FOLDERS = folder_formats(group_size=64)
NOT_KEPT = ("FP8",)
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
GGUFS = {f"GGUF {kind}": Type[kind] for kind in ("Q4_0", "Q5_0", "Q5_1", "Q8_0", *K_QUANTS)}
FORMATS = (*QUANTIZATIONS, *(name for name in FOLDERS if name != "float32"), *GGUFS)
KEPT = tuple(name for name in FORMATS if name not in ("none", *NOT_KEPT))
PEER = "llama.cpp, batch 1"


def bench_decode(model: str, threads: int, rounds: int, llama_cpp: Path | None) -> dict[str, float]:
    """Median ms of each step, by its name; printed as a table."""
    engines = {
        name: BenchEngine(
            model, threads, quantization=quantization, cpu=options, kv_cache_bytes=256 << 20
        )
        for name, (quantization, options) in ENGINES.items()
    }
    times: dict[str, list[float]] = {}
    version = ""
    for _ in range(rounds):
        for batch in BATCHES:
            for name, engine in engines.items():
                step_s = engine.decode(batch, CONTEXT).step_s
                times.setdefault(f"{name}, batch {batch}", []).append(1e3 * step_s)
        for name, engine in engines.items():
            times.setdefault(f"{name}, {PROMPT} tokens", []).append(1e3 * engine.prefill_s(PROMPT))
        if llama_cpp is not None:
            peer_ms, version = llama_cpp_ms(llama_cpp, model, threads)
            times.setdefault(PEER, []).append(peer_ms)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{threads} threads, medians of {rounds} rounds, ms a step (times as fast as none)\n")
    print(f"| | {' | '.join(ENGINES)} |\n|---|{'---|' * len(ENGINES)}")
    for load in [*(f"batch {batch}" for batch in BATCHES), f"{PROMPT} tokens"]:
        plain = medians[f"none, {load}"]
        steps = [medians[f"{name}, {load}"] for name in ENGINES]
        print(f"| {load} | {' | '.join(f'{ms:.2f} ({plain / ms:.2f}x)' for ms in steps)} |")
    if llama_cpp is not None:
        ratios = {name: medians[PEER] / medians[f"{name}, batch 1"] for name in ENGINES}
        text = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
        print(f"\nllama.cpp {version}: {medians[PEER]:.2f} ms at batch 1; as fast as that: {text}")
    return medians


def llama_cpp_ms(folder: Path, model: str, threads: int) -> tuple[float, str]:
    """Median of a decode step of llama.cpp, and its version."""
    code = (Path(__file__).parent / "llama_cpp_decode.mjs").read_bytes()
    # It starts itself again to try its binary, so it has to be a file, and beside its modules.
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".mjs") as script:
        script.write(code)
        script.flush()
        command = ["node", script.name, str(resolve_model(model)), str(threads), "24"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=120
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return float(found["median_ms"]), str(found["version"])


@dataclass(frozen=True, slots=True)
class Rounded:
    """A checkpoint, what to load it as, and one of the float32 numbers that it stands for."""

    path: Path
    quantization: Quantization
    plain: Path


def rounded(model: Path, name: str, folder: Path) -> Rounded:
    """The weights of a .gguf file rounded to a format, in a folder that is empty."""
    config, path, plain = hf_config(model), folder / "rounded", folder / "plain"
    if name in GGUFS:
        shape = SimpleNamespace(**config)
        kept = write_gguf(path.with_suffix(".gguf"), shape, GGUFS[name], gguf_weights(model))
        write_gguf(plain.with_suffix(".gguf"), shape, Type.F32, kept.items())
        return Rounded(path.with_suffix(".gguf"), "native", plain.with_suffix(".gguf"))
    path.mkdir()
    plain.mkdir()
    weights = write_folder(path, config, FOLDERS[name], hf_weights(model))
    write_folder(plain, config, FOLDERS["float32"], weights.items())
    return Rounded(path, "none" if name in NOT_KEPT else "native", plain)


def bench_formats(
    model: str, threads: int, rounds: int, names: Sequence[str], options: CpuOptions
) -> dict[str, list[tuple[float, float]]]:
    """(float32, format) ms of the steps of each round, by format and batch; printed as a table."""
    print(
        f"{threads} threads, medians of {rounds} rounds, ms a step; inputs of products with 4-bit "
        f"weights in {options.activation_bits} bits\n"
    )
    columns = [f"batch {batch}, float32 | format | faster" for batch in FORMAT_BATCHES]
    print(f"| | held as | {' | '.join(columns)} |\n|---|---|{'---|' * 3 * len(columns)}")
    plain = _engine(resolve_model(model), "none", threads, options)
    results: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found = checkpoint(resolve_model(model), name, Path(folder))
            engine = _engine(found.path, found.quantization, threads, options)
        cells = []
        for batch in FORMAT_BATCHES:
            pairs = [
                [turn.decode(batch, CONTEXT).step_s for turn in (plain, engine)]
                for _ in range(rounds)
            ]
            steps = results[f"{name}, batch {batch}"] = [(1e3 * a, 1e3 * b) for a, b in pairs]
            float32_ms, ms = (statistics.median(row) for row in zip(*steps, strict=True))
            ratio = statistics.median(before / after for before, after in steps)
            cells.append(f"{float32_ms:.2f} | {ms:.2f} | {ratio:.2f}x")
        print(f"| {name} | {found.quantization} | {' | '.join(cells)} |", flush=True)
        # NOTE: an engine is part of a cycle, and memory does not hold one of each format.
        del engine
        gc.collect()
    return results


def _engine(
    path: Path, quantization: Quantization, threads: int, options: CpuOptions
) -> BenchEngine:
    return BenchEngine(
        path, threads, quantization=quantization, cpu=options, kv_cache_bytes=256 << 20
    )


def checkpoint(model: Path, name: str, folder: Path) -> Rounded:
    """The model itself, to be loaded in a quantisation, or its weights in another format."""
    if name in FOLDERS or name in GGUFS:
        return rounded(model, name, folder)
    return Rounded(model, cast(Quantization, name), model)


def bench_perplexity(model: Path, names: Sequence[str]) -> dict[str, float]:
    """Of the kernels, and of plain PyTorch on the dequantised weights; printed as a table."""
    token_ids = load_tokenizer(model).encode(TEXT.read_text())
    reference, with_8_bits = select_ops("reference"), select_ops("cpu", cpu=EIGHT_BITS)
    with_16_bits = select_ops("cpu", cpu=SIXTEEN_BITS)
    plain = perplexity(model, "none", with_8_bits, token_ids)
    results = {"none": plain}
    print(f"\nperplexity on {TEXT.name}, {len(token_ids)} tokens; in float32: {plain:.4f}\n")
    print(
        "| | held as | kernels | dequantised | difference | to float32 | 16 bits | difference |"
        "\n|---|---|---|---|---|---|---|---|"
    )
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found = checkpoint(model, name, Path(folder))
            held = found.quantization if found.plain == model else "none"
            expected = perplexity(found.plain, held, reference, token_ids)
            ours = perplexity(found.path, found.quantization, with_8_bits, token_ids)
            finer = perplexity(found.path, found.quantization, with_16_bits, token_ids)
        results |= {name: ours, f"{name}, dequantised": expected, f"{name}, 16 bits": finer}
        print(
            f"| {name} | {found.quantization} | {ours:.4f} | {expected:.4f} "
            f"| {ours / expected - 1:+.5%} | {ours / plain - 1:+.3%} "
            f"| {finer:.4f} | {finer / expected - 1:+.5%} |",
            flush=True,
        )
    return results


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--perplexity", action="store_true")
    parser.add_argument(
        "--formats",
        nargs="*",
        choices=FORMATS,
        help="time these, or all that are kept; with --perplexity: of these alone",
    )
    parser.add_argument(
        "--activation-bits", type=int, choices=get_args(ActivationBits), default=8, help="of steps"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=default_output("bench_quantization.json")
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results: object
    if arguments.perplexity:
        results = bench_perplexity(resolve_model(arguments.model), arguments.formats or FORMATS)
    elif arguments.formats is not None:
        results = bench_formats(
            arguments.model,
            arguments.threads,
            arguments.rounds,
            arguments.formats or KEPT,
            CpuOptions(activation_bits=arguments.activation_bits),
        )
    else:
        results = bench_decode(
            arguments.model, arguments.threads, arguments.rounds, arguments.llama_cpp
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
