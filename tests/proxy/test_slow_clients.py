"""Clients that stop reading are ended by a deadline, hold little memory and leave no trace."""

import asyncio
import json
import resource
import socket
import time

from tests.proxy.conftest import MODEL, Stand, StandFactory

NUM_CLIENTS = 200


async def stalled_client(proxy: Stand) -> socket.socket:
    """Ask for a long stream, and never read it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", proxy.server.http_port))
    body = json.dumps(
        {"model": MODEL, "prompt": "a", "max_tokens": 8000, "stream": True, "logprobs": 20}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(client, head.encode() + body)
    return client


async def timed_stream(proxy: Stand) -> float:
    """Seconds that a reading client needs for 40 tokens."""
    started_s = time.perf_counter()
    body = {"model": MODEL, "prompt": "b", "max_tokens": 40, "stream": True}
    reply = await proxy.http.post("/v1/completions", json=body)
    assert reply.text.endswith("data: [DONE]\n\n")
    return time.perf_counter() - started_s


async def test_200_stalled_readers_are_ended_and_leave_nothing(stand: StandFactory) -> None:
    async with stand(max_concurrent_requests=300, client_write_timeout_s=3.0) as proxy:
        for worker in proxy.workers:
            worker.behavior.token_delay_s = 0.02
        alone_s = min([await timed_stream(proxy) for _ in range(3)])
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        clients = [await stalled_client(proxy) for _ in range(NUM_CLIENTS)]
        service = proxy.server.service
        try:
            await proxy.until(lambda: service.state().num_in_flight == NUM_CLIENTS, 30)
            # All buffers fill, then writes stall, then the deadline ends them.
            await proxy.until(lambda: service.state().num_in_flight == 0, 90)
            await proxy.until(lambda: not proxy.decoders[0].held)
            assert proxy.metric("pdserve_disconnects_total", phase="decode") >= NUM_CLIENTS
        finally:
            for client in clients:
                client.close()
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
        assert grown_kb < 256 * 1024
        again_s = min([await timed_stream(proxy) for _ in range(3)])
        assert again_s < alone_s * 2 + 0.2
        await proxy.until_idle()


async def test_a_client_that_pauses_gets_every_event_in_order(stand: StandFactory) -> None:
    async with stand() as proxy:
        for worker in proxy.workers:
            worker.behavior.token_delay_s = 0.0
        options = {"model": MODEL, "prompt": "a", "max_tokens": 300, "logprobs": 20, "n": 2}
        whole = (await proxy.http.post("/v1/completions", json=options)).json()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", proxy.server.http_port))
        body = json.dumps({**options, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        await loop.sock_sendall(
            client, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        )
        # The workers are through with it long before the client reads: writes have paused.
        decoder = proxy.decoders[0]
        await proxy.until(lambda: len(decoder.works) == 4 and not decoder.held, 20)
        assert proxy.server.service.state().num_in_flight == 1
        reader, writer = await asyncio.open_connection(sock=client, limit=1 << 22)
        await reader.readuntil(b"\r\n\r\n")
        texts = ["", ""]
        events = []
        while size := int(await reader.readline(), 16):
            piece = await reader.readexactly(size + 2)
            events += [line[6:] for line in piece.split(b"\n\n") if line.startswith(b"data: ")]
        assert events.pop() == b"[DONE]"
        for event in events:
            (choice,) = json.loads(event)["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]
        writer.close()
        await proxy.until_idle()
