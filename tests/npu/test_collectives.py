"""A product and its collective as one operator give the tokens of the two one after the other."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tests.npu.simulator
from engine.checkpoint.config import parse_model_config
from engine.layers.layer import named_weights, pack_weights, weighted_layers
from engine.models import CausalLM, build_model
from engine.parallel import Parallel
from engine.parallel_config import ParallelConfig
from kernels.ascend.collective_linear import GatheredProduct, ReduceScatteredProduct
from kernels.ascend.linear import NpuLinear
from kernels.ascend.options import NpuOptions
from kernels.npu import NpuOps
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from tests.npu.decode_step import decode_step, static_batch
from tests.npu.expert_parallel import expert_parallel_model
from tests.npu.families import family, generate
from tests.npu.ge import GEGraph, ge_graph
from tests.npu.meta import META, Calls, meta_batch
from tests.npu.published import PUBLISHED, ShapeGroup, one_rank
from tests.npu.simulator_collectives import Hub, ThreadGroup
from tests.npu.tokens import npu_ops, prompts

assert tests.npu.simulator  # gives the NPU's operators CPU kernels
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # TorchAir's own
# Wide enough that a rank's share has the 256 inputs that the operators demand.
WIDE = {"num_attention_heads": 4, "intermediate_size": 512}
FUSED = {"npu_mm_reduce_scatter_base", "npu_all_gather_base_mm"}


def rank_model(name: str, ops: Ops, group: ThreadGroup, options: dict[str, Any]) -> CausalLM:
    """This rank's part of `family`."""
    whole = family(name, ReferenceOps(), **options, is_packed=False)
    full = named_weights(whole)
    parallel = Parallel(
        config=ParallelConfig(tp_size=group.size, rank=group.rank, sequence_parallel=True),
        tp=group,
        fused_tp=group,
    )
    model = build_model(whole.config, ops, parallel)
    for prefix, layer in weighted_layers(model):
        shards = layer.shards()
        for weight_name, weight in layer.weights():
            part: Tensor = full[prefix + weight_name]
            if shard := shards.get(weight_name):
                part = part.narrow(shard.dim, shard.span.start, len(shard.span))
            weight.copy_(part)
    pack_weights(model)
    return model


@pytest.mark.parametrize(("name", "size"), [("qwen3", 2), ("deepseek_v3", 2)])
def test_ranks_with_fused_collectives_give_the_tokens_of_one_rank(name: str, size: int) -> None:
    lengths = prompts(5, 37, 2)
    expected, _ = generate(family(name, ReferenceOps(), **WIDE), lengths, 8)
    calls: list[set[str]] = []

    def decode(group: ThreadGroup) -> list[list[int]]:
        with Calls() as seen:
            model = rank_model(name, npu_ops(fuse_collectives=True), group, WIDE)
            tokens, _ = generate(model, lengths, 8)
        calls.append(seen.names)
        return tokens

    assert Hub("tp", size).run(decode) == [expected] * size
    wanted = FUSED if name == "qwen3" else {"npu_mm_reduce_scatter_base"}
    assert all(wanted <= names for names in calls)


@torch.inference_mode()
@pytest.mark.usefixtures("all_shapes")
@pytest.mark.parametrize("tp_size", [4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_wheel_takes_every_call_of_published_models(name: str, tp_size: int) -> None:
    parallel = one_rank(tp_size, fused_tp=ShapeGroup(0, tp_size), sequence_parallel=True)
    options = {"num_hidden_layers": 2, "max_position_embeddings": 512}
    config = parse_model_config(PUBLISHED[name] | options)
    calls = Calls()
    with META:
        ops = NpuOps(device=META, options=NpuOptions(fuse_collectives=True))
        model = build_model(config, ops, parallel)
        pack_weights(model)
    kv = meta_batch(model, tp_size, [1] * 32, [100] * 32)
    token_ids = torch.zeros(32, dtype=torch.int32, device=META)
    with calls:
        hidden = model(token_ids, token_ids, kv)
    assert hidden.shape == (32, config.hidden_size)
    # DeepSeek's rows are gathered where they are narrow, behind the projection to latents; its
    # dense layer's are gathered into its products. Sparse blocks gather before their router.
    wanted = {"npu_mm_reduce_scatter_base"} if name == "Qwen3-30B-A3B" else FUSED
    if name == "Qwen2.5-3B":
        wanted = FUSED  # its qkv has a bias; its MLP has none
    assert wanted <= calls.names


def rank_graph(**options: bool) -> GEGraph:
    model = expert_parallel_model(
        "deepseek_v3", moe_comm="zero_redundancy", num_local_experts=1, **options
    )
    step, arguments = decode_step(model, static_batch(model, 8, 1))
    return ge_graph(step, *arguments)


def test_a_graph_has_one_node_in_the_place_of_a_product_and_its_collective() -> None:
    apart, fused = rank_graph(), rank_graph(fuse_collectives=True)
    # The heads of this small model are too narrow for a rank's o_proj; of its dense layer the
    # first product has 1024 inputs, the second too few.
    assert fused.count("AllGatherMatmul") == 1
    assert fused.count("HcomAllGather") == apart.count("HcomAllGather") - 1
    assert fused.count("MatmulReduceScatter") == 0


@pytest.mark.parametrize(
    ("product", "size", "rows", "message"),
    [
        (ReduceScatteredProduct, 3, 6, "tp is 3, the NPU operators take"),
        (GatheredProduct, 32, 32, "tp is 32, the NPU operators take"),
        (ReduceScatteredProduct, 4, 6, "6 rows over 4 ranks, must be a multiple"),
    ],
)
def test_what_the_operators_do_not_take_is_refused(
    product: Any, size: int, rows: int, message: str
) -> None:
    linear = NpuLinear(torch.zeros(64, 256), None)
    with pytest.raises(ValueError, match=message):
        product(linear, ShapeGroup(0, size))(torch.zeros(rows, 256))


@pytest.mark.parametrize(
    ("in_features", "has_bias", "is_taken"),
    [(256, False, True), (255, False, False), (512, True, False), (65535, False, False)],
)
def test_other_products_stay_apart_from_their_collective(
    in_features: int, has_bias: bool, is_taken: bool
) -> None:
    ops = npu_ops(fuse_collectives=True)
    linear = ops.linear(torch.zeros(2, in_features), torch.zeros(2) if has_bias else None)
    group = ShapeGroup(0, 4)
    for make in (ops.reduce_scattered, ops.gathered):
        assert (make(linear, group) is not None) == is_taken
    for make in (npu_ops().reduce_scattered, npu_ops().gathered):
        assert make(linear, group) is None
