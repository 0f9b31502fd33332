"""API keys and rate limits, over HTTP and gRPC."""

import asyncio
from pathlib import Path

import grpc
import openai
import pytest

from protos import inference_pb2, inference_pb2_grpc
from proxy.auth import Account, Accounts, ApiKey, hash_key, load_keys
from proxy.config import ProxyConfig
from proxy.errors import RateLimited, Unauthenticated
from tests.proxy.conftest import MODEL, StandFactory

KEY = "sk-of-alice"
BODY = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}


def config(**options: object) -> ProxyConfig:
    return ProxyConfig(model_path="", served_model_names=("m",), controller_address="", **options)


def account(requests: int = 0, tokens: int = 0) -> Account:
    key = ApiKey(name="a", digest=b"", requests_per_minute=requests, tokens_per_minute=tokens)
    return Account(key, now_s=0.0)


def test_a_key_file_holds_hashes_limits_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        f"# keys\n\nalice {hash_key(KEY)} requests_per_minute=5  # note\nbob {hash_key('b')}\n"
    )
    alice, bob = load_keys(config(api_keys_file=str(path), tokens_per_minute=7))
    assert (alice.name, alice.requests_per_minute, alice.tokens_per_minute) == ("alice", 5, 7)
    assert (bob.requests_per_minute, bob.tokens_per_minute) == (0, 7)


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice sk-plain-text",
        f"a {hash_key('x')} speed=5",
        f"a {hash_key('x')[:-2]}",
        "# x",
    ],
)
def test_a_malformed_key_file_is_refused_without_showing_keys(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(line)
    with pytest.raises(ValueError, match="keys") as refused:
        load_keys(config(api_keys_file=str(path)))
    assert "sk-plain-text" not in str(refused.value)


def test_a_key_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="keys is not a text file"):
        load_keys(config(api_keys_file=str(path)))


def test_the_config_with_keys_survives_json() -> None:
    before = config(api_key_hashes=(hash_key(KEY),), cors_origins=("https://a.example",))
    assert ProxyConfig.from_json(before.to_json()) == before


def test_only_the_bearer_of_the_key_is_let_in() -> None:
    accounts = Accounts(config(api_key_hashes=(hash_key(KEY),)))
    assert accounts.authenticate(f"Bearer {KEY}").name == "key-0"
    assert accounts.authenticate(f"bearer  {KEY} ").name == "key-0"
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        "Bearer é\udcff",
    ):
        with pytest.raises(Unauthenticated):
            accounts.authenticate(wrong)


def test_requests_per_minute_refill_evenly() -> None:
    limited = account(requests=6)
    for _ in range(6):
        limited.admit(1, now_s=0.0)
    with pytest.raises(RateLimited, match="6 requests") as refused:
        limited.admit(1, now_s=0.0)
    assert refused.value.retry_after_s == pytest.approx(10.0)
    limited.admit(1, now_s=10.0)
    with pytest.raises(RateLimited):
        limited.admit(1, now_s=15.0)


def test_tokens_may_be_overdrawn_by_output_and_are_paid_back() -> None:
    limited = account(tokens=60)
    limited.admit(1000, now_s=0.0)  # more than a minute's worth needs a full minute, but passes
    with pytest.raises(RateLimited, match="60 tokens") as refused:
        limited.admit(10, now_s=0.0)
    assert refused.value.retry_after_s == pytest.approx(950.0)
    limited.admit(10, now_s=951.0)


async def test_everything_but_probes_needs_a_key(stand: StandFactory) -> None:
    async with stand(api_key_hashes=(hash_key(KEY),)) as proxy:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await proxy.http.get(path)).status_code == 200
        for method, path in (
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
            ("GET", "/pdserve/status"),
            ("GET", "/nothing"),
        ):
            for headers in ({}, {"authorization": "Bearer wrong"}):
                reply = await proxy.http.request(method, path, json=BODY, headers=headers)
                assert reply.status_code == 401
                assert reply.json()["error"]["type"] == "authentication_error"
                assert reply.headers["www-authenticate"] == "Bearer"
        assert not any(worker.works for worker in proxy.workers)
        client = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="wrong", max_retries=0)
        async with client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
            good = client.with_options(api_key=KEY)
            assert (await good.completions.create(**BODY)).choices[0].text


async def test_a_key_may_hold_any_character(stand: StandFactory) -> None:
    async with stand(api_key_hashes=(hash_key("schlüssel-日本"),)) as proxy:
        for key, status in (("schlüssel-日本", 200), ("schlüssel-日", 401)):
            headers = {b"authorization": b"Bearer " + key.encode()}
            assert (await proxy.http.get("/v1/models", headers=headers)).status_code == status
        headers = {b"authorization": b"Bearer \xff\xfe"}
        assert (await proxy.http.get("/v1/models", headers=headers)).status_code == 401


async def test_grpc_needs_the_same_key(stand: StandFactory) -> None:
    async with (
        stand(api_key_hashes=(hash_key(KEY),)) as proxy,
        grpc.aio.insecure_channel(proxy.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            text="Hello", options=inference_pb2.GenerationOptions(max_tokens=2)
        )
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(request, metadata=metadata)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(stub.GenerateStream(request, metadata=metadata)))
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        reply = await stub.Generate(request, metadata=(("authorization", f"Bearer {KEY}"),))
        assert reply.choices[0].text


async def test_the_key_file_may_change_while_the_proxy_runs(
    stand: StandFactory, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"old {hash_key('old')}\nkept {hash_key('kept')} requests_per_minute=1\n")
    async with stand(api_keys_file=str(path), api_keys_poll_s=0.02) as proxy:

        async def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            reply = await proxy.http.post("/v1/completions", json=BODY, headers=headers)
            return reply.status_code

        async def until(key: str, wanted: int) -> None:
            async with asyncio.timeout(5):
                while await status(key) != wanted:
                    await asyncio.sleep(0.01)

        assert [await status("old"), await status("kept"), await status("kept")] == [200, 200, 429]
        lines = f"new {hash_key('new')}\nkept {hash_key('kept')} requests_per_minute=1\n"
        path.write_text(lines)
        await until("new", 200)
        assert await status("old") == 401
        # What a key has used is not forgotten.
        assert await status("kept") == 429
        for bad in ("new sk-plain", "# none", "\udcff"):
            path.write_bytes(bad.encode(errors="surrogateescape"))
            await asyncio.sleep(0.1)
            assert [await status("new"), await status("old")] == [200, 401]
        path.unlink()
        await asyncio.sleep(0.1)
        assert await status("new") == 200
        path.write_text(f"old {hash_key('old')}\n")
        await until("old", 200)
        assert await status("new") == 401


async def test_a_key_over_its_limit_waits_and_others_do_not(
    stand: StandFactory, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(
        f"slow {hash_key('slow')} requests_per_minute=2\n"
        f"small {hash_key('small')} tokens_per_minute=5\nfree {hash_key('free')}\n"
    )
    async with stand(api_keys_file=str(path)) as proxy:

        async def status(key: str, **options: object) -> tuple[int, str | None]:
            headers = {"authorization": f"Bearer {key}"}
            reply = await proxy.http.post(
                "/v1/completions", json={**BODY, **options}, headers=headers
            )
            if reply.status_code == 429:
                assert reply.json()["error"]["code"] == "rate_limit_exceeded"
            return reply.status_code, reply.headers.get("retry-after")

        assert (await status("slow"))[0] == 200
        assert (await status("slow", stream=True))[0] == 200
        code, retry_after = await status("slow")
        assert code == 429
        assert 1 <= int(retry_after or 0) <= 30
        assert (await status("small", n=2))[0] == 200
        assert (await status("small"))[0] == 429
        assert (await status("free"))[0] == 200
        async with grpc.aio.insecure_channel(proxy.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(
                    inference_pb2.GenerateRequest(text="a"),
                    metadata=(("authorization", "Bearer slow"),),
                )
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(refused.value.trailing_metadata() or ())["retry-after"]) >= 1
        await proxy.until_idle()


async def test_cors_is_off_unless_asked_for(stand: StandFactory) -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with stand() as proxy:
        reply = await proxy.http.options("/v1/completions", headers=preflight)
        assert "access-control-allow-origin" not in reply.headers
    async with stand(cors_origins=("https://a.example",)) as proxy:
        reply = await proxy.http.options("/v1/completions", headers=preflight)
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        other = await proxy.http.options(
            "/v1/completions", headers={**preflight, "origin": "https://b.example"}
        )
        assert "access-control-allow-origin" not in other.headers


async def test_a_request_that_never_ran_takes_nothing_from_the_limit(stand: StandFactory) -> None:
    limits = {"requests_per_minute": 2, "tokens_per_minute": 1000}
    async with stand(max_concurrent_requests=1, max_queued_requests=0, **limits) as proxy:
        proxy.decoders[0].behavior.token_delay_s = 30
        running = asyncio.create_task(proxy.http.post("/v1/completions", json=BODY))
        await proxy.until(lambda: bool(proxy.decoders[0].held))
        for _ in range(4):
            reply = await proxy.http.post("/v1/completions", json=BODY)
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await proxy.until_idle()
        proxy.decoders[0].behavior.token_delay_s = 0
        codes = [
            (await proxy.http.post("/v1/completions", json=BODY)).status_code for _ in range(2)
        ]
        assert codes == [200, 429]
