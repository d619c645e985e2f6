"""Fixtures for all tests of a module: ``server = module_server(constraints=False)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from support.api_server import ApiServer, api_server
from support.fake_engine import FakeEngine


def module_fixture(
    manager: Callable[..., AbstractContextManager[Any]], *arguments: Any, **options: Any
) -> Any:
    """A fixture with the value of a context manager, which is entered with these arguments."""

    @pytest.fixture(scope="module")
    def value() -> Iterator[Any]:
        with manager(*arguments, **options) as found:
            yield found

    return value


def module_server(engine: Callable[[], FakeEngine] = FakeEngine, **options: Any) -> Any:
    """A fixture with a server, which is idle after the tests. ``options``: of ``api_server``."""

    @pytest.fixture(scope="module")
    def server() -> Iterator[ApiServer]:
        with api_server(engine(), **options) as running:
            yield running
            running.assert_idle()

    return server
