"""The graphs that TorchAir hands to the Graph Engine are what docs/npu.md claims, node by node."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.npu.simulator  # noqa: F401  (weights are cast to FRACTAL_NZ on the CPU)
from engine.parallel_config import MoEComm
from kernels.ascend.linear import NpuGroupedLinear, group_options
from kernels.npu import NpuOps
from tests.npu.decode_step import decode_step, static_batch
from tests.npu.expert_parallel import NUM_SEQS, expert_parallel_model
from tests.npu.families import CONFIGS, family
from tests.npu.ge import GEGraph, Node, ge_graph
from tests.npu.wheel import loaded, torchair

DOCS = Path(__file__).parents[2] / "docs" / "npu.md"
NUM_LAYERS = 2
SPARSE = {"qwen3_moe": 2, "deepseek_v3": 1}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # TorchAir's own


@functools.cache
def graph_of(name: str, num_layers: int = NUM_LAYERS) -> GEGraph:
    """One rank, no communication."""
    ops = NpuOps(device=torch.device("cpu"))
    model = family(name, ops, num_hidden_layers=num_layers)
    step, arguments = decode_step(model, static_batch(model, 4))
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    return ge_graph(step, *arguments, config=config)


@functools.cache
def rank_graph(
    name: str, moe_comm: MoEComm = "zero_redundancy", is_multi_stream: bool = False
) -> GEGraph:
    """Rank 0 at TP 4 and EP 16, with one expert a rank."""
    model = expert_parallel_model(
        name, moe_comm=moe_comm, num_local_experts=1, multi_stream=is_multi_stream
    )
    step, arguments = decode_step(model, static_batch(model, NUM_SEQS, 1))
    return ge_graph(step, *arguments)


def int8_graph(name: str) -> GEGraph:
    """The same in W8A8."""
    model = expert_parallel_model(
        name,
        moe_comm="zero_redundancy",
        num_local_experts=1,
        quantization="int8",
        quantize_activations=True,
    )
    step, arguments = decode_step(model, static_batch(model, NUM_SEQS, 1))
    return ge_graph(step, *arguments)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decode_step_converts_whole_and_copies_no_cache(name: str) -> None:
    graph = graph_of(name)
    assert graph.count("FusedInferAttentionScore") == NUM_LAYERS
    # All but the first norm of a step take the residual in.
    assert graph.count("AddRmsNorm") == 2 * NUM_LAYERS
    assert graph.count("GroupedMatmul") == 2 * SPARSE.get(name, 0)
    # A cache that is copied shows as a TensorMove: hundreds of megabytes a layer.
    assert graph.count("TensorMove", "Cumsum") == 0
    if name == "deepseek_v3":
        assert graph.count("KvRmsNormRopeCache") == NUM_LAYERS
    else:
        assert graph.count("ScatterNdUpdate") == 2 * NUM_LAYERS
        writes = graph.of("ScatterNdUpdate")
        assert {producer.op for write in writes for producer in graph.producers(write)[:1]} == {
            "RefData"
        }


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_every_weight_is_marked_as_frozen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def note(infos: list[Any]) -> list[int]:
        found.extend(info.value_type.name for info in infos)
        return [0] * len(infos)

    monkeypatch.setattr(
        loaded("torchair._ge_concrete_graph.fx2ge_converter"), "get_frozen_flag", note
    )
    graph_of.__wrapped__(name)
    # What is left are ids, positions, slots, table and lengths; and the caches, which change: the
    # Graph Engine may take what is frozen for constants.
    others = [kind for kind in found if kind != "PARAMETER"]
    assert len(others) == 5 + 2 * NUM_LAYERS
    assert len(found) - len(others) > 10 * NUM_LAYERS


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_a_further_layer_adds_no_index_and_no_table(name: str) -> None:
    # Where each token is written, and the rows of the rotary tables, are found once a step.
    per_step = ("FloorDiv", "FloorMod", "SelectV2", "Less", "Pack", "GatherV2", "ConcatV2")
    assert graph_of(name, 3).count(*per_step) == graph_of(name).count(*per_step) > 0


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_step_counts_rows_and_never_sums_them_up(name: str) -> None:
    for graph in (graph_of(name), rank_graph(name)):
        assert graph.count("Cumsum") == 0
        for product in graph.of("GroupedMatmul"):
            assert "Cumsum" not in {
                node.op for node in graph.upstream(product, ["Cast", "Reshape"])
            }


def stand_between(graph: GEGraph, product: Node) -> list[str]:
    """The types of the nodes between a weight and its product."""
    path = []
    (node,) = graph.producers(product)[1:2]
    while node.op not in ("Data", "Const", "RefData"):
        path.append(node.op)
        node = graph.producers(node)[0]
    return path


@pytest.mark.parametrize("name", SPARSE)
def test_nothing_stands_between_an_experts_weight_and_its_product(name: str) -> None:
    for graph in (graph_of(name), rank_graph(name), rank_graph(name, "allreduce")):
        for product in graph.of("GroupedMatmul"):
            assert stand_between(graph, product) == []


def expert_weight_graph(num_experts: int, *, is_stored_transposed: bool, optimize: bool) -> GEGraph:
    """One grouped product on a weight as checkpoints hold it, or as NpuGroupedLinear does."""
    weight = torch.zeros(num_experts, 64, 32, dtype=torch.bfloat16)
    ours = NpuGroupedLinear(weight)

    def product(x: Tensor, counts: Tensor) -> Tensor:
        if is_stored_transposed:
            return ours(x, counts)
        out: Tensor = torch.ops.npu.npu_grouped_matmul(
            [x], [weight.transpose(1, 2)], **group_options(counts)
        )[0]
        return out

    config = torchair.CompilerConfig()
    config.experimental_config.enable_view_optimize = optimize
    x = torch.zeros(8, 32, dtype=torch.bfloat16)
    return ge_graph(product, x, torch.ones(num_experts, dtype=torch.int64), config=config)


WEIGHT_CASES = [
    # experts a rank, stored transposed, enable_view_optimize -> between weight and product
    (1, False, True, ["Reshape", "Transpose", "Reshape"]),
    (1, False, False, ["Transpose"]),
    (2, False, True, ["Transpose"]),
    (1, True, True, []),
    (1, True, False, []),
    (2, True, True, []),
]


@pytest.mark.parametrize(
    ("num_experts", "is_stored_transposed", "optimize", "between"), WEIGHT_CASES
)
def test_a_weight_that_is_stored_transposed_needs_no_node(
    num_experts: int, is_stored_transposed: bool, optimize: bool, between: list[str]
) -> None:
    graph = expert_weight_graph(
        num_experts, is_stored_transposed=is_stored_transposed, optimize=optimize
    )
    (product,) = graph.of("GroupedMatmul")
    assert stand_between(graph, product) == between


@pytest.mark.parametrize("name", SPARSE)
def test_zero_redundancy_moves_rows_once_and_the_classic_path_twice(name: str) -> None:
    dense, sparse = NUM_LAYERS - SPARSE[name], SPARSE[name]
    graph, classic = rank_graph(name), rank_graph(name, "allreduce")
    # Scattered: embedding, attention and dense blocks end in a ReduceScatter; attention, dense
    # blocks and the end begin with an AllGather. A sparse block has neither.
    blocks = 1 + NUM_LAYERS + dense
    assert graph.count("HcomReduceScatter") == graph.count("HcomAllGather") == blocks
    assert graph.count("HcomAllReduce", "StridedSliceV2") == 0
    # Replicated: AllReduce instead; a sparse block takes its rows and gathers the others' after.
    assert classic.count("HcomAllReduce") == blocks
    assert classic.count("HcomAllGather") == classic.count("StridedSliceV2") == sparse
    assert classic.count("HcomReduceScatter") == 0
    for one in (graph, classic):
        assert one.count("MoeDistributeDispatchV2") == one.count("MoeDistributeCombineV2") == sparse
        # Which rows are tokens is found once a step. Ranks that replay have as many rows each.
        exchanges = one.of("MoeDistributeDispatchV2", "MoeDistributeCombineV2")
        masks = [{p.name for p in one.producers(node) if p.op == "Less"} for node in exchanges]
        assert all(len(names) == 1 for names in masks)
        assert len(set.union(*masks)) == 1
        assert all(node.attributes["global_bs"].i == 0 for node in exchanges)


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_block_of_scattered_rows_only_routes_dispatches_and_computes(name: str) -> None:
    for block in sparse_blocks(rank_graph(name)):
        assert not [op for op in block if op.startswith(("Hcom", "StridedSlice", "Concat"))]
        assert {"MoeDistributeDispatchV2", "GroupedMatmul", "SwiGlu"} <= set(block)
    for block in sparse_blocks(rank_graph(name, "allreduce")):
        assert "StridedSliceV2" in block  # what the other path has, this looks at


def sparse_blocks(graph: GEGraph) -> list[list[str]]:
    """What lies between the norm before each sparse block and its combined rows."""
    inside = {node.op for node in graph.nodes.values()} - {"AddRmsNorm", "RmsNorm"}
    combined = graph.of("MoeDistributeCombineV2")
    assert combined
    return [[node.op for node in graph.upstream(node, sorted(inside))] for node in combined]


@pytest.mark.parametrize("name", SPARSE)
def test_experts_on_int8_activations_convert_whole_and_get_their_rows_in_int8(name: str) -> None:
    graph = int8_graph(name)
    assert graph.count("GroupedMatmulSwigluQuantV2") == SPARSE[name]
    assert graph.count("GroupedMatmul") == SPARSE[name]
    assert graph.count("Cumsum", "TensorMove") == 0
    for dispatch in graph.of("MoeDistributeDispatchV2"):
        assert dispatch.attributes["quant_mode"].i == 2
    for product in graph.of("GroupedMatmulSwigluQuantV2"):
        assert graph.producers(product)[0].op == "MoeDistributeDispatchV2"
        assert "Transpose" not in {node.op for node in graph.producers(product)}


def test_the_side_stream_has_the_intended_nodes_and_no_communication() -> None:
    graph = rank_graph("deepseek_v3", is_multi_stream=True)
    labelled = graph.streams()
    # Shared expert: two products with the transposes that fuse into them, swiglu, and the wait
    # before the second; latent attention: the cache's norm, rotation and write.
    intended = {"MatMul", "Transpose", "SwiGlu", "Identity", "KvRmsNormRopeCache"}
    assert {op for op in labelled["side"] if op != "Const"} == intended
    assert set(labelled) == {None, "side"}
    beside = [node.op for node in graph.nodes.values() if node.stream and node.op != "Const"]
    assert sorted(beside) == sorted(
        ["MatMul", "Transpose"] * 2 + ["SwiGlu", "Identity"] + ["KvRmsNormRopeCache"] * NUM_LAYERS
    )


@pytest.mark.parametrize("name", SPARSE)
def test_without_multi_stream_no_node_has_a_label(name: str) -> None:
    assert set(rank_graph(name).streams()) == {None}


def test_multi_stream_adds_one_wait_and_changes_no_other_node() -> None:
    off = rank_graph("deepseek_v3").counts()
    on = rank_graph("deepseek_v3", is_multi_stream=True).counts()
    off["Identity"] += 1
    assert on == off


def tables() -> Iterator[str]:
    """The tables of docs/npu.md, line by line."""
    columns = [("qwen3_moe", "Qwen3-MoE"), ("deepseek_v3", "DeepSeek-V3")]
    yield (
        "| Nodes of a decode step | "
        + " | ".join(
            f"{title}, {comm}" for _, title in columns for comm in ("allreduce", "zero_redundancy")
        )
        + " |"
    )
    yield "|---" * 5 + "|"
    rows = {
        "HcomAllReduce": ("HcomAllReduce",),
        "HcomReduceScatter": ("HcomReduceScatter",),
        "HcomAllGather": ("HcomAllGather",),
        "StridedSlice": ("StridedSliceV2",),
        "MoeDistributeDispatch + Combine": ("MoeDistributeDispatchV2", "MoeDistributeCombineV2"),
        "GroupedMatmul": ("GroupedMatmul",),
        "Cumsum": ("Cumsum",),
        "TensorMove": ("TensorMove",),
        "all, constants and inputs left out": (),
    }
    comms: tuple[MoEComm, MoEComm] = ("allreduce", "zero_redundancy")
    graphs = [rank_graph(name, comm) for name, _ in columns for comm in comms]
    for title, ops in rows.items():
        counts = [graph.count(*ops) if ops else sum(graph.counts().values()) for graph in graphs]
        yield f"| {title} | " + " | ".join(map(str, counts)) + " |"


def weight_table() -> Iterator[str]:
    """What stands between an expert's weight and its product."""
    yield "| Weight | Experts a rank | enable_view_optimize | Nodes between |"
    yield "|---|---|---|---|"
    for num_experts, is_transposed, optimize, _ in WEIGHT_CASES:
        graph = expert_weight_graph(
            num_experts, is_stored_transposed=is_transposed, optimize=optimize
        )
        (product,) = graph.of("GroupedMatmul")
        held = (
            "transposed once, when loaded (pdserve)" if is_transposed else "as checkpoints have it"
        )
        between = ", ".join(stand_between(graph, product)) or "none"
        yield f"| {held} | {num_experts} | {'on' if optimize else 'off'} | {between} |"


def stream_table() -> Iterator[str]:
    """Nodes with the side stream's label, and all nodes, without and with multi-stream."""
    graphs = [rank_graph("deepseek_v3", is_multi_stream=on) for on in (False, True)]
    yield "| DeepSeek-V3, zero_redundancy: nodes | off | on |"
    yield "|---|---|---|"
    groups = {
        "on the side stream: MatMul": "MatMul",
        "Transpose (of its weights)": "Transpose",
        "SwiGlu": "SwiGlu",
        "KvRmsNormRopeCache": "KvRmsNormRopeCache",
        "Identity (the wait before the down projection)": "Identity",
        "Hcom\\*, MoeDistribute\\*, GroupedMatmul": ("Hcom", "MoeDistribute", "GroupedMatmul"),
    }
    for title, start in groups.items():
        counts = [
            sum(n.stream is not None and n.op.startswith(start) for n in graph.nodes.values())
            for graph in graphs
        ]
        yield f"| {title} | {counts[0]} | {counts[1]} |"
    totals = [sum(graph.counts().values()) for graph in graphs]
    yield f"| all nodes of the step, constants and inputs left out | {totals[0]} | {totals[1]} |"


def test_the_tables_in_the_documentation_are_those_of_the_graphs() -> None:
    text = DOCS.read_text()
    lines = [*tables(), *weight_table(), *stream_table()]
    missing = [line for line in lines if line not in text]
    assert not missing, "docs/npu.md lacks:\n" + "\n".join(lines)
