"""A conversation over the HTTP API, streamed."""

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import httpx

from pdserve.errors import PdserveError

_TIMEOUT = httpx.Timeout(10.0, read=600.0)


class ChatError(PdserveError):
    """The service refused, or broke off."""


class Chat:
    """Remembers what was said; a context manager that closes its connection."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None,
        api_key: str | None,
        system: str | None,
        max_tokens: int,
        temperature: float,
    ) -> None:
        root = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(
            base_url=f"{root}/v1/", headers=headers, timeout=_TIMEOUT, trust_env=False
        )
        self._model = model
        self._options = {"max_tokens": max_tokens, "temperature": temperature}
        self._messages: list[dict[str, str]] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def ask(self, message: str) -> Iterator[str]:
        """The answer, piece by piece; it is remembered as far as it was read.

        Raises: ChatError.
        """
        self._messages.append({"role": "user", "content": message})
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                yield piece
        except httpx.HTTPError as error:
            raise ChatError(f"{self._client.base_url}: {error}") from None
        finally:
            self._messages.append({"role": "assistant", "content": answer})

    def _stream(self) -> Iterator[str]:
        if self._model is None:
            models = self._client.get("models")
            if models.status_code != 200:
                raise ChatError(_message(models.content))
            self._model = str(models.json()["data"][0]["id"])
        body = {"model": self._model, "messages": self._messages, "stream": True}
        with self._client.stream("POST", "chat/completions", json=body | self._options) as reply:
            if reply.status_code != 200:
                raise ChatError(_message(reply.read()))
            for line in reply.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                yield _text(json.loads(data))


def run_dialogue(chat: Chat) -> None:
    """Ask and answer at the terminal until end of input or Ctrl-C."""
    print("Ctrl-D ends the conversation.")
    while True:
        try:
            message = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not message:
            continue
        try:
            for piece in chat.ask(message):
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" [stopped]")
        except ChatError as error:
            print(f"error: {error}")


def _text(event: dict[str, Any]) -> str:
    if "error" in event:
        raise ChatError(str(event["error"].get("message", event["error"])))
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
