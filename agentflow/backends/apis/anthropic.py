"""The backend for models of Anthropic."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from agentflow.backends.apis.answers.verification import CHECKED_KINDS, OnUnsupported
from agentflow.backends.apis.capability_table import capabilities, is_known, model_facts
from agentflow.backends.apis.messages.anthropic_stream import AnthropicErrors
from agentflow.backends.apis.serving import ApiBackend, ApiSettings, for_display, generating, open_transport
from agentflow.errors import BadArgument, NotAuthorized
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.protocol.constraint import ConstraintKind
from agentflow.protocol.events import Capabilities

BASE_URL = "https://api.anthropic.com"
API_VERSION = "2026-10-21"
"""The version of the API that Anthropic's own client sends since its version 2."""
SAMPLING_API_VERSION = "2023-06-01"
"""The version before it, the last one in which requests may have a temperature, top_p and top_k."""

_PARAMS = {"stop_sequences": "stop", "thinking": "max_reasoning_tokens", "output_config": "schema"}
"""The parameters of gens by the fields in which the API receives them."""


class Anthropic(ApiBackend):
    """A model of Anthropic, over its API.

    The defaults of the address and the key are the environment variables that Anthropic's own client reads:
    ``ANTHROPIC_BASE_URL``, and ``ANTHROPIC_API_KEY`` or ``ANTHROPIC_AUTH_TOKEN``.

    Args:
        model: The model's name.
        base_url: The address of the API.
        api_key: The API key. It is sent in the Authorization header, and shown nowhere.
        like: A model of Anthropic with the same features, for a model of others on a server that implements
            this API. Default: a model that is not known has the features of the newest family; at another
            address than Anthropic's, it accepts all parameters that the server accepts.
        reasoning: Whether the model reasons; None: the model's default.
        effort: How much it reasons and writes: ``low`` to ``max``, as far as the model has it.
        on_unsupported: ``error``: a constraint that the API cannot enforce is refused. ``retry``: answers are
            checked, and asked for again with the fault, at most three times.
        speculate: As for ``af.OpenAI``.
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

    >>> af.Anthropic("claude-opus-5-5", api_key="sk-ant-...")
    Anthropic('claude-opus-5-5')
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        like: str | None = None,
        reasoning: bool | None = None,
        effort: str | None = None,
        on_unsupported: OnUnsupported = "error",
        speculate: bool | None = None,
        max_retries: int = 2,
        timeout_s: float = 600.0,
        stall_timeout_s: float = 60.0,
        hedge_after_s: float | None = None,
        ssl_context: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        variables = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
        found = {"api_key=": api_key} | {name: os.environ.get(name) for name in variables}
        key_source, key = next(((name, key) for name, key in found.items() if key), ("", None))
        if key is None:
            raise NotAuthorized(
                f"{model} needs an API key: set ANTHROPIC_API_KEY, or give api_key=", param="api_key"
            )
        url = base_url or os.environ.get("ANTHROPIC_BASE_URL") or BASE_URL
        is_vendors_own = str(url).rstrip("/") == BASE_URL
        name = like if isinstance(like, str) else str(model)
        facts = model_facts("anthropic", name, is_vendors_own=is_vendors_own)
        self._settings = ApiSettings(
            url,
            key,
            model=model,
            server="Anthropic" if is_vendors_own else for_display(url),
            is_vendors_own=is_vendors_own,
            key_source=key_source,
            headers={
                "anthropic-version": SAMPLING_API_VERSION if "temperature" in facts.sampling else API_VERSION
            },
            on_unsupported=on_unsupported,
            speculate=speculate,
            max_retries=max_retries,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
            hedge_after_s=hedge_after_s,
            ssl_context=ssl_context,
            proxy=proxy,
            error_kind=AnthropicErrors,
            batch_vendor="anthropic",
        ).check("Anthropic")
        if like is not None and not is_known("anthropic", like):
            raise BadArgument(f"Anthropic: like={like!r:.100} is no model of Anthropic", param="like")
        self.model = model
        self._facts = facts
        if reasoning not in (None, True, False):
            raise BadArgument("Anthropic: reasoning must be True, False or None", param="reasoning")
        if effort is not None and effort not in self._facts.efforts:
            known = ", ".join(self._facts.efforts) or "none"
            raise BadArgument(
                f"Anthropic: {model} has no effort {effort!r:.100} (it has: {known})", param="effort"
            )
        self._reasoning, self._effort = reasoning, effort

    def __repr__(self) -> str:
        return f"Anthropic({self.model!r})"

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Opens the pool of connections. Nothing is sent before the first call. For the session."""
        settings = self._settings
        errors = settings.errors(self.model, _PARAMS)
        async with open_transport(settings, errors) as transport:
            from agentflow.backends.apis.messages.anthropic_messages import AnthropicMessages

            messages = AnthropicMessages(
                self.model, self._facts, errors, reasoning=self._reasoning, effort=self._effort
            )
            features = self._capabilities()
            billing = settings.billing("anthropic", self.model, self._facts.output)
            async with generating(settings, transport, messages, features, billing, deliver) as connection:
                yield connection

    def _capabilities(self) -> Capabilities:
        enforced: tuple[ConstraintKind, ...] = self._facts.constraints
        if "schema" in enforced:
            enforced = (*enforced, "choices")  # an enum in a schema
        if self._settings.on_unsupported == "retry":
            enforced = tuple(dict.fromkeys((*enforced, *CHECKED_KINDS)))
        found = capabilities(self._facts, self.model, self._reasoning)
        return msgspec.structs.replace(
            found,
            sampling=(*(found.sampling or ()), "stop_regex"),
            constraints=enforced,
            select="choices" in enforced,
        )
