"""The wheel's own schemas and shape functions take every call of a sparse block over ranks, in the
sizes of published models; what comes out has the shapes and dtypes that the code counts on.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.checkpoint.config import parse_model_config
from engine.config import MoEConfig
from engine.layers.layer import pack_weights
from engine.layers.moe import MoE
from engine.parallel_config import EplbConfig, EplbMode, MoEComm
from kernels.ascend.gated import NpuInt8Experts
from kernels.ascend.linear import NpuGroupedInt8Linear
from kernels.ascend.options import NpuOptions
from kernels.npu import NpuOps
from tests.npu.published import PUBLISHED, ShapeGroup, one_rank

META = torch.device("meta")
ROWS = 64  # that a rank hands over in a step at most
pytestmark = pytest.mark.usefixtures("all_shapes")
GATING = {"Qwen3-30B-A3B": "npu_moe_gating_top_k_softmax", "DeepSeek-V3": "npu_moe_gating_top_k"}


class Outputs(TorchDispatchMode):
    """What the NPU's operators return, by their names, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "npu":
            tensors = [out] if isinstance(out, Tensor) else list(out)
            self.found.append((func._schema.name.removeprefix("npu::"), tensors))
        return out

    def of(self, name: str) -> list[list[tuple[tuple[int, ...], torch.dtype]]]:
        """Shapes and dtypes of every call of an operator."""
        return [[(tuple(t.shape), t.dtype) for t in ts] for n, ts in self.found if n == name]


def moe_of(name: str) -> tuple[int, MoEConfig]:
    config = parse_model_config(PUBLISHED[name] | {"num_hidden_layers": 2})
    assert config.moe is not None
    return config.hidden_size, config.moe


def block(
    name: str, tp_size: int, ep_size: int, moe_comm: MoEComm, *, is_w8a8: bool
) -> tuple[MoE, int]:
    """One rank's sparse block, and how many experts it holds."""
    hidden_size, config = moe_of(name)
    parallel = one_rank(
        tp_size,
        ep_size,
        moe_comm=moe_comm,
        exchange=ShapeGroup(0, ep_size),
        exchange_rows=ROWS,
    )
    num_redundant = max(ep_size - config.num_experts, 0)
    mode: EplbMode = "dynamic" if num_redundant else "off"
    eplb = EplbConfig(mode=mode, num_redundant_experts=num_redundant)
    parallel = replace(parallel, config=replace(parallel.config, eplb=eplb))
    ops = NpuOps(device=META, product="A3", options=NpuOptions(quantize_activations=is_w8a8))
    with META:
        moe = MoE(hidden_size, config, ops=ops, parallel=parallel)
        pack_weights(moe, "int8" if is_w8a8 else "none")
    return moe, (config.num_experts + num_redundant) // ep_size


@torch.inference_mode()
@pytest.mark.parametrize("weights", ["bfloat16", "w8a8"])
@pytest.mark.parametrize("ep_size", [16, 64, 256])
@pytest.mark.parametrize("tp_size", [1, 4, 8])
@pytest.mark.parametrize("name", GATING)
def test_a_sparse_block_over_ranks_is_taken(
    name: str, tp_size: int, ep_size: int, weights: str
) -> None:
    is_w8a8 = weights == "w8a8"
    hidden_size, config = moe_of(name)
    moe, num_local = block(name, tp_size, ep_size, "zero_redundancy", is_w8a8=is_w8a8)
    top_k, width = config.num_experts_per_tok, config.intermediate_size
    # As many rows as all ranks could send here; the shapes do not depend on this rank's own.
    capacity = ROWS * ep_size * min(num_local, top_k)
    for rows in (1, ROWS):
        x = torch.empty(rows, hidden_size, dtype=torch.bfloat16, device=META)
        with Outputs() as outputs:
            out = moe(x)
        assert (out.shape, out.dtype) == (x.shape, torch.bfloat16)
        ((chosen, ids, _),) = outputs.of(GATING[name])
        assert chosen == ((rows, top_k), torch.float32)
        assert ids == ((rows, top_k), torch.int32)
        ((sent, scales, _, counts, *_),) = outputs.of("npu_moe_distribute_dispatch_v2")
        assert sent == ((capacity, hidden_size), torch.int8 if is_w8a8 else torch.bfloat16)
        assert counts == ((num_local,), torch.int64)
        assert outputs.of("npu_moe_distribute_combine_v2") == [
            [((rows, hidden_size), torch.bfloat16)]
        ]
        products = [out[0] for out in outputs.of("npu_grouped_matmul")]
        assert products[-1] == ((capacity, hidden_size), torch.bfloat16)
        if is_w8a8:
            assert scales == ((capacity,), torch.float32)
            assert outputs.of("npu_grouped_matmul_swiglu_quant_v2") == [
                [((capacity, width), torch.int8), ((capacity,), torch.float32)]
            ]
            assert len(products) == 1
        else:
            assert products[0] == ((capacity, 2 * width), torch.bfloat16)
            assert (capacity, width) in [out[0][0] for out in outputs.of("npu_swiglu")]


@torch.inference_mode()
@pytest.mark.parametrize("name", GATING)
def test_rows_that_every_rank_has_are_sliced_and_gathered(name: str) -> None:
    hidden_size, _ = moe_of(name)
    moe, _ = block(name, 4, 16, "allreduce", is_w8a8=False)
    x = torch.empty(30, hidden_size, dtype=torch.bfloat16, device=META)
    with Outputs() as outputs:
        assert moe(x).shape == x.shape
    assert outputs.of("npu_moe_distribute_combine_v2") == [[((8, hidden_size), torch.bfloat16)]]


def test_experts_that_cannot_be_dealt_out_are_refused() -> None:
    hidden_size, config = moe_of("Qwen3-30B-A3B")
    parallel = one_rank(4, 256, exchange=ShapeGroup(0, 256), exchange_rows=ROWS)
    with pytest.raises(ValueError, match="num_experts is 128, not a multiple of ep_size 256"), META:
        MoE(hidden_size, config, ops=NpuOps(device=META, product="A3"), parallel=parallel)


def test_a_device_without_the_operators_sends_rows_by_all_to_all() -> None:
    sizes: Any = None  # it does not even look at them
    assert NpuOps(device=META).expert_dispatch(ShapeGroup(0, 16), sizes) is None


def int8_experts(width: int, *, quantizes_activations: bool = True) -> Any:
    def linear(out_features: int, in_features: int) -> NpuGroupedInt8Linear:
        return NpuGroupedInt8Linear(
            torch.empty(2, out_features, in_features, dtype=torch.int8, device=META),
            torch.empty(2, out_features, device=META),
            dtype=torch.bfloat16,
            quantizes_activations=quantizes_activations,
        )

    ops = NpuOps(device=META)
    return ops.gated_experts(linear(2 * width, 64), linear(64, width))


def test_experts_wider_than_the_fused_operator_takes_are_computed_by_parts() -> None:
    assert isinstance(int8_experts(5120), NpuInt8Experts)
    assert not isinstance(int8_experts(5121), NpuInt8Experts)
    assert not isinstance(int8_experts(64, quantizes_activations=False), NpuInt8Experts)
    rows, sizes = torch.empty(8, 64, dtype=torch.bfloat16, device=META), [4, 4]
    with Outputs() as outputs:
        int8_experts(5121)(rows, torch.tensor(sizes, device=META))
    names = [name for name, _ in outputs.found if name != "npu_format_cast"]
    by_parts = ["npu_dynamic_quant", "npu_grouped_matmul"]
    assert names == [*by_parts, "npu_swiglu", *by_parts]


@pytest.mark.parametrize(
    ("rows", "scales", "message"),
    [
        (torch.empty(8, 63, dtype=torch.int8), torch.empty(8), r"rows are \[8, 63\] torch.int8"),
        (torch.empty(8, 64), torch.empty(8), r"rows are .* must be \[R, 64\] int8"),
        (
            torch.empty(8, 64, dtype=torch.int8),
            torch.empty(7),
            r"scales are \[7\] .* must be \[8\] float32",
        ),
    ],
)
def test_rows_that_the_fused_operator_does_not_take_are_named(
    rows: Tensor, scales: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        int8_experts(32).of_int8(rows.to(META), scales.to(META), torch.ones(2, device=META))


@pytest.mark.parametrize(
    ("x", "ids", "message"),
    [
        ((65, 2048), torch.zeros(65, 8, dtype=torch.int32), r"x is \[65, 2048\], .* \[1 to 64, 2"),
        ((0, 2048), torch.zeros(0, 8, dtype=torch.int32), r"x is \[0, 2048\]"),
        ((4, 1024), torch.zeros(4, 8, dtype=torch.int32), r"x is \[4, 1024\]"),
        ((4, 2048), torch.zeros(4, 7, dtype=torch.int32), r"topk_ids is \[4, 7\]"),
    ],
)
def test_rows_that_the_group_was_not_checked_for_are_not_dispatched(
    x: tuple[int, int], ids: Tensor, message: str
) -> None:
    moe, _ = block("Qwen3-30B-A3B", 4, 16, "zero_redundancy", is_w8a8=False)
    exchange: Any = moe._dispatch
    rows = torch.empty(x, dtype=torch.bfloat16, device=META)
    weights = torch.empty(ids.shape, device=META)
    with pytest.raises(ValueError, match=message):
        exchange._exchange(rows, weights, ids.to(META), moe.experts.gated, None)
