"""Servers that have a reason to refuse something: for the test of docs/reference/errors.md."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.api_server import ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine

from agentflow.backends.apis.openai import OpenAI
from agentflow.backends.apis.prices import Costs, Price, Spending
from agentflow.engine.batch import Batch
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.tenant import ANONYMOUS, Tenant
from agentflow.errors import EngineFailed, NotAuthorized, Overloaded, RateLimited
from agentflow.server.config.limits import HttpLimits
from agentflow.server.tenants import keys as failed_keys
from agentflow.server.tenants.keys import Tenants, hashed_key
from agentflow.server.tenants.rate_limit import TenantGate

KEY = "af-ann"
BEARER = {"Authorization": f"Bearer {KEY}"}


def tenants(*settings: str) -> Tenants:
    """One tenant, ``ann``, with these settings."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.toml"
        file.write_text("\n".join(["[tenants.ann]", f'keys = ["{hashed_key(KEY)}"]', *settings]))
        return Tenants(file=file)


class OneTenant(Tenants):
    """Every client is this tenant."""

    def __init__(self, tenant: Tenant) -> None:
        super().__init__()
        self._tenant = tenant

    def of_request(self, *_: Any) -> Tenant:
        return self._tenant

    def still_names(self, *_: Any) -> bool:
        return True


FAULTS = {
    "other": "invalid_api_key",
    "limited": "rate_limit_exceeded",
    "full": "overloaded",
    "broken": "engine_failed",
}
"""Keys of ``FaultyKeys``, and the code of the error that each causes."""


class FaultyKeys(Tenants):
    """The key ``right`` is valid."""

    def of(self, key: str | None) -> Any:
        limited = RateLimited("60 requests in a minute, which is the limit")
        limited.retry_after_s = 2.5
        faults = {"limited": limited, "full": Overloaded("too many wait"), "broken": EngineFailed("it broke")}
        if key != "right":
            raise faults.get(str(key), NotAuthorized("no such key"))
        return ANONYMOUS


class BrokenTenants(Tenants):
    def of(self, key: str | None) -> Any:
        raise ZeroDivisionError


@contextmanager
def of_any_address() -> Iterator[None]:
    """A second wrong key from one address is too many, also from a loopback address."""
    with (
        patch.object(failed_keys, "client_network", lambda host: host),
        patch.object(failed_keys, "FAILURES_PER_MINUTE", 1),
    ):
        yield


@contextmanager
def limited(*settings: str) -> Iterator[ApiServer]:
    """A server whose only tenant is limited."""
    with api_server(tenants=tenants(*settings), gate=TenantGate(), constraints=False) as server:
        yield server


@contextmanager
def spent() -> Iterator[ApiServer]:
    """A server whose only tenant has used up its costs of this day. Its model ``vendor`` is behind an API."""
    prices = {"m": Price(input=1.0, output=10.0)}
    vendor = OpenAI("m", base_url="http://127.0.0.1:1", api_key="k").with_costs(Costs(Spending(), prices))
    gate, setting = TenantGate(), "max_cost_per_day = 1.0"
    with api_server(tenants=tenants(setting), gate=gate, constraints=False, vendor=vendor) as server:
        server.call(gate.reserve_cost, Tenant("ann", max_cost_per_day=1.0), 1.0)
        yield server


def small_bodies() -> AbstractContextManager[ApiServer]:
    return api_server(limits=HttpLimits(body_bytes=300, body_timeout_s=0.05), constraints=False)


@contextmanager
def changed(server: ApiServer, of: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of something in the server is another one meanwhile."""
    before = getattr(of, name)
    server.call(setattr, of, name, value)
    try:
        yield
    finally:
        server.call(setattr, of, name, before)


def failing_engine(error: BaseException, after_steps: int = 0) -> FakeEngine:
    """An engine whose forward pass fails after ``after_steps`` steps."""
    steps: list[Batch] = []

    def step(batch: Batch) -> None:
        steps.append(batch)
        if len(steps) > after_steps:
            raise error

    return FakeEngine(runner=FakeRunner(vocab_size=TOKENIZER.vocab_size, on_step=step))
