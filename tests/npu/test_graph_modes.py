"""Decoding by graphs on the NPU gives the tokens of eager decoding.

torchair: the real TorchAir traces, functionalises and converts; then, in the place of the Graph
Engine, its FX graph runs on the simulator. aclgraph: torch.npu's graph API is a fake that replays
what was recorded, with the lengths that each task was last given.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch

import tests.npu.ge  # noqa: F401  (stops TorchAir before the Graph Engine)
from decoder.graph import GraphRunner, select_backend
from decoder.graph_npu import (
    DecodeStep,
    ForwardFn,
    TorchairBackend,
    TorchairSettings,
    settings_of,
)
from decoder.graph_sizes import plan_sizes
from engine.batch import Batch
from engine.parallel import Parallel
from engine.parallel_config import ParallelConfig
from engine.runner import ForwardMemory
from engine.worker.config import WorkerConfig
from tests.npu.expert_parallel import expert_parallel_model
from tests.npu.fake_npu import FakeNpu
from tests.npu.families import CONFIGS, caches, family
from tests.npu.graph_decode import FewAclSizes, FewTorchairSizes, decode
from tests.npu.simulator_attention import air_attention
from tests.npu.tokens import npu_ops
from tests.npu.wheel import torch_npu

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True, scope="module")
def _attention_in_graphs_runs_on_the_cpu() -> Any:
    library = torch.library.Library("air", "IMPL", "CPU")
    library.impl("npu_fused_infer_attention_score_v2", air_attention, allow_override=True)
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def _torch_is_as_strict_as_it_is_in_ci() -> Iterator[None]:
    with functorch.patch(error_on_custom_op_aliasing=True):
        yield


class RunEagerly(TorchairSettings):
    """Everything as in production up to the graph, which then is run as FX."""

    def config(self) -> Any:
        config = super().config()
        config.debug.run_eagerly = True
        return config


@pytest.mark.parametrize("name", CONFIGS)
def test_captured_graphs_give_the_tokens_of_the_eager_model(name: str) -> None:
    ops = npu_ops()
    model = family(name, ops)
    expected, _ = decode(model, ops, None)
    npu = FakeNpu()
    tokens, graphs = decode(model, ops, FewAclSizes(ops, npu=npu))
    assert tokens == expected
    assert graphs.stats.num_replays >= 9
    assert graphs.stats.num_recompiles == 0


WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 40}


@pytest.mark.parametrize(
    ("name", "options"),
    [("qwen3", {}), ("qwen3_moe", {}), ("deepseek_v3", {}), ("qwen3", WINDOW)],
)
def test_compiled_graphs_give_the_tokens_of_the_eager_model(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    ops = npu_ops()
    model = family(name, ops, **options)
    expected, _ = decode(model, ops, None)
    backend = FewTorchairSizes(model, cache_folder=tmp_path, settings=RunEagerly())
    tokens, graphs = decode(model, ops, backend)
    assert tokens == expected
    assert graphs.stats.num_replays >= 9
    assert (backend.num_compiles, graphs.stats.num_recompiles) == (2, 0)


class LosesOneGraph(FewTorchairSizes):
    """Once it serves, it finds what dynamo compiled to be of another process."""

    is_lost = False

    def capture(
        self, forward: ForwardFn, batch: Batch, agree: Callable[[], None]
    ) -> Callable[[], Tensor]:
        replay, size = super().capture(forward, batch, agree), len(batch.input_ids)

        def lose_and_replay() -> Tensor:
            if size == 1 and not self.is_lost:
                self.is_lost = True
                torch._dynamo.reset()
            return replay()

        return lose_and_replay


def test_what_dynamo_compiles_while_serving_is_counted(tmp_path: Path) -> None:
    ops = npu_ops()
    model = family("qwen3", ops)
    expected, _ = decode(model, ops, None)
    backend = LosesOneGraph(model, cache_folder=tmp_path, settings=RunEagerly())
    tokens, graphs = decode(model, ops, backend)
    assert tokens == expected
    assert backend.is_lost
    assert graphs.stats.num_recompiles == 1


def test_a_window_is_not_captured_but_run_eagerly_and_said() -> None:
    ops = npu_ops()
    model = family("qwen3", ops, **WINDOW)
    expected, _ = decode(model, ops, None)
    tokens, graphs = decode(model, ops, FewAclSizes(ops, npu=FakeNpu()))
    assert tokens == expected
    assert graphs.stats.num_replays == 0
    assert any("a window's mask follows the lengths" in why for why in graphs.stats.eager)


def test_every_replay_gives_attention_its_lengths_before_the_graph_waits_for_them() -> None:
    ops = npu_ops()
    model = family("qwen3", ops)
    npu = FakeNpu()
    decode(model, ops, FewAclSizes(ops, npu=npu))
    record = "\n".join(npu.record)
    # Per size: once eagerly, then two layers' attention as groups behind an event each.
    capture = (
        r"synchronize\ncapture \d on stream 0, pool (None|pool)\n"
        r"(wait \d on stream 0\nreset \d on stream 0\ngroup begin\ngroup end\n){2}end \d\n"
    )
    update = r"update begin on stream 1\nupdate end on stream 1\nrecord \d on stream 1\n"
    replay = rf"synchronize current\n({update}){{2}}replay \d\n?"
    assert re.fullmatch(f"({capture}){{2}}({replay})+", record)
    pools = re.findall(r"capture \d on stream 0, pool (\w+)", record)
    assert pools == ["None", "pool"]


def test_graphs_on_disk_are_those_of_workers_that_compute_alike() -> None:
    model = family("qwen3", npu_ops())

    def folder(**changes: Any) -> Path:
        config = WorkerConfig(engine_id="decoder-0", model_path="m", model_name="m")
        key = replace(config, **changes).graph_key
        return TorchairBackend(model, cache_key=key).folder

    alike = [folder(), folder(engine_id="decoder-1", host="10.0.0.2", cluster_token="secret")]
    assert len(set(alike)) == 1
    others = [
        folder(quantization="int8"),
        folder(num_blocks=8),
        folder(max_num_seqs=8),
        folder(parallel=ParallelConfig(tp_size=2)),
        folder(parallel=ParallelConfig(tp_size=2, ep_size=2)),
        folder(parallel=ParallelConfig(tp_size=2, ep_size=2, moe_comm="allreduce")),
    ]
    assert len({*alike, *others}) == 1 + len(others)


def test_a_method_per_size_has_a_name_of_its_own() -> None:
    step = DecodeStep(family("qwen3", npu_ops()))
    names = [step.method(size).__name__ for size in (1, 2, 4)]
    assert names == ["decode_1", "decode_2", "decode_4"]
    codes = [step.method(size).__func__.__code__ for size in (1, 2, 4)]  # type: ignore[attr-defined]
    assert len(set(codes)) == 3


def test_compiler_settings_are_those_for_static_decode_graphs() -> None:
    experimental = TorchairSettings().config().experimental_config
    assert experimental.frozen_parameter.value == "1"
    assert experimental.tiling_schedule_optimize.value == "1"
    assert experimental.topology_sorting_strategy.value == "StableRDFS"
    assert experimental.enable_view_optimize.value == "1"


@pytest.mark.parametrize("num_local_experts", [1, 2])
def test_views_are_not_folded_where_a_rank_has_one_expert(num_local_experts: int) -> None:
    model = expert_parallel_model(
        "qwen3_moe", moe_comm="zero_redundancy", num_local_experts=num_local_experts
    )
    settings = settings_of(model)
    assert settings.enable_view_optimize == (num_local_experts > 1)


def test_auto_compiles_on_the_npu() -> None:
    ops = npu_ops()
    model = family("qwen3", ops)
    assert isinstance(select_backend("auto", ops, model), TorchairBackend)
    with pytest.raises(ValueError, match="graph_mode native needs the cpu kernels"):
        select_backend("native", ops, model)


@pytest.mark.parametrize("mode", ["torchair", "aclgraph"])
def test_every_rank_has_the_same_sizes_and_rows_divide_over_the_ranks(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_npu.npu, "Stream", FakeNpu().Stream)
    ops = npu_ops()
    planned = []
    parallel = Parallel(config=ParallelConfig(tp_size=4))
    for _ in range(2):  # what a rank plans with: the configuration, not its part of the model
        backend = select_backend(mode, ops, family("qwen3", ops), parallel=parallel)
        assert backend is not None
        planned.append(backend.batch_sizes(50))
    assert planned[0] == planned[1]
    assert planned[0][-1] == 52
    assert all(size % 4 == 0 for size in planned[0])


@pytest.mark.parametrize("mode", ["torchair", "aclgraph"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_capturing_writes_to_no_block_that_a_sequence_may_have(
    name: str, mode: str, tmp_path: Path
) -> None:
    ops = npu_ops()
    model = family(name, ops)
    made = caches(model, num_blocks=3)
    backend: Any = FewAclSizes(ops, npu=FakeNpu())
    if mode == "torchair":
        backend = FewTorchairSizes(model, cache_folder=tmp_path, settings=RunEagerly())
    runner = GraphRunner(model, ForwardMemory(made.k, made.v, 4, 2), backend)
    runner.capture(lambda phase, progress: None)
    assert backend.num_compiles == 2
    for cache in made.k + made.v:
        assert cache[:3].isnan().all()
    assert made.k[0][3].isfinite().any()  # the spare one


@pytest.mark.parametrize(
    ("max_num_seqs", "multiple_of", "max_graphs", "sizes"),
    [
        (1, 1, 8, [1]),
        (8, 1, 4, [1, 2, 4, 8]),
        (8, 1, 6, [1, 2, 4, 6, 7, 8]),
        (64, 4, 3, [16, 32, 64]),
        (50, 4, 32, [4 * n for n in range(1, 14)]),
        (256, 8, 8, [8, 16, 32, 64, 128, 192, 224, 256]),
    ],
)
def test_sizes_are_planned(
    max_num_seqs: int, multiple_of: int, max_graphs: int, sizes: list[int]
) -> None:
    assert plan_sizes(max_num_seqs, multiple_of=multiple_of, max_graphs=max_graphs) == sizes
