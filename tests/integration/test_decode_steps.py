"""A running decoder's steps as others see them: its metrics, its start, its messages to a proxy."""

import queue
import re
from collections.abc import Iterator

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from tests.integration.service import TOKEN, Service, Worker, wait_until
from tests.oracle import story

pytestmark = pytest.mark.multiprocess

_SIZES = (1, 2, 3, 5, 9)
_NUM_TOKENS = 24


@pytest.fixture(scope="module")
def service(packaged_service: Service) -> Iterator[Service]:
    yield packaged_service
    packaged_service.assert_idle()


def decoder_metric(service: Service, name: str) -> float:
    """Once the proxy knows it, which takes a moment after the start."""
    line = re.compile(rf'^{name}{{[^}}]*engine_id="decoder-0"[^}}]*}} (\S+)$', re.M)
    wait_until(lambda: line.search(service.metrics()) is not None, 10, f"the proxy knows {name}")
    (value,) = line.findall(service.metrics())
    return float(value)


async def test_batches_of_any_size_are_decoded_without_compiling(service: Service) -> None:
    (decoder,) = service.of_role("decoder")
    before = decoder.stats().num_graph_replays
    for size in _SIZES:
        await service.generate_all([story(20, seed=i) for i in range(size)], _NUM_TOKENS)
    num_replays = decoder.stats().num_graph_replays
    assert num_replays - before >= len(_SIZES) * (_NUM_TOKENS // 2)
    wait_until(
        lambda: decoder_metric(service, "pdserve_graph_replays_total") >= num_replays,
        10,
        "the proxy knows the decoder's numbers",
    )
    assert decoder_metric(service, "pdserve_graph_recompiles_total") == 0


def test_a_start_shows_how_many_graphs_it_made_and_how_long_that_took(service: Service) -> None:
    (decoder,), (prefiller,) = service.of_role("decoder"), service.of_role("prefiller")
    stats = decoder.stats()
    assert decoder.info["phase"] == (
        f"serving, {stats.num_graphs} graphs in {stats.graph_capture_s:.1f} s"
    )
    assert prefiller.info["phase"] == "serving"
    assert decoder_metric(service, "pdserve_graph_capture_seconds") == stats.graph_capture_s > 0


def steps_of_requests(decoder: Worker, num_requests: int) -> list[worker_pb2.StepOutput]:
    """Each StepOutput that a proxy gets while a decoder computes so many requests for it."""
    sampling = worker_pb2.SamplingParams(top_p=1, max_tokens=_NUM_TOKENS, ignore_eos=True)
    sampling.repetition_penalty = 1
    outgoing: queue.Queue[worker_pb2.ProxyMessage | None] = queue.Queue()
    for i in range(num_requests):
        key = worker_pb2.RequestKey(request_id=f"counted-{i}")
        prompt = story(8, seed=i)
        work = worker_pb2.Work(
            token_ids=prompt, num_prompt_tokens=len(prompt), sampling=sampling, deadline_ms=60_000
        )
        outgoing.put(worker_pb2.ProxyMessage(reserve=worker_pb2.Reserve(key=key, work=work)))
    steps, num_released = [], 0
    with grpc.insecure_channel(decoder.info["address"]) as channel:
        session = worker_pb2_grpc.WorkerStub(channel).Session(
            iter(outgoing.get, None), metadata=(("x-pdserve-token", TOKEN),), timeout=60
        )
        for message in session:
            assert not message.HasField("failed"), message
            if message.HasField("reserved"):
                local = worker_pb2.PrefillLocally(key=message.reserved.key)
                outgoing.put(worker_pb2.ProxyMessage(prefill_locally=local))
            if message.HasField("step"):
                steps.append(message.step)
            num_released += message.HasField("released")
            if num_released == num_requests:
                outgoing.put(None)
                break
    return steps


def test_a_proxy_gets_one_message_a_step_whatever_is_batched(service: Service) -> None:
    num_requests = 6
    (decoder,) = service.of_role("decoder")
    before = decoder.stats().num_steps
    steps = steps_of_requests(decoder, num_requests)
    num_tokens = [
        len(step.plain.token_id) + sum(len(output.token_ids) for output in step.outputs)
        for step in steps
    ]
    assert sum(num_tokens) == num_requests * _NUM_TOKENS
    assert max(num_tokens) == num_requests
    assert len(steps) <= decoder.stats().num_steps - before < 2 * _NUM_TOKENS
