"""The connection to the Redis server that several fronts share.

A front without it keeps everything in its own memory. Keys are ``<prefix><kind>:<tenant>:<id>``, with the
tenant's name percent-encoded. Redis is trusted like the servers themselves: anyone who can write to it can
act for any tenant, so it needs a password and a network that clients cannot reach. It contains API keys only
as hashes.

While Redis does not answer, the requests that need it fail with ``Overloaded``, so clients retry them; other
requests continue. The log has one line when Redis stops answering, and one when it answers again.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, urlsplit

import anyio
import msgspec

from agentflow.errors import BadArgument, Overloaded, ServerError
from agentflow.protocol.unreadable import UNREADABLE

logger = logging.getLogger(__name__)

T = TypeVar("T")
Client: TypeAlias = Any
"""``redis.asyncio.Redis``, whose types are too wide to be useful."""

FRONT_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
MAX_FRONT_CHARS = 63
MAX_CONNECTIONS = 64
CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 5.0
_SCHEMES = ("redis", "rediss", "unix")
_DOWN = "the server's shared store does not answer: try again in a moment"


class SharedStore:
    """The Redis server that several fronts share, and the name of this front.

    Args:
        url: ``redis://HOST:PORT/DB``, ``rediss://…`` for TLS, or ``unix://PATH``.
        prefix: The prefix of all keys, so that other applications can use the same database.
        front: The name of this front, which ids contain; None: a random one.

    Raises:
        BadArgument: The URL or the name is invalid, or the package ``redis`` is not installed.
    """

    def __init__(self, url: str, *, prefix: str = "agentflow:", front: str | None = None) -> None:
        if front is not None and not (FRONT_NAME.fullmatch(front) and len(front) <= MAX_FRONT_CHARS):
            raise BadArgument(
                f"front_name must be lower-case letters, digits and single hyphens, at most "
                f"{MAX_FRONT_CHARS} characters, not {front[:60]!r}",
                param="front_name",
            )
        self.prefix = prefix
        start = secrets.token_hex(4)  # changes with a restart, which ends everything that the front runs
        self.front = start if front is None else f"{front}-{start}"
        """The id of this process."""
        self.address = _shown_address(url)
        self.is_down = False
        """Whether the last call failed."""
        self._client = _client(url)
        self._scripts: dict[str, Any] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The scope in which the store is used. ``ServerError`` if Redis cannot be used."""
        from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError

        try:
            await self._client.ping()
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            await self._client.aclose()
            raise ServerError(
                f"the shared store {self.address} rejects the password of redis_url", param="redis_url"
            ) from error
        except (RedisError, OSError) as error:
            await self._client.aclose()
            raise ServerError(
                f"the shared store {self.address} does not answer: start Redis, or correct redis_url",
                param="redis_url",
            ) from error
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._client.aclose()

    def key(self, kind: str, *parts: str) -> str:
        """Forms a key. All parts but the last are percent-encoded, so different lists have different keys."""
        return self.prefix + ":".join([kind, *[quote(part, safe="") for part in parts[:-1]], *parts[-1:]])

    async def call(self, operation: Callable[[Client], Awaitable[T]]) -> T:
        """Runs an operation. ``Overloaded`` if Redis does not answer or rejects it."""
        from redis.exceptions import RedisError, ResponseError

        try:
            result = await operation(self._client)
        except ResponseError as error:  # such as a key that another application uses
            logger.warning("the shared store %s rejected an operation: %s", self.address, error)
            raise _overloaded("the server's shared store rejected an operation: try again later") from error
        except (RedisError, OSError) as error:
            if not self.is_down:
                logger.error("the shared store %s does not answer: %s", self.address, error)
            self.is_down = True
            raise _overloaded(_DOWN) from error
        if self.is_down:
            logger.info("the shared store %s answers again", self.address)
        self.is_down = False
        return result

    async def run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        """Runs a Lua script, which is atomic. ``Overloaded`` as for ``call``."""
        found = self._scripts.get(script)
        if found is None:
            found = self._scripts[script] = self._client.register_script(script)
        return await self.call(lambda client: found(keys=keys, args=arguments, client=client))

    def check_answers(self) -> None:
        """``Overloaded`` if Redis did not answer the last call."""
        if self.is_down:
            raise _overloaded(_DOWN)

    def decoded(self, key: str, data: bytes, kind: type[T]) -> T | None:
        """Decodes a value from msgpack. If it does not have this type, returns None and logs a warning."""
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except UNREADABLE as error:
            self.ignore(key, error)
            return None

    def ignore(self, key: str, error: object) -> None:
        """Logs that the value of a key cannot be read."""
        logger.warning("the value of %.200r in the shared store is ignored: %s", key, error)


def _overloaded(message: str) -> Overloaded:
    error = Overloaded(message)
    error.retry_after_s = 1.0
    return error


def _client(url: str) -> Client:
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise BadArgument(
            "redis_url needs the package redis: pip install 'agentflow-lm[redis]'", param="redis_url"
        ) from None
    try:
        pool: Any = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=ANSWER_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
            # A script that ran although its answer was lost must not run twice. The pool itself replaces
            # connections that were closed while they were idle.
            retry=Retry(NoBackoff(), 0),
        )
        pool.make_connection()  # not connected: checks the parameters of the URL
    except (ValueError, TypeError):  # the error's text may have the password
        raise _invalid_url() from None
    return Redis.from_pool(pool)


def _shown_address(url: str) -> str:
    """The address without user, password and parameters."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            raise _invalid_url()
        if parts.scheme == "unix":
            return f"unix://{parts.path}"
        host = parts.hostname or "localhost"
        return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port or 6379}"
    except ValueError:
        raise _invalid_url() from None


def _invalid_url() -> BadArgument:
    return BadArgument(
        "redis_url must look like redis://HOST:6379/0, rediss://:PASSWORD@HOST:6379/0 or unix:///PATH",
        param="redis_url",
    )
