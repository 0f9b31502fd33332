"""What a real worker tells a proxy about its prefix cache."""

import queue
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos import worker_pb2, worker_pb2_grpc
from protos.block_hash import block_salt, hash_blocks, kv_identity
from tests.integration.service import TOKEN, Service

pytestmark = pytest.mark.multiprocess

_NUM_BLOCKS = 24


def _next_events(
    replies: "grpc._CallIterator[worker_pb2.WorkerMessage]",
) -> Iterator[worker_pb2.KVEvents]:
    for message in replies:
        if message.HasField("kv_events"):
            yield message.kv_events


def _split(joined: bytes) -> set[bytes]:
    return {joined[i : i + 16] for i in range(0, len(joined), 16)}


@pytest.mark.parametrize("role", ["prefiller", "decoder"])
def test_a_snapshot_and_then_every_change_in_order(tiny_model: Path, role: str) -> None:
    prompts = [[seed * 40 + 3 + i % 37 for i in range(200)] for seed in range(6)]
    with Service(tiny_model, worker={"num_blocks": _NUM_BLOCKS}) as service:
        (worker,) = service.of_role(role)
        service.complete(prompts[0], max_tokens=4)
        outgoing: queue.SimpleQueue[worker_pb2.ProxyMessage | None] = queue.SimpleQueue()
        with grpc.insecure_channel(worker.info["address"]) as channel:
            replies = worker_pb2_grpc.WorkerStub(channel).Session(
                iter(outgoing.get, None), timeout=60, metadata=(("x-pdserve-token", TOKEN),)
            )
            hello = next(replies).hello
            salt = block_salt(kv_identity(hello.model, hello.layout), "", "")
            outgoing.put(worker_pb2.ProxyMessage(resync_kv=worker_pb2.ResyncKV()))
            events = _next_events(replies)
            snapshot = next(e for e in events if e.is_snapshot)
            found = _split(snapshot.stored)
            assert found >= set(hash_blocks(prompts[0], 32, salt))
            sequence = snapshot.sequence
            for prompt in prompts[1:]:
                service.complete(prompt, max_tokens=4)
            # The pool is too small for all: the first prompts have to leave it.
            wanted = set(hash_blocks(prompts[-1], 32, salt))
            while not wanted <= found or set(hash_blocks(prompts[0], 32, salt)) <= found:
                change = next(events)
                assert change.sequence == sequence + 1
                sequence = change.sequence
                found -= _split(change.removed)
                found |= _split(change.stored)
            assert len(found) <= _NUM_BLOCKS
            outgoing.put(None)
            replies.cancel()
