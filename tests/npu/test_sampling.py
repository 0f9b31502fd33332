"""Tokens drawn on the NPU are those that the host draws, and the host gets nothing but them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tests.npu.simulator  # noqa: F401  (gives the NPU's operators CPU kernels)
from engine.colocated import ColocatedEngine
from engine.device_draw import can_draw
from engine.scheduler import SchedulerConfig
from kernels.ascend.sampling import top_k_top_p
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from tests.npu.drawn import PLAIN, requests
from tests.npu.families import BLOCK_SIZE, family
from tests.npu.meta import META
from tests.npu.tokens import npu_ops


class Narrowings(TorchDispatchMode):
    """Counts calls of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name == "npu::npu_top_k_top_p"
        return func(*args, **(kwargs or {}))


def draw_tokens(ops: Ops, options: Sequence[dict[str, Any]]) -> list[list[int]]:
    engine = ColocatedEngine(
        family("qwen3", ops),
        ops,
        num_blocks=2 * len(options),
        block_size=BLOCK_SIZE,
        scheduler_config=SchedulerConfig(max_num_seqs=len(options), max_model_len=256),
    )
    made = requests(options)
    engine.generate(made)
    return [request.token_ids for request in made]


def test_tokens_are_those_of_the_host_for_every_way_to_narrow() -> None:
    with Narrowings() as narrowings:
        tokens = draw_tokens(npu_ops(), PLAIN)
    # Each step narrows the rows with top_p alone, and those with top_k.
    assert narrowings.count == 2 * 12
    assert tokens == draw_tokens(ReferenceOps(), PLAIN)


@pytest.mark.parametrize(
    "options",
    [
        {"num_logprobs": 2},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"logit_bias": {5: 3.0}},
        {"min_tokens": 4},
        {"grammar": "root ::= [a]"},
        {"top_k": 1025},
    ],
)
def test_what_needs_more_of_the_logits_is_drawn_on_the_host(options: dict[str, Any]) -> None:
    plain, special = requests([{}, options])
    assert can_draw(plain, npu_ops())
    assert not can_draw(special, npu_ops())
    assert not can_draw(plain, ReferenceOps())


def test_a_batch_with_both_is_drawn_on_the_host() -> None:
    options = [*PLAIN, {"repetition_penalty": 1.3, "top_k": 2000}]
    assert draw_tokens(npu_ops(), options) == draw_tokens(ReferenceOps(), options)


@pytest.mark.parametrize("vocab_size", [151936, 129280])
def test_the_wheel_takes_the_call(vocab_size: int) -> None:
    logits = torch.empty(32, vocab_size, device=META)
    top_k = torch.empty(32, dtype=torch.int32, device=META)
    top_p = torch.empty(32, device=META)
    # Without top_k the wheel's shape function lacks an argument that its schema has a default for.
    for p in (top_p, None):
        out = top_k_top_p(logits, top_k, p)
        assert (out.shape, out.dtype) == (logits.shape, torch.float32)


@pytest.mark.parametrize(
    ("top_k", "top_p", "message"),
    [
        (None, None, "both are None"),
        (torch.ones(3, dtype=torch.int64), None, r"top_k is \[3\] torch.int64, must be \[3\]"),
        (None, torch.ones(2), r"top_p is \[2\] torch.float32, must be \[3\]"),
    ],
)
def test_what_the_operator_does_not_take_is_refused(
    top_k: Tensor | None, top_p: Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        top_k_top_p(torch.zeros(3, 8), top_k, top_p)


def test_the_reference_narrows_as_the_operator() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 200, generator=generator)
    top_k = torch.tensor([1, 7, 200, 30, 2], dtype=torch.int32)
    top_p = torch.tensor([0.5, 0.0, 0.9, 1.0, 0.3])
    for k, p in ((top_k, top_p), (None, top_p), (top_k, None)):
        expected = ReferenceOps().top_k_top_p(logits, k, p)
        assert torch.equal(npu_ops().top_k_top_p(logits, k, p), expected)
        assert expected.isfinite().any(-1).all()
