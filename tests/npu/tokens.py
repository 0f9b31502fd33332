"""Prompts, and the NPU's code on the simulator."""

import torch

import tests.npu.simulated_experts  # noqa: F401  (and the simulator, which it imports)
from kernels.ascend.options import NpuOptions
from kernels.npu import NpuOps


def npu_ops(**options: bool) -> NpuOps:
    return NpuOps(device=torch.device("cpu"), dtype=torch.float32, options=NpuOptions(**options))


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
