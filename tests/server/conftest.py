"""The Redis server of the tests in which several fronts share data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redis_server import RedisServer, redis_server


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server for tests with different prefixes."""
    folder: Path = tmp_path_factory.mktemp("redis")
    with redis_server(folder) as running:
        yield running
