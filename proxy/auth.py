"""Who calls, and how much each caller may use per minute.

A key is stored as the SHA-256 of its text: keys are long and random, so a slow hash would add
nothing. A presented key is hashed and compared with every stored one in constant time.

    # api_keys_file: name, hash, and limits that differ from the proxy's own
    alice  sha256:9f86d081884c7d65...  requests_per_minute=60 tokens_per_minute=20000
    bob    sha256:60303ae22b998861...

The file may change while the proxy runs: keys are added, removed and limited anew.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from proxy.config import ProxyConfig
from proxy.errors import RateLimited, Unauthenticated

logger = logging.getLogger(__name__)

_PREFIX = "sha256:"
_LIMITS = ("requests_per_minute", "tokens_per_minute")
_MAX_KEY_CHARS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """One stored key; a limit of 0 is none."""

    name: str
    digest: bytes
    requests_per_minute: int
    tokens_per_minute: int


class Bucket:
    """Refills by `per_minute` a minute up to `per_minute`; may be overdrawn."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._seen_s = now_s

    def wait_s(self, amount: int, now_s: float) -> float:
        """Seconds until `amount` may be taken; an amount above the capacity needs all of it."""
        if not self._per_minute:
            return 0.0
        self._refill(now_s)
        missing = min(amount, self._per_minute) - self._level
        return max(0.0, missing * 60.0 / self._per_minute)

    def take(self, amount: int, now_s: float) -> None:
        """Take `amount`, into debt if need be."""
        self._refill(now_s)
        self._level -= amount

    def _refill(self, now_s: float) -> None:
        gained = (now_s - self._seen_s) * self._per_minute / 60.0
        self._level = min(self._level + gained, float(self._per_minute))
        self._seen_s = now_s


class Account:
    """What one key has used."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.key = key
        self.name = key.name
        self._requests_per_minute = key.requests_per_minute
        self._tokens_per_minute = key.tokens_per_minute
        self._requests = Bucket(key.requests_per_minute, now_s)
        self._tokens = Bucket(key.tokens_per_minute, now_s)

    def admit(self, num_prompt_tokens: int, now_s: float | None = None) -> None:
        """Take one request and its prompt from what is left of the minute.

        Raises: RateLimited: nothing was taken; says when to come back.
        """
        now_s = time.monotonic() if now_s is None else now_s
        wait_s = self._requests.wait_s(1, now_s)
        limit = f"{self._requests_per_minute} requests"
        if (tokens_wait_s := self._tokens.wait_s(max(1, num_prompt_tokens), now_s)) > wait_s:
            wait_s, limit = tokens_wait_s, f"{self._tokens_per_minute} tokens"
        if wait_s > 0:
            raise RateLimited(
                f"the limit of this API key is {limit} per minute; try again in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )
        self._requests.take(1, now_s)
        self._tokens.take(num_prompt_tokens, now_s)

    @contextmanager
    def refund_unless_done(self, num_prompt_tokens: int) -> Iterator[None]:
        """Give back what `admit` took if the block raises: the request never ran."""
        try:
            yield
        except BaseException:
            self._requests.take(-1, time.monotonic())
            self._tokens.take(-num_prompt_tokens, time.monotonic())
            raise

    def charge(self, num_output_tokens: int) -> None:
        """Count what a request has generated."""
        self._tokens.take(num_output_tokens, time.monotonic())


class Accounts:
    """All keys of a proxy; without keys, everybody shares one account."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._seen = self._file_version()
        now_s = time.monotonic()
        self._accounts = [Account(key, now_s) for key in load_keys(config)]
        self._anonymous = Account(_key(config, "anonymous", b""), now_s)

    async def follow(self) -> None:
        """Reload whenever the file changes, until cancelled."""
        if not self._config.api_keys_file:
            return
        while True:
            await asyncio.sleep(self._config.api_keys_poll_s)
            version = self._file_version()
            if version != self._seen:
                self._seen = version
                self.reload()

    def reload(self) -> None:
        """Read the keys again; a key that is as it was keeps what it has used.

        A file that cannot be used is logged, and the keys stay as they are.
        """
        try:
            keys = load_keys(self._config)
        except (ValueError, OSError) as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        known = {account.key: account for account in self._accounts}
        now_s = time.monotonic()
        self._accounts = [known.get(key) or Account(key, now_s) for key in keys]
        logger.warning("%d API keys are loaded", len(keys))

    def _file_version(self) -> tuple[int, ...]:
        try:
            stat = os.stat(self._config.api_keys_file)
        except OSError:
            return ()
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino)

    @property
    def needs_key(self) -> bool:
        """Whether callers must show a key."""
        return bool(self._accounts)

    def authenticate(self, authorization: str | None) -> Account:
        """Find the account of an `Authorization` header, `Bearer KEY`.

        Raises: Unauthenticated.
        """
        if not self._accounts:
            return self._anonymous
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key or len(key) > _MAX_KEY_CHARS:
            raise Unauthenticated("an API key is required: Authorization: Bearer KEY")
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        found = None
        # NOTE: no early exit, so that the time tells nothing about which key came close.
        for account in self._accounts:
            if hmac.compare_digest(account.key.digest, digest):
                found = account
        if found is None:
            raise Unauthenticated("the API key is not valid", code="invalid_api_key")
        return found


def hash_key(key: str) -> str:
    """The form in which a key is stored."""
    return _PREFIX + hashlib.sha256(key.encode()).hexdigest()


def load_keys(config: ProxyConfig) -> list[ApiKey]:
    """Read the keys of the file and of the configuration.

    Raises: ValueError: a line is malformed, or the file is not text; OSError: it cannot be read.
    """
    keys = [
        _key(config, f"key-{i}", _digest(text, f"api_key_hashes[{i}]"))
        for i, text in enumerate(config.api_key_hashes)
    ]
    if config.api_keys_file:
        path = Path(config.api_keys_file)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not a text file in UTF-8") from None
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if words:
                keys.append(_parse_line(config, words, f"{path}:{number}"))
        if not keys:
            raise ValueError(f"{path} holds no API key")
    if len({key.digest for key in keys}) != len(keys):
        raise ValueError("an API key is listed twice")
    return keys


def _parse_line(config: ProxyConfig, words: list[str], where: str) -> ApiKey:
    if len(words) < 2:
        raise ValueError(f"{where}: expected a name and sha256:HASH")
    limits = {name: _limit_of(config, name) for name in _LIMITS}
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name not in limits or not value.isdecimal():
            raise ValueError(f"{where}: {word!r} is not one of {', '.join(_LIMITS)} with a number")
        limits[name] = int(value)
    return ApiKey(name=words[0], digest=_digest(words[1], where), **limits)


def _digest(text: str, where: str) -> bytes:
    digits = text.removeprefix(_PREFIX)
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        digest = b""
    if not text.startswith(_PREFIX) or len(digest) != hashlib.sha256().digest_size:
        # NOTE: not shown; it may be a key in plain text.
        raise ValueError(f"{where}: expected sha256: and 64 hex digits (printf %s KEY | sha256sum)")
    return digest


def _limit_of(config: ProxyConfig, name: str) -> int:
    limits = {
        "requests_per_minute": config.requests_per_minute,
        "tokens_per_minute": config.tokens_per_minute,
    }
    return limits[name]


def _key(config: ProxyConfig, name: str, digest: bytes) -> ApiKey:
    return ApiKey(
        name=name,
        digest=digest,
        requests_per_minute=config.requests_per_minute,
        tokens_per_minute=config.tokens_per_minute,
    )
