"""LoRA adapters that clients load and unload while the service runs.

    load:   SetAdapter -> every connected worker -> AdapterChanged -> a name that `model` may give
    later:  a worker that greets is sent all of them, before any request

Workers read the files themselves: a path must mean the same on all hosts.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from protos import worker_pb2
from proxy.config import ProxyConfig
from proxy.errors import InvalidRequest, ModelNotFound, ProxyError, Unavailable
from proxy.session import Identity, WorkerSession

Connected = Callable[[], Sequence[WorkerSession]]
"""The sessions to all workers that can be given work, now."""

_MAX_NAME_CHARS = 256


class Adapters:
    """What is loaded, and the answers that are awaited."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._paths: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        self._answers: dict[tuple[Identity, str], asyncio.Future[str]] = {}

    @property
    def names(self) -> Sequence[str]:
        """What `model` may give beside the model's own names."""
        return sorted(self._paths)

    def key(self, name: str) -> str:
        """What stands for an adapter in the block hashes of workers; of the model itself, ""."""
        return self._keys.get(name, name)

    def messages(self) -> list[worker_pb2.ProxyMessage]:
        """What a worker is told first."""
        return [_set_adapter(name, path) for name, path in self._paths.items()]

    def changed(self, identity: Identity, message: worker_pb2.AdapterChanged) -> None:
        """A worker answered."""
        if message.key:
            self._keys[message.name] = message.key
        answer = self._answers.get((identity, message.name))
        if answer is not None and not answer.done():
            answer.set_result(message.error)

    async def load(self, name: str, path: str, connected: Connected) -> None:
        """Let every worker read the adapter, or the new one of that name.

        Raises: InvalidRequest: the name is taken, the path is not allowed, or a worker refused.
            Unavailable: no worker is connected, or one does not answer. Nothing changes then.
        """
        if not name or len(name) > _MAX_NAME_CHARS or name in self._config.served_model_names:
            raise InvalidRequest(f"lora_name {name[:100]!r} is not allowed", param="lora_name")
        folder, told = self._allowed(path), connected()
        try:
            error = await self._tell(_set_adapter(name, folder), told)
            if error:
                raise InvalidRequest(
                    f"adapter {name!r} cannot be loaded: {error}", param="lora_path"
                )
        except ProxyError:
            for session in connected():
                session.send(_set_adapter(name, self._paths.get(name, "")))
            raise
        self._paths[name] = folder
        for session in connected():
            if session not in told:  # it greeted meanwhile
                session.send(_set_adapter(name, folder))

    async def unload(self, name: str, connected: Connected) -> None:
        """Forget an adapter; requests that run with it go on.

        Raises: ModelNotFound: not loaded. Unavailable: a worker does not answer.
        """
        if self._paths.pop(name, None) is None:
            raise ModelNotFound(f"The adapter `{name[:100]}` is not loaded", param="lora_name")
        self._keys.pop(name, None)
        await self._tell(_set_adapter(name, ""), connected())

    def _allowed(self, path: str) -> str:
        root = self._config.adapters_folder
        if not root:
            raise InvalidRequest(
                "adapters cannot be loaded: proxy.adapters_folder is not set", param="lora_path"
            )
        base = Path(root).expanduser().resolve()
        folder = (base / path).resolve()
        if folder == base or not folder.is_relative_to(base):
            raise InvalidRequest(
                f"lora_path {path[:200]!r} is not inside of {root}", param="lora_path"
            )
        return str(folder)

    async def _tell(
        self, message: worker_pb2.ProxyMessage, sessions: Sequence[WorkerSession]
    ) -> str:
        """Send to all and wait for all; return the first error, or nothing."""
        if not sessions:
            raise Unavailable("no worker is connected")
        loop, name = asyncio.get_running_loop(), message.set_adapter.name
        keys = [(session.identity, name) for session in sessions]
        if any(key in self._answers for key in keys):
            raise InvalidRequest(f"adapter {name!r} is being changed", param="lora_name")
        self._answers |= {key: loop.create_future() for key in keys}
        try:
            for session in sessions:
                session.send(message)
            async with asyncio.timeout(self._config.adapter_timeout_s):
                errors = await asyncio.gather(*(self._answers[key] for key in keys))
        except TimeoutError:
            raise Unavailable(
                f"a worker did not answer in {self._config.adapter_timeout_s} s"
            ) from None
        finally:
            for key in keys:
                del self._answers[key]
        return next((error for error in errors if error), "")


def _set_adapter(name: str, path: str) -> worker_pb2.ProxyMessage:
    return worker_pb2.ProxyMessage(set_adapter=worker_pb2.SetAdapter(name=name, path=path))
