"""A server at an ``http(s)://`` address, which is asked for its kind.

An address that ends in ``/v1`` is an API of OpenAI's kind. Any other may be an agentflow server, whose
sessions are preferred: they keep states, cache and schedule whole programs.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentflow.backends.apis.chat.flavours import listed_fields
from agentflow.backends.apis.compatible import OpenAICompatible
from agentflow.backends.apis.prices import Costs
from agentflow.backends.remote import Remote
from agentflow.errors import AgentflowError, NotAuthorized, ServerUnreachable
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost

OWNER = "agentflow"
"""The owner of the models of agentflow's servers in ``/v1/models``."""


class AskedServer:
    """The backend of ``af.session("http://…")``.

    Args:
        url: The address of a server, or of its API (``http://host:8000/v1``).
        api_key: The API key.
        model: The name of a model of the server; None for the first, or the only one of an API.
        embed_model: The name of the server's model for embeddings.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        embed_model: str | None = None,
    ) -> None:
        self._remote = Remote(url, api_key=api_key, model=model, embed_model=embed_model)
        self._is_certain = url.rstrip("/").endswith("/v1")
        address = url.rstrip("/") if self._is_certain else f"{url.rstrip('/')}/v1"
        self._api = OpenAICompatible(address, model, embed_model=embed_model, api_key=api_key)

    def __repr__(self) -> str:
        return repr(self._api if self._is_certain else self._remote)

    @property
    def source(self) -> str:
        """The address and the model. For the keys of caches."""
        return self._api.source

    def with_costs(self, costs: Costs) -> AskedServer:
        """Like ``OpenAI.with_costs``."""
        server = copy.copy(self)
        server._api = self._api.with_costs(costs)
        return server

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Asks the server, and opens a session. For the session."""
        backend: Backend = self._remote
        if self._is_certain or await _is_other(self._api):
            backend = self._api
        async with backend.connect(deliver, lost) as connection:
            yield connection


async def _is_other(api: OpenAICompatible) -> bool:
    """Whether the server lists models of other programs than agentflow."""
    try:
        found: Any = await api.listed_models()
    except (ServerUnreachable, NotAuthorized):
        raise
    except AgentflowError:  # without the package for APIs, or no API at all: the session explains it
        return False
    return bool(listed_fields(found, "id")) and OWNER not in listed_fields(found, "owned_by")
