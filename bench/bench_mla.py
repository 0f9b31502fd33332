"""Latent attention in both forms, at DeepSeek-V2-Lite's sizes: `python bench/bench_mla.py`.

Per case the time of one layer's attention: absorbed and expanded on the C++ kernels, and absorbed
in plain PyTorch (the reference). The ratios beside them are what matters: decodes want the absorbed
form, prompts the expanded one, and the kernels should beat the reference.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kernels.mla import head_matmul
from kernels.ops import Ops, select_ops

HEADS, RANK, ROPE, NOPE, V_DIM, BLOCK = 16, 512, 64, 128, 128, 32
CASES = {
    "decode, 1 of 4096": [(1, 4096)],
    "decode, 8 of 1024": [(1, 1024)] * 8,
    "verify 3 drafts, 4 of 1024": [(4, 1024)] * 4,
    "prompt of 512": [(512, 512)],
    "chunk of 128 after 1024": [(128, 1152)],
}
REPEATS = 3


def paged(sequences: list[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
    """(latents, ropes, block table, query starts, context lengths) of the sequences."""
    counts = [-(-context // BLOCK) for _, context in sequences]
    table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    free = torch.randperm(sum(counts)).int()
    for row, count, ids in zip(table, counts, free.split(counts), strict=True):
        row[:count] = ids
    starts = torch.tensor([0, *(n for n, _ in sequences)]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in sequences]).int()
    latents = torch.randn(sum(counts), 1, BLOCK, RANK)
    return latents, torch.randn(sum(counts), 1, BLOCK, ROPE), table, starts, contexts


def absorbed(ops: Ops, sequences: list[tuple[int, int]]) -> Callable[[], torch.Tensor]:
    """Queries meet the latents."""
    cache, (q, w_uk, w_uv) = paged(sequences), operands(sequences)
    longest = max(n for n, _ in sequences)

    def run() -> torch.Tensor:
        q_latent = head_matmul(q[..., :NOPE], w_uk)
        out = ops.mla_paged_attention(q_latent, q[..., NOPE:], *cache, 0.07, longest)
        return head_matmul(out, w_uv)

    return run


def expanded(ops: Ops, sequences: list[tuple[int, int]]) -> Callable[[], torch.Tensor]:
    """Keys and values are made from the latents."""
    cache, (q, w_uk, w_uv) = paged(sequences), operands(sequences)
    longest = max(n for n, _ in sequences)
    return lambda: ops.mla_prefill_attention(
        q[..., :NOPE], q[..., NOPE:], w_uk, w_uv, *cache, 0.07, longest
    )


def operands(sequences: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, H, Dn + Dr] and the two halves of the up-projection."""
    num_tokens = sum(n for n, _ in sequences)
    w_uk, w_uv = torch.randn(HEADS, NOPE, RANK) / 23, torch.randn(HEADS, RANK, V_DIM) / 23
    return torch.randn(num_tokens, HEADS, NOPE + ROPE), w_uk, w_uv


def milliseconds(run: Callable[[], torch.Tensor]) -> float:
    """Median of a few runs after one to warm up."""
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    cpu, reference = select_ops("cpu"), select_ops("reference")
    print(f"{torch.get_num_threads()} threads, median of {REPEATS}, ms for one layer")
    print("| case | absorbed | expanded | absorbed / expanded | reference / absorbed |")
    print("|---|---|---|---|---|")
    for name, sequences in CASES.items():
        first, second = (milliseconds(form(cpu, sequences)) for form in (absorbed, expanded))
        plain = milliseconds(absorbed(reference, sequences))
        ratios = f"{first / second:.2f} | {plain / first:.2f}"
        print(f"| {name} | {first:.2f} | {second:.2f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
