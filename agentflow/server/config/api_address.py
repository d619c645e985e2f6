"""The addresses of models behind an API, in the place of a model's path.

::

    openai:gpt-4.1-mini                      a model of OpenAI
    anthropic:claude-opus-5-5                a model of Anthropic
    http://host:8000/v1#Qwen/Qwen3-8B        a model of a server with OpenAI's API
    http://host:8000/v1                      its only model
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from agentflow.errors import BadArgument

VENDORS: Final = ("openai", "anthropic")


@dataclass(frozen=True, slots=True)
class ApiAddress:
    """A model behind an API. ``url``: the address of a compatible server. ``model``: None for a server's only
    model."""

    vendor: Literal["openai", "anthropic", "compatible"]
    model: str | None
    url: str | None = None

    @property
    def served_name(self) -> str | None:
        """The name under which the model is served by default: its own, without the part before a slash."""
        return None if self.model is None else self.model.rpartition("/")[2] or self.model

    @classmethod
    def of(cls, path: str, where: str) -> ApiAddress | None:
        """Parses a model's path. None if it is a name, a folder or a file. ``BadArgument`` for an invalid
        address; the message contains ``where``, but never the address, which may have a password.

        >>> ApiAddress.of("http://127.0.0.1:8000/v1#Qwen/Qwen3-8B", "--model")
        ApiAddress(vendor='compatible', model='Qwen/Qwen3-8B', url='http://127.0.0.1:8000/v1')
        """
        vendor, _, model = path.partition(":")
        for name in VENDORS:
            if vendor == name:
                if not model:
                    raise BadArgument(f"{where} has no model: write {name}:MODEL")
                return cls(name, model)
        if "://" not in path:
            return None
        url, _, model = path.partition("#")
        try:
            parts = urlsplit(url)
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise BadArgument(
                f"{where} is not the address of an API: write http://HOST:PORT/v1#MODEL, openai:MODEL or "
                "anthropic:MODEL"
            )
        if parts.username or parts.password:
            raise BadArgument(
                f"{where}: an address must not have a password, because addresses are shown: set "
                "api_key_variable in the model's table to the environment variable with the key"
            )
        return cls("compatible", model or None, url)
