"""Messages that no proxy of ours sends: they are counted or refused, and end no worker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos import worker_pb2
from tests.integration.raw_session import raw_session, work
from tests.integration.service import Service, Worker, wait_until

pytestmark = pytest.mark.multiprocess

_NUM_BLOCKS = 8
_BLOCK_SIZE = 32
_PROMPT = list(range(3, 60))
_NO_TOKEN = 1_000_000


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[Service]:
    options = {"num_blocks": _NUM_BLOCKS, "speculation": "ngram", "num_draft_tokens": 2}
    with Service(tiny_model, worker=options) as running:
        yield running


@pytest.fixture
def workers(service: Service) -> Iterator[tuple[Worker, Worker]]:
    """The prefiller and the decoder, which live on, hold nothing and still serve."""
    (prefiller,), (decoder,) = service.of_role("prefiller"), service.of_role("decoder")
    expected = service.generate(_PROMPT, max_tokens=6, ignore_eos=True)
    yield prefiller, decoder
    service.assert_idle()
    assert service.generate(_PROMPT, max_tokens=6, ignore_eos=True) == expected


def key_of(name: str) -> worker_pb2.RequestKey:
    return worker_pb2.RequestKey(request_id=name)


@pytest.mark.parametrize("kind", ["prefill_locally", "activate"])
def test_a_message_about_a_request_that_still_waits_for_blocks_is_counted(
    workers: tuple[Worker, Worker], kind: str
) -> None:
    messages: dict[str, Any] = {
        "prefill_locally": worker_pb2.PrefillLocally(key=key_of("waits")),
        "activate": worker_pb2.Activate(key=key_of("waits"), token_ids=[5]),
    }
    _, decoder = workers
    before = decoder.stats().num_stale_messages
    with raw_session(decoder) as session:
        large = work([i % 300 + 3 for i in range((_NUM_BLOCKS - 1) * _BLOCK_SIZE)])
        session.send(reserve=worker_pb2.Reserve(key=key_of("large"), work=large))
        session.wait_reserved(key_of("large"))
        session.send(reserve=worker_pb2.Reserve(key=key_of("waits"), work=work(_PROMPT)))
        session.send(**{kind: messages[kind]})
        wait_until(lambda: decoder.stats().num_stale_messages > before, 10, "it is counted")
        session.send(cancel=worker_pb2.Cancel(key=key_of("large")))
        session.wait_reserved(key_of("waits"))
        local = worker_pb2.PrefillLocally(key=key_of("waits"))
        session.send(prefill_locally=local)
        session.wait_released(key_of("waits"))
        assert session.failure(key_of("waits")) is None
    assert decoder.stats().num_stale_messages == before + 1


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [_NO_TOKEN]}, f"token id {_NO_TOKEN} is outside the vocabulary"),
        (
            {"token_ids": [5], "draft_token_ids": [6, _NO_TOKEN]},
            f"token id {_NO_TOKEN} is outside the vocabulary",
        ),
    ],
)
def test_an_activation_with_tokens_that_are_none_ends_its_request_alone(
    workers: tuple[Worker, Worker], tokens: dict[str, list[int]], reason: str
) -> None:
    prefiller, decoder = workers
    key = key_of("activated")
    with raw_session(prefiller) as prefill, raw_session(decoder) as decode:
        decode.send(reserve=worker_pb2.Reserve(key=key, work=work(_PROMPT)))
        target = decode.wait_reserved(key).target
        prefill.send(prefill=worker_pb2.Prefill(key=key, work=work(_PROMPT), target=target))
        prefill.wait_released(key)
        decode.send(activate=worker_pb2.Activate(key=key, **tokens))
        decode.wait_released(key)
        failed = decode.failure(key)
    assert failed is not None
    assert failed.code == worker_pb2.FAILURE_INVALID
    assert reason in failed.message
