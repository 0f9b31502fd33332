"""The wheel is the real one: its schemas, its shape functions, its TorchAir."""

import pytest
import torch
from torch import Tensor, nn

from tests.npu.ge import ge_graph
from tests.npu.wheel import torch_npu


def test_the_wheel_is_the_version_that_the_lock_file_names() -> None:
    assert torch_npu.__version__ == "2.13.0"
    assert torch.__version__.startswith("2.13.0")


def test_a_shape_function_of_the_wheel_runs() -> None:
    x = torch.empty(5, 64, dtype=torch.bfloat16, device="meta")
    y, rstd = torch.ops.npu.npu_rms_norm(x, torch.empty_like(x[0]), 1e-6)
    assert (y.shape, y.dtype) == (x.shape, torch.bfloat16)
    assert (tuple(rstd.shape), rstd.dtype) == ((5, 1), torch.float32)


def test_a_schema_of_the_wheel_refuses_what_it_does_not_know() -> None:
    x = torch.empty(5, 64, device="meta")
    with pytest.raises(RuntimeError, match="epsilonn"):
        torch.ops.npu.npu_rms_norm(x, x[0], epsilonn=1e-6)


class Norm(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = torch.ops.npu.npu_rms_norm(x, weight, 1e-6)[0]
        return torch.ops.npu.npu_swiglu(out)


def test_a_module_becomes_a_graph_of_the_graph_engine() -> None:
    graph = ge_graph(Norm(), torch.randn(4, 64), torch.randn(64))
    assert graph.counts() == {"RmsNorm": 1, "SwiGlu": 1}
    (norm,) = graph.of("RmsNorm")
    (swiglu,) = graph.of("SwiGlu")
    assert graph.producers(swiglu) == [norm]
