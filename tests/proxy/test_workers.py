"""Membership and sessions: the pool follows the controller and survives everybody's absence."""

import asyncio

from protos import worker_pb2
from proxy.server import ProxyServer
from tests.proxy.conftest import MODEL, Stand, StandFactory
from tests.proxy.fakes import FakeController, FakeWorker

BODY = {"model": MODEL, "prompt": "The lighthouse stood at the end of the pier.", "max_tokens": 4}


async def serve(proxy: Stand) -> None:
    reply = await proxy.http.post("/v1/completions", json=BODY)
    assert reply.status_code == 200, reply.text


def connected(proxy: Stand) -> set[tuple[str, int]]:
    return {worker.identity for worker in proxy.server.service.pool.snapshots()}


async def test_a_new_worker_is_used_and_a_removed_one_is_not(stand: StandFactory) -> None:
    async with stand(num_prefillers=0) as proxy:
        await serve(proxy)
        fresh = FakeWorker(worker_pb2.ROLE_PREFILLER, "prefill-9", proxy.network)
        await fresh.start()
        proxy.controller.workers.append(fresh)
        proxy.controller.publish()
        await proxy.until(lambda: ("prefill-9", 1) in connected(proxy))
        await serve(proxy)
        assert fresh.num_prefills == 1
        proxy.controller.workers.remove(fresh)
        proxy.controller.publish()
        await proxy.until(lambda: ("prefill-9", 1) not in connected(proxy))
        await serve(proxy)
        assert fresh.num_prefills == 1
        await fresh.stop()


async def test_a_restarted_worker_serves_as_a_new_incarnation(stand: StandFactory) -> None:
    async with stand() as proxy:
        old = proxy.prefillers[0]
        await old.stop()
        await serve(proxy)
        fresh = await old.restarted()
        proxy.controller.workers[0] = fresh
        proxy.controller.publish()
        await proxy.until(lambda: ("prefill-0", 2) in connected(proxy))
        for _ in range(20):
            await serve(proxy)
        assert fresh.num_prefills > 0
        await fresh.stop()


async def test_a_broken_session_is_dialled_again_without_the_controller(
    stand: StandFactory,
) -> None:
    async with stand() as proxy:
        await proxy.controller.stop()
        decoder = proxy.decoders[0]
        port = int(decoder.address.rpartition(":")[2])
        await decoder.stop()
        await proxy.until(lambda: ("decode-0", 1) not in connected(proxy))
        revived = FakeWorker(worker_pb2.ROLE_DECODER, "decode-0", proxy.network)
        await revived.start(port)
        await proxy.until(lambda: ("decode-0", 1) in connected(proxy))
        proxy.decoders[0] = revived
        await serve(proxy)
        await proxy.until_idle()
        await revived.stop()


async def test_the_last_membership_stays_while_the_controller_is_away(
    stand: StandFactory,
) -> None:
    async with stand() as proxy:
        port = int(proxy.controller.address.rpartition(":")[2])
        await proxy.controller.stop()
        await proxy.until(lambda: not proxy.server.service.pool.has_controller)
        await serve(proxy)
        returned = FakeController()
        # A controller that knows nothing yet must not cut anybody off.
        returned.generation = 0
        await returned.start(port)
        await proxy.until(lambda: proxy.server.service.pool.has_controller)
        await serve(proxy)
        returned.generation = 100
        returned.workers = proxy.workers
        returned.publish()
        await serve(proxy)
        await returned.stop()


async def test_a_draining_worker_finishes_but_gets_nothing_new(stand: StandFactory) -> None:
    async with stand(num_decoders=2) as proxy:
        for worker in proxy.decoders:
            worker.behavior.token_delay_s = 0.02
        running = asyncio.create_task(
            proxy.http.post("/v1/completions", json={**BODY, "max_tokens": 40})
        )
        await proxy.until(lambda: any(w.num_decode_tokens for w in proxy.decoders))
        leaving = next(w for w in proxy.decoders if w.works)
        leaving.state = worker_pb2.WORKER_DRAINING
        proxy.controller.publish()
        generation = proxy.controller.generation
        await proxy.until(lambda: proxy.server.service.pool.generation == generation)
        for _ in range(6):
            await serve(proxy)
        assert len(leaving.works) == 1
        reply = await running
        assert reply.status_code == 200
        assert reply.json()["usage"]["completion_tokens"] == 40
        assert len(leaving.works) == 1


async def test_a_worker_with_another_identity_is_not_used(stand: StandFactory) -> None:
    async with stand() as proxy:
        impostor = FakeWorker(worker_pb2.ROLE_PREFILLER, "prefill-7", proxy.network)
        await impostor.start()
        impostor_entry = impostor.entry()
        impostor.engine_id = "somebody-else"
        impostor.entry = lambda: impostor_entry  # type: ignore[method-assign]
        proxy.controller.workers.append(impostor)
        proxy.controller.publish()
        await asyncio.sleep(0.3)
        assert ("prefill-7", 1) not in connected(proxy)
        await impostor.stop()


async def test_a_wrong_cluster_token_is_refused(stand: StandFactory) -> None:
    async with stand() as proxy:
        service = proxy.server.service
        config = service.config.from_json(
            service.config.to_json().replace("test-cluster-token", "guess")
        )
        other = ProxyServer(config, service.tokenizer)
        running = asyncio.create_task(other.run())
        await asyncio.wait_for(other.listening.wait(), 5)
        await asyncio.sleep(0.3)
        assert not other.service.pool.has_controller
        assert not other.service.is_ready
        other.stop()
        await asyncio.wait_for(running, 5)


async def test_readiness_needs_a_decoder_and_models_need_nobody(stand: StandFactory) -> None:
    async with stand(num_prefillers=1, num_decoders=1) as proxy:
        assert (await proxy.http.get("/ready")).status_code == 200
        await proxy.prefillers[0].stop()
        await proxy.until(lambda: len(connected(proxy)) == 1)
        assert (await proxy.http.get("/ready")).status_code == 200
        await proxy.decoders[0].stop()
        await proxy.until(lambda: not connected(proxy))
        assert (await proxy.http.get("/ready")).status_code == 503
        assert (await proxy.http.get("/health")).status_code == 200
        models = (await proxy.http.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [MODEL, "default"]
        assert (await proxy.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
        assert (await proxy.http.get("/v1/models/other")).status_code == 404


async def test_the_context_is_that_of_the_smallest_decoder(stand: StandFactory) -> None:
    async with stand(num_decoders=2) as proxy:
        proxy.decoders[0].max_model_len = 100
        await proxy.decoders[0].stop()
        await proxy.decoders[0].start()
        proxy.controller.publish()
        await proxy.until(lambda: proxy.server.service.max_model_len() == 100)
        reply = await proxy.http.post("/v1/completions", json={**BODY, "max_tokens": 100})
        assert reply.status_code == 400
        assert "100 tokens" in reply.json()["error"]["message"]


async def test_keys_without_a_release_are_reconciled(stand: StandFactory) -> None:
    async with stand() as proxy:
        proxy.decoders[0].forgets_releases = True
        await serve(proxy)
        assert proxy.server.service.state().num_pending_release > 0
        await proxy.until_idle()
        assert proxy.server.service.pool.counters.num_unreleased == 1


async def test_broken_sessions_stay_counted_when_their_worker_is_gone(stand: StandFactory) -> None:
    async with stand(num_decoders=2) as proxy:
        service = proxy.server.service
        await proxy.until(lambda: len(service.state().stats) >= 2)
        before = service.state().num_session_breaks
        await proxy.decoders[0].stop()
        proxy.controller.workers.remove(proxy.decoders[0])
        proxy.controller.publish()
        await proxy.until(lambda: ("decode-0", 1) not in service.pool.links)
        assert service.state().num_session_breaks == before + 1
