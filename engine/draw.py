"""What draws tokens: a number for each, and the options of requests as tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.request import SamplingParams
from kernels.drawing import DrawParams

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), a pure function of the two.

    Source: SplitMix64; Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    mixed = _mix(_mix(seeds + _GAMMA) + (positions + np.uint64(1)) * _GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw_params(
    sampling: Sequence[SamplingParams],
    vocab_size: int,
    device: torch.device,
    precision: torch.dtype = torch.float64,
) -> DrawParams:
    """Collect the options of rows whose temperature is above zero. precision: of top_p."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(dtype).unsqueeze(1).to(device)

    top_k = [s.top_k if uses_top_k(s, vocab_size) else vocab_size for s in sampling]
    used_top_k = [k for k in top_k if k < vocab_size]
    log_min_p = torch.tensor([s.min_p for s in sampling], dtype=torch.float64).log()
    return DrawParams(
        column([1.0 / s.temperature for s in sampling], torch.float32),
        column(log_min_p.tolist(), torch.float32) if any(s.min_p > 0.0 for s in sampling) else None,
        column([float(k) for k in top_k], torch.int64) if used_top_k else None,
        column([s.top_p for s in sampling], precision)
        if any(s.top_p < 1.0 for s in sampling)
        else None,
        max(used_top_k, default=0),
    )


def uses_top_k(sampling: SamplingParams, vocab_size: int) -> bool:
    """Whether top_k removes anything."""
    return 0 < sampling.top_k < vocab_size
