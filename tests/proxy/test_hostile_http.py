"""Clients that mean no good, or no sense: a 4xx for them, and service for the others."""

import asyncio
import json
from typing import Any

import pytest

from proxy.http_protocol import BoundedHttpProtocol
from tests.proxy.conftest import MODEL, Stand, StandFactory

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hello"}
DEEP = 900  # the JSON parser itself refuses 1024


def nested(depth: int, inner: str = "1") -> str:
    return '{"a":' * depth + inner + "}" * depth


def chat(more: str) -> str:
    return f'{{"messages":[{{"role":"user","content":"Hello"}}],"max_tokens":2,{more}}}'


def tool(parameters: str, strict: str = "false") -> str:
    function = f'{{"name":"f","parameters":{parameters},"strict":{strict}}}'
    return f'"tools":[{{"type":"function","function":{function}}}]'


def called(arguments: str) -> str:
    call = f'{{"id":"c","type":"function","function":{{"name":"f","arguments":{arguments}}}}}'
    return (
        f'{{"messages":[{{"role":"user","content":"a"}},{{"role":"assistant","tool_calls":[{call}]}}],'
        '"max_tokens":2}'
    )


# name -> (path, body, statuses that are right)
BODIES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "lone surrogate": (TEXT, '{"prompt":"\\ud800"}', (400,)),
    "surrogate pair": (TEXT, '{"prompt":"\\ud83d\\ude42","max_tokens":2}', (200,)),
    "surrogate in a key": (TEXT, '{"prompt":"a","logit_bias":{"\\udfff":1}}', (400,)),
    "nul": (TEXT, '{"prompt":"a\\u0000b","stop":"\\u0000","max_tokens":2}', (200,)),
    "nan": (TEXT, '{"prompt":"a","temperature":NaN}', (400,)),
    "infinity": (TEXT, '{"prompt":"a","temperature":-Infinity}', (400,)),
    "overflow": (TEXT, '{"prompt":"a","temperature":1e999}', (400,)),
    "underflow": (TEXT, '{"prompt":"a","temperature":1e-999,"max_tokens":2}', (200,)),
    "huge integer": (TEXT, f'{{"prompt":"a","max_tokens":{"9" * 400}}}', (400,)),
    "huge seed": (TEXT, '{"prompt":"a","seed":18446744073709551616}', (400,)),
    "largest seed": (TEXT, '{"prompt":"a","seed":18446744073709551615,"max_tokens":2}', (200,)),
    "smallest seed": (TEXT, '{"prompt":"a","seed":-9223372036854775808,"max_tokens":2}', (200,)),
    "duplicate key": (TEXT, '{"prompt":"a","max_tokens":0,"max_tokens":2}', (200,)),
    "bool for int": (TEXT, '{"prompt":"a","n":true}', (400,)),
    "float for int": (TEXT, '{"prompt":"a","max_tokens":2.5}', (400,)),
    "prompt of bools": (TEXT, '{"prompt":[true,false]}', (400,)),
    "prompt of huge ids": (TEXT, '{"prompt":[18446744073709551615]}', (400,)),
    "prompt of floats": (TEXT, '{"prompt":[1.0]}', (400,)),
    "prompt that is an object": (TEXT, '{"prompt":{"a":1}}', (400,)),
    "mixed prompts": (TEXT, '{"prompt":["a",[5,6]],"max_tokens":2}', (200,)),
    "nested prompts": (TEXT, '{"prompt":[[["a"]]]}', (400,)),
    "empty prompts": (TEXT, '{"prompt":[""]}', (400,)),
    "wide digits": (TEXT, '{"prompt":"a","logit_bias":{"\\uff15":1}}', (400,)),
    "signed key": (TEXT, '{"prompt":"a","logit_bias":{"-5":1}}', (400,)),
    "long model": (TEXT, f'{{"prompt":"a","model":"{"m" * 100_000}"}}', (404,)),
    "empty": (TEXT, "", (400,)),
    "null": (TEXT, "null", (400,)),
    "array": (TEXT, "[]", (400,)),
    "byte order mark": (TEXT, '\ufeff{"prompt":"a"}', (400,)),
    "trailing garbage": (TEXT, '{"prompt":"a"}{}', (400,)),
    "too deep": (TEXT, nested(100_000), (400,)),
    "deep unknown field": (TEXT, f'{{"prompt":"a","max_tokens":2,"x":{nested(DEEP)}}}', (200,)),
    "deep prompt": (TEXT, '{"prompt":' + "[" * DEEP + "]" * DEEP + "}", (400,)),
    "deep schema": (TEXT, f'{{"prompt":"a","guided_json":{nested(DEEP)}}}', (200, 400)),
    "deep schema text": (
        TEXT,
        json.dumps({"prompt": "a", "guided_json": nested(100_000)}),
        (400,),
    ),
    "schema with infinity": (
        TEXT,
        '{"prompt":"a","guided_json":{"type":"number","maximum":1e999}}',
        (400,),
    ),
    "deep tool": (CHAT, chat(tool(nested(DEEP))), (200, 400)),
    "deep strict tool": (CHAT, chat(tool(nested(DEEP), "true")), (200, 400)),
    "deep forced tool": (CHAT, chat(tool(nested(DEEP)) + ',"tool_choice":"required"'), (400,)),
    "deep kwargs": (CHAT, chat(f'"chat_template_kwargs":{{"x":{nested(DEEP)}}}'), (200, 400)),
    "deep arguments": (CHAT, called(nested(DEEP)), (200, 400)),
    "deep arguments text": (CHAT, called(json.dumps("[" * 200_000)), (200, 400)),
    "surrogate in arguments text": (CHAT, called(json.dumps('{"a":"\\ud800"}')), (200,)),
    "surrogate in a schema text": (
        TEXT,
        json.dumps({"prompt": "a", "guided_json": '{"const":"\\ud800"}'}),
        (400,),
    ),
    "arguments of nan": (CHAT, called('"{\\"a\\": NaN}"'), (200, 400)),
    "huge number in arguments": (CHAT, called(json.dumps("9" * 10_000)), (200, 400)),
    "kwargs over the template's names": (
        CHAT,
        chat('"chat_template_kwargs":{"messages":1,"raise_exception":5,"bos_token":[],"loop":{}}'),
        (200, 400),
    ),
    "many messages": (CHAT, json.dumps({"messages": [USER] * 20_000}), (400,)),
    "many parts": (
        CHAT,
        json.dumps({"messages": [{**USER, "content": [{"type": "text", "text": "a"}] * 5000}]}),
        (400,),
    ),
    "many ids": (TEXT, json.dumps({"prompt": [5] * 200_000}), (400,)),
    "no messages": (CHAT, '{"messages":[]}', (400,)),
    "unknown role": (CHAT, '{"messages":[{"role":"robot","content":"a"}]}', (400,)),
    "message that is text": (CHAT, '{"messages":["a"]}', (400,)),
    "image": (
        CHAT,
        '{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"a"}}]}]}',
        (400,),
    ),
    "detokenize negative": ("/detokenize", '{"tokens":[-1]}', (400,)),
    "detokenize nothing": ("/detokenize", '{"tokens":[]}', (200,)),
    "tokenize nothing": ("/tokenize", '{"prompt":""}', (200,)),
    "tokenize surrogate": ("/tokenize", '{"prompt":"\\udc00"}', (400,)),
    "embeddings of nothing": ("/v1/embeddings", "{}", (400,)),
}


async def test_strange_bodies_get_the_right_status(stand: StandFactory) -> None:
    headers = {"content-type": "application/json"}
    async with stand() as proxy:
        for name, (path, body, statuses) in BODIES.items():
            for is_stream in (False, True):
                sent = body
                if is_stream:
                    if path not in (CHAT, TEXT) or not body.startswith("{"):
                        continue
                    sent = '{"stream":true,' + body[1:]
                reply = await proxy.http.post(path, content=sent.encode(), headers=headers)
                assert reply.status_code in statuses, (name, is_stream, reply.text[:300])
                if reply.status_code >= 400:
                    error = reply.json()["error"]
                    assert len(error["message"]) < 1000, name
                    assert isinstance(error["code"], str)
        await proxy.until_idle()


async def raw(proxy: Stand, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send bytes as they are, close our side, read everything."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.server.http_port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause_s)
    async with asyncio.timeout(10):
        try:
            data = await reader.read()
        except ConnectionError:
            data = b""
    writer.close()
    return data


def post(body: bytes, *more: str, length: bool = True) -> bytes:
    head = ["POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json", *more]
    if length:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


GOOD = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2}).encode()
STREAM = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2, "stream": True}).encode()
CLOSE = "Connection: close"


async def test_pipelined_requests_are_answered_in_order(stand: StandFactory) -> None:
    async with stand() as proxy:
        data = await raw(proxy, post(GOOD) + post(STREAM) + post(b"{}") + post(GOOD, CLOSE))
        assert data.count(b"HTTP/1.1 ") == 4
        assert [part[:3] for part in data.split(b"HTTP/1.1 ")[1:]] == [
            b"200",
            b"200",
            b"400",
            b"200",
        ]
        assert data.count(b"data: [DONE]") == 1
        await proxy.until_idle()


@pytest.mark.parametrize("more", [(), ("Connection: keep-alive",)])
async def test_clients_of_http_1_0_get_no_chunks(
    stand: StandFactory, more: tuple[str, ...]
) -> None:
    async with stand() as proxy:
        body = STREAM.replace(b'"max_tokens": 2', b'"max_tokens": 40')
        head, _, events = (
            (await raw(proxy, post(body, *more).replace(b"HTTP/1.1", b"HTTP/1.0")))
            .replace(b"\r\n", b"\n")
            .partition(b"\n\n")
        )
        assert b"transfer-encoding" not in head.lower()
        lines = [line for line in events.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines.pop() == "data: [DONE]"
        choices = [json.loads(line[6:])["choices"][0] for line in lines]
        assert choices[-1]["finish_reason"] == "length"
        whole = await proxy.http.post(TEXT, content=body.replace(b"true", b"false"))
        text = whole.json()["choices"][0]["text"]
        assert "".join(choice["text"] for choice in choices) == text
        bounded = await raw(proxy, post(GOOD, *more).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert b"content-length" in bounded
        await proxy.until_idle()


async def test_bodies_in_chunks_and_drops_are_read(stand: StandFactory) -> None:
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, bytes([byte])) for byte in GOOD) + b"0\r\n\r\n"
    head = post(b"", "Transfer-Encoding: chunked", CLOSE, length=False)
    async with stand() as proxy:
        assert (await raw(proxy, head + chunks)).startswith(b"HTTP/1.1 200")
        pieces = [post(GOOD, CLOSE)[i : i + 7] for i in range(0, len(post(GOOD, CLOSE)), 7)]
        assert (await raw(proxy, *pieces, pause_s=0.001)).startswith(b"HTTP/1.1 200")
        expecting = post(GOOD, "Expect: 100-continue", CLOSE)
        cut = len(expecting) - len(GOOD)
        data = await raw(proxy, expecting[:cut], expecting[cut:], pause_s=0.05)
        assert data.startswith(b"HTTP/1.1 100")
        assert b"HTTP/1.1 200" in data


@pytest.mark.parametrize(
    "offer",
    [
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"),
        ("upgrade: websocket", "connection: keep-alive, Upgrade", "Sec-WebSocket-Version: 13"),
    ],
)
async def test_offers_of_another_protocol_are_ignored(
    stand: StandFactory, offer: tuple[str, ...]
) -> None:
    async with stand() as proxy:
        request, last = post(GOOD, *offer), post(GOOD, CLOSE)
        cut = len(request) - len(GOOD)
        for pieces in ([request], [request[:cut], request[cut:]]):
            data = await raw(proxy, *pieces, request + last, pause_s=0.02)
            assert data.count(b"HTTP/1.1 200") == 3, data[:300]
        # What looks like an offer in a body is none.
        body = GOOD.replace(b'"a"', b'"a\\r\\nUpgrade: h2c"')
        assert (await raw(proxy, post(body, CLOSE))).startswith(b"HTTP/1.1 200")


BROKEN: dict[str, bytes] = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 100 + b"\r\n\r\n",
    "two lengths": post(GOOD, "Content-Length: 5"),
    "length and chunks": post(GOOD, "Transfer-Encoding: chunked"),
    "negative length": post(GOOD, "Content-Length: -5", length=False),
    "bad chunk": post(b"zz\r\nabc\r\n", "Transfer-Encoding: chunked", length=False),
    "bad version": b"GET /health HTTP/9.9\r\n\r\n",
    "no such method": b"BREW /health HTTP/1.1\r\nHost: a\r\n\r\n",
    "a header without name": b"GET /health HTTP/1.1\r\n: x\r\n\r\n",
    "control characters": b"GET /health\x01 HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_requests_are_refused_and_closed(stand: StandFactory, name: str) -> None:
    async with stand() as proxy:
        data = await raw(proxy, BROKEN[name])
        assert data == b"" or data.startswith(b"HTTP/1.1 4"), data[:200]
        assert (await proxy.http.get("/health")).status_code == 200


async def test_half_a_request_and_a_close_leave_nothing(stand: StandFactory) -> None:
    whole = post(STREAM.replace(b'"max_tokens": 2', b'"max_tokens": 900'))
    async with stand() as proxy:
        for cut in (1, 40, len(whole) - 20, len(whole) - 1, len(whole)):
            _, writer = await asyncio.open_connection("127.0.0.1", proxy.server.http_port)
            writer.write(whole[:cut])
            await writer.drain()
            if cut == len(whole):
                await proxy.until(lambda: bool(proxy.decoders[0].held))
            writer.transport.abort()
        await proxy.until_idle()
        assert proxy.metric("pdserve_requests_total", api="completions", status="500") == 0
        reply = await proxy.http.post(TEXT, content=GOOD)
        assert reply.status_code == 200


async def test_clients_that_stop_sending_are_ended(
    stand: StandFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.2)
    async with stand(client_read_timeout_s=0.2) as proxy:
        whole = post(GOOD)
        for cut in (0, 1, 60):
            assert await raw(proxy, whole[:cut], pause_s=0.01) == b""
        for path in ("/v1/completions", "/tokenize"):
            request = whole.replace(b"/v1/completions", path.encode())
            data = await raw(proxy, request[:-5].replace(b"Host", b"Connection: close\r\nHost"))
            assert data.startswith(b"HTTP/1.1 408"), data[:200]
        # A whole request in slow pieces is fine, and so is one that takes its time after it.
        proxy.decoders[0].behavior.token_delay_s = 0.3
        pieces = [post(GOOD, CLOSE)[i : i + 60] for i in range(0, 300, 60)]
        assert (await raw(proxy, *pieces, pause_s=0.03)).startswith(b"HTTP/1.1 200")
        await proxy.until_idle()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("//v1/models", 404),
        ("/v1/models/", 404),
        ("/v1/models/%00", 404),
        ("/v1/models/%ff%fe", 404),
        ("/v1/models/..%2f..%2fetc%2fpasswd", 404),
        (f"/v1/models/{'x' * 20_000}", 404),
        (f"/v1/models/{MODEL}?a=b&a=%zz", 200),
        ("/%e2%82%ac", 404),
        ("/v1/completions/", 404),
    ],
)
async def test_strange_paths(stand: StandFactory, path: str, status: int) -> None:
    async with stand() as proxy:
        request = f"GET {path} HTTP/1.1\r\nHost: a\r\n{CLOSE}\r\n\r\n".encode()
        data = await raw(proxy, request)
        assert data.startswith(b"HTTP/1.1 %d" % status), data[:300]
        body: Any = json.loads(data.partition(b"\r\n\r\n")[2])
        assert ("error" in body) == (status != 200)
