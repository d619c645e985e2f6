"""The backend for models of OpenAI."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from agentflow.backends.apis.answers.verification import OnUnsupported
from agentflow.backends.apis.capability_table import is_known, model_facts
from agentflow.backends.apis.chat.flavours import OPENAI
from agentflow.backends.apis.serving import (
    ApiBackend,
    ApiSettings,
    connected,
    flavoured_capabilities,
    for_display,
    generating,
    make_embedder,
    open_transport,
)
from agentflow.errors import BadArgument, NotAuthorized
from agentflow.protocol.backend import Connection, Deliver, Lost

BASE_URL = "https://api.openai.com/v1"

_PARAMS = {
    "max_output_tokens": "max_tokens",
    "text.format.schema": "schema",
    "reasoning.effort": "max_reasoning_tokens",
    "reasoning.summary": "stream_reasoning",
}
"""The parameters of gens by the fields in which the responses API receives them."""


class OpenAI(ApiBackend):
    """A model of OpenAI, over its API.

    The defaults of the address, the key, the organization and the project are the environment variables that
    OpenAI's own client reads: ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``OPENAI_ORG_ID`` and
    ``OPENAI_PROJECT_ID``.

    Args:
        model: The model's name.
        base_url: The address of the API.
        api_key: The API key. It is sent in the Authorization header, and shown nowhere.
        organization: The organization that the usage counts for.
        project: The project that the usage counts for.
        api: ``chat``: chat completions. ``responses``: the responses API. None: ``chat``, unless only the
            responses API serves the model.
        like: A model of OpenAI with the same features, for a model with another name. Default: a model that
            is not known has the features of the newest family; at another address than OpenAI's, it accepts
            all parameters that the server accepts.
        embed_model: The model for ``flow.embed``, such as ``text-embedding-3-small``; ``model`` may be
            such a model too.
        on_unsupported: ``error``: a constraint that the API cannot enforce is refused. ``retry``: answers are
            checked, and asked for again with the fault, at most three times.
        speculate: Whether one call serves several gens of a turn; None: if the API cannot continue a turn.
            ``s.hint(speculate=False)`` decides for one state.
        max_retries: The most further attempts of a request that failed before anything of its answer was
            visible.
        timeout_s: The time limit until an answer begins, in seconds.
        stall_timeout_s: The time limit between two events of an answer, in seconds.
        hedge_after_s: The seconds until a request whose answer has not begun is sent a second time; the
            answer that begins first is kept. None: never.
        ssl_context: Replaces the default context.
        proxy: The address of a proxy; default: the environment variables that httpx2 reads.

    Raises:
        BadArgument: An argument is invalid.
        NotAuthorized: There is no API key.

    >>> af.OpenAI("gpt-4.1-mini", api_key="sk-...")
    OpenAI('gpt-4.1-mini')
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        organization: str | None = None,
        project: str | None = None,
        api: Literal["chat", "responses"] | None = None,
        like: str | None = None,
        embed_model: str | None = None,
        on_unsupported: OnUnsupported = "error",
        speculate: bool | None = None,
        max_retries: int = 2,
        timeout_s: float = 600.0,
        stall_timeout_s: float = 60.0,
        hedge_after_s: float | None = None,
        ssl_context: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        if api not in ("chat", "responses", None):
            raise BadArgument(f"OpenAI: api must be 'chat' or 'responses', not {api!r:.100}", param="api")
        key_source = "OPENAI_API_KEY" if api_key is None else "api_key="
        key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
        if not key:
            raise NotAuthorized(
                f"{model} needs an API key: set OPENAI_API_KEY, or give api_key=", param="api_key"
            )
        url = base_url or os.environ.get("OPENAI_BASE_URL") or BASE_URL
        is_vendors_own = str(url).rstrip("/") == BASE_URL
        headers = {
            "OpenAI-Organization": organization or os.environ.get("OPENAI_ORG_ID"),
            "OpenAI-Project": project or os.environ.get("OPENAI_PROJECT_ID"),
        }
        self._settings = ApiSettings(
            url,
            key,
            model=model,
            server="OpenAI" if is_vendors_own else for_display(url),
            is_vendors_own=is_vendors_own,
            key_source=key_source,
            headers={name: value for name, value in headers.items() if value},
            on_unsupported=on_unsupported,
            speculate=speculate,
            max_retries=max_retries,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
            hedge_after_s=hedge_after_s,
            ssl_context=ssl_context,
            proxy=proxy,
            embed_model=embed_model,
            batch_vendor="openai",
        ).check("OpenAI")
        if like is not None and not (isinstance(like, str) and is_known("openai", like)):
            raise BadArgument(f"OpenAI: like={like!r:.100} is no model of OpenAI", param="like")
        self.model = model
        self._facts = model_facts("openai", like or model, is_vendors_own=is_vendors_own)
        self._api = api or ("chat" if self._facts.chat else "responses")

    def __repr__(self) -> str:
        return f"OpenAI({self.model!r})"

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Opens the pool of connections. Nothing is sent before the first call. For the session."""
        if self._api == "chat":
            async with connected(self._settings, OPENAI, deliver, self._facts) as connection:
                yield connection
            return
        settings = self._settings
        errors = settings.errors(self.model, _PARAMS)
        async with open_transport(settings, errors) as transport:
            from agentflow.backends.apis.responses.openai_responses import RESPONSES, OpenAIResponses

            responses = OpenAIResponses(self.model, self._facts, errors)
            features = flavoured_capabilities(self.model, RESPONSES, self._facts, settings.on_unsupported)
            billing = settings.billing("openai", self.model, self._facts.output)
            embedder = None
            if settings.embed_model is not None:
                embedder = make_embedder(settings, transport, OPENAI, settings.embed_model)
            async with generating(
                settings,
                transport,
                responses,
                features,
                billing,
                deliver,
                embedder,
                decisions_api=self._facts.decisions,
            ) as connection:
                yield connection
