"""Decoding by replayed graphs gives the bits that the model's own forward pass gives."""

import logging
import re
from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from decoder.graph import ForwardFn, GraphRunner, select_backend
from decoder.native_graph import NativeBackend
from engine.batch import Batch, KVBatch
from engine.colocated import ColocatedEngine
from engine.layers.attention import OnLayer
from engine.models import CausalLM
from engine.request import Request
from engine.runner import ForwardMemory
from engine.scheduler import SchedulerConfig
from kernels.ops import Ops, select_ops
from tests.engine.tiny import from_hf, make_request, random_token_ids, tiny_hf_llama

LENGTHS = (3, 40, 9, 17, 8, 31, 5)


class FewSizes(NativeBackend):
    """Graphs for 2 and 6 decodes only, so that batches are padded and one is too large."""

    def batch_sizes(self, max_num_rows: int) -> Sequence[int]:
        return (2, 6)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops("cpu")


@pytest.fixture(scope="module")
def model(ops: Ops, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return from_hf(tiny_hf_llama(num_hidden_layers=3), tmp_path_factory.mktemp("llama"), ops)


def requests() -> list[Request]:
    return [
        make_request(random_token_ids(length, i), max_tokens=5 + 4 * i, ignore_eos=True)
        for i, length in enumerate(LENGTHS)
    ]


def generate(
    model: CausalLM, ops: Ops, backend: NativeBackend | None
) -> tuple[list[list[int]], GraphRunner]:
    runners = []

    def make_forward(model: CausalLM, ops: Ops, memory: ForwardMemory) -> GraphRunner:
        runners.append(GraphRunner(model, memory, backend))
        runners[0].capture(lambda phase, progress: None)
        return runners[0]

    engine = ColocatedEngine(
        model,
        ops,
        num_blocks=64,
        block_size=8,
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_model_len=128),
        make_forward=make_forward,
    )
    running = requests()
    engine.generate(running)
    return [request.token_ids for request in running], runners[0]


@pytest.mark.parametrize("backend_class", [NativeBackend, FewSizes])
def test_replays_give_the_tokens_of_the_eager_model(
    model: CausalLM, ops: Ops, backend_class: type[NativeBackend]
) -> None:
    expected, eager = generate(model, ops, None)
    tokens, graphs = generate(model, ops, backend_class())
    assert tokens == expected
    assert eager.stats.num_replays == 0
    assert set(eager.stats.eager) == {"graph_mode is eager"}
    assert graphs.stats.num_replays > 20
    too_large = {"batch is too large"} if backend_class is FewSizes else set()
    assert set(graphs.stats.eager) == {"prompt tokens in the batch"} | too_large


def test_nothing_is_captured_while_serving(model: CausalLM, ops: Ops) -> None:
    backend = FewSizes()
    _, graphs = generate(model, ops, backend)
    assert (backend.num_compiles, graphs.stats.num_recompiles) == (2, 0)


class CompilesLate(FewSizes):
    """One of its graphs is compiled anew when it is replayed for the first time."""

    def capture(
        self, forward: ForwardFn, batch: Batch, agree: Callable[[], None]
    ) -> Callable[[], Tensor]:
        replay, size = super().capture(forward, batch, agree), len(batch.input_ids)
        late = [size] if size == 2 else []

        def compile_and_replay() -> Tensor:
            self.num_compiles += len(late)
            late.clear()
            return replay()

        return compile_and_replay


def test_a_graph_that_is_compiled_while_serving_is_counted(model: CausalLM, ops: Ops) -> None:
    _, graphs = generate(model, ops, CompilesLate())
    assert graphs.stats.num_replays > 1
    assert graphs.stats.num_recompiles == 1


def test_what_capturing_took_is_said(
    model: CausalLM, ops: Ops, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "decoder.graph"):
        _, graphs = generate(model, ops, FewSizes())
    assert graphs.stats.capture_s > 0
    said = r"2 native graphs of up to 6 rows, made in \d+\.\d\d s, take \d+\.\d MB"
    assert re.fullmatch(said, caplog.messages[-1])


class Halved:
    """A model with an op of torch at its end."""

    def __init__(self, model: CausalLM) -> None:
        self.config, self.logits, self._model = model.config, model.logits, model

    def __call__(
        self, input_ids: Tensor, positions: Tensor, kv: KVBatch, on_layer: OnLayer | None = None
    ) -> Tensor:
        return self._model(input_ids, positions, kv, on_layer) / 2


def test_a_model_that_cannot_be_captured_decodes_eagerly_and_says_why(
    model: CausalLM, ops: Ops
) -> None:
    halved: CausalLM = Halved(model)  # type: ignore[assignment]
    expected, _ = generate(halved, ops, None)
    tokens, graphs = generate(halved, ops, NativeBackend())
    assert tokens == expected
    assert graphs.stats.num_replays == 0
    (reason,) = graphs.stats.eager
    assert reason.startswith("native graphs: torch.")
    assert reason.endswith("div is not one of the kernels that can be recorded")


def test_a_mode_that_the_kernels_cannot_have_is_refused(model: CausalLM) -> None:
    reference = select_ops("reference")
    assert select_backend("auto", reference, model) is None
    for mode, kernels in (("native", "cpu"), ("torchair", "npu"), ("aclgraph", "npu")):
        with pytest.raises(ValueError, match=f"graph_mode {mode} needs the {kernels} kernels"):
            select_backend(mode, reference, model)
    with pytest.raises(ValueError, match="graph_mode 'fast' is not one of auto, eager, native"):
        select_backend("fast", reference, model)
