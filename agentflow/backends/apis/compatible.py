"""The backend for servers with OpenAI's API: vLLM, SGLang, llama.cpp, Ollama and others."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentflow.backends.apis.answers.verification import OnUnsupported
from agentflow.backends.apis.chat.flavours import FLAVOURS, FlavourName
from agentflow.backends.apis.serving import ApiBackend, ApiSettings, connected, for_display, open_transport
from agentflow.errors import BadArgument
from agentflow.protocol.backend import Connection, Deliver, Lost


class OpenAICompatible(ApiBackend):
    """A model on a server with OpenAI's API.

    Args:
        url: The address of the API, which usually ends in ``/v1``.
        model: The model's name; None for the only one of the server.
        flavour: The kind of server, which decides on the features beyond OpenAI's API: ``vllm``, ``sglang``,
            ``llamacpp``, ``ollama``, or ``generic`` for the features that all have. None: it is found by the
            server's list of models. With a model and a flavour, the server is asked nothing, also not for the
            length of the model's context.
        embed_model: The model for ``flow.embed``. It may be the only model of the server.
        images: Whether the model accepts images, if the list of models does not have that.
        videos: Whether it accepts videos, in the form of vLLM and SGLang. The server chooses their frames.
        api_key: The API key, if the server needs one. It is shown nowhere.
        on_unsupported: As for ``af.OpenAI``.
        speculate: As for ``af.OpenAI``.
        max_retries: As for ``af.OpenAI``.
        timeout_s: As for ``af.OpenAI``.
        stall_timeout_s: As for ``af.OpenAI``.
        hedge_after_s: As for ``af.OpenAI``.
        ssl_context: As for ``af.OpenAI``.
        proxy: As for ``af.OpenAI``.

    Raises:
        BadArgument: An argument is invalid.

    >>> af.OpenAICompatible("http://127.0.0.1:8000/v1", "Qwen/Qwen3-8B", flavour="vllm")
    OpenAICompatible('http://127.0.0.1:8000/v1', 'Qwen/Qwen3-8B', flavour='vllm')
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        flavour: FlavourName | None = None,
        embed_model: str | None = None,
        images: bool = False,
        videos: bool = False,
        api_key: str | None = None,
        on_unsupported: OnUnsupported = "error",
        speculate: bool | None = None,
        max_retries: int = 2,
        timeout_s: float = 600.0,
        stall_timeout_s: float = 60.0,
        hedge_after_s: float | None = None,
        ssl_context: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        if flavour is not None and flavour not in FLAVOURS:
            known = ", ".join(map(repr, FLAVOURS))
            raise BadArgument(
                f"OpenAICompatible: flavour must be one of {known}, not {flavour!r}", param="flavour"
            )
        self._settings = ApiSettings(
            url,
            api_key,
            model=model,
            server=for_display(url),
            on_unsupported=on_unsupported,
            speculate=speculate,
            max_retries=max_retries,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
            hedge_after_s=hedge_after_s,
            ssl_context=ssl_context,
            proxy=proxy,
            embed_model=embed_model,
        ).check("OpenAICompatible")
        self.url = self._settings.server
        self.model = model
        self.flavour = flavour
        self._accepts = [kind for kind, is_accepted in (("image", images), ("video", videos)) if is_accepted]

    def __repr__(self) -> str:
        shown = f"{self.url!r}" if self.model is None else f"{self.url!r}, {self.model!r}"
        return f"OpenAICompatible({shown}{'' if self.flavour is None else f', flavour={self.flavour!r}'})"

    async def listed_models(self) -> Any:
        """The answer of the server to ``GET /models``. For the backend that asks a server."""
        async with open_transport(self._settings, self._settings.errors("the model")) as transport:
            return await transport.get("models")

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Opens the pool of connections, and asks for the model if none was given. ``BadArgument`` if the
        server has several. For the session."""
        flavour = None if self.flavour is None else FLAVOURS[self.flavour]
        async with connected(self._settings, flavour, deliver, accepts=self._accepts) as connection:
            yield connection
