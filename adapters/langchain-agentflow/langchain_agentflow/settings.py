"""What both kinds of model are told: where the model is, and how its tokens are chosen."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from langchain_core.utils import secret_from_env
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, model_validator

import agentflow as af
from agentflow.integrations.client import ModelConnection, connection_through, connection_to
from langchain_agentflow.calls import Retries
from langchain_agentflow.errors import langchain_errors

DEFAULT_MAX_TOKENS: Final = 1024
# Of a synchronous batch: they only wait.
MOST_THREADS: Final = 256

# Fields, and arguments of a call, that are those of ``af.gen``; by their name there.
_SAMPLING: Final = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "timeout": "timeout_s",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
}
# What says how the text looks; at most one of them.
CONSTRAINTS: Final = ("regex", "schema", "choices", "grammar")
_ELSEWHERE: Final = ("n", "model", "model_name", "cache_salt", "max_retries", "stream")


class ModelSettings(BaseModel):
    """Fields of ``ChatAgentflow`` and ``Agentflow``."""

    model_config = ConfigDict(populate_by_name=True)

    model_name: str | None = Field(default=None, alias="model")
    """Of the server's models, or of those that ``agentflow pull`` knows, or a Hugging Face folder. Where
    nothing is said, the server's first one, or ``smollm2-135m``."""

    base_url: str | None = Field(default_factory=lambda: os.environ.get("AGENTFLOW_URL") or None)
    """``ws://…`` or ``wss://…``; without one the model runs in this process."""

    api_key: SecretStr | None = Field(default_factory=secret_from_env("AGENTFLOW_API_KEY", default=None))
    """The server's."""

    backend: Any = Field(default=None, exclude=True, repr=False)
    """Instead of ``base_url`` and ``model``: any backend of agentflow's. ``af.Scripted`` for tests."""

    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int | None = None
    temperature: float | None = None
    """0, the likeliest token, where nothing is said."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stop: list[str] | str | None = Field(default=None, alias="stop_sequences")
    timeout: float | None = Field(default=None, alias="request_timeout")
    """Seconds for one answer, from when the model gets to it."""
    max_retries: int = 2
    """Of calls that failed for a reason that may pass, before anything was said."""
    n: int = 1
    """Answers to each prompt: a fork of it."""
    streaming: bool = False
    """Whether LangChain streams each call, and tells its callbacks of tokens, where nobody reads a stream."""
    cache_salt: str = ""
    """Prompts share cached KV only under an equal one."""

    _own_connection: ModelConnection | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_numbers(self) -> ModelSettings:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")
        if self.backend is not None:
            self._own_connection = connection_through(self.backend)
        return self

    def connection(self, model: str | None = None) -> ModelConnection:
        """To the model; opened with the first call."""
        if self._own_connection is not None:
            return self._own_connection
        key = None if self.api_key is None else self.api_key.get_secret_value()
        return connection_to(self.base_url, model or self.model_name, key)

    def _retries(self, asked: Mapping[str, Any], *, is_streamed: bool = False) -> Retries:
        return Retries(asked.get("max_retries", self.max_retries), is_streamed=is_streamed)

    def options(self, stop: Sequence[str] | str | None, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of ``af.gen`` and ``af.reply``: the fields, and over them what a call asks for.
        ``BadArgument`` for what there is not."""
        unknown = asked.keys() - _SAMPLING.keys() - set(CONSTRAINTS) - set(_ELSEWHERE)
        if unknown:
            raise af.BadArgument(f"there is no parameter {', '.join(sorted(unknown))}")
        told: dict[str, Any] = {}
        for field, name in _SAMPLING.items():
            value = asked.get(field, getattr(self, field, None))
            if value is not None:
                told[name] = value
        told |= {name: asked[name] for name in CONSTRAINTS if asked.get(name) is not None}
        stops = _listed(self.stop if stop is None else stop)
        return {**told, "stop": stops} if stops else told

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own, of a text by itself."""
        custom: Callable[[str], list[int]] | None = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return custom(text)

        async def ids(flow: af.Session) -> list[int]:
            async with flow.state() as s:
                s += text
                return await s.token_ids()

        with langchain_errors():
            return self.connection().shared.run(ids)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        told = {field: getattr(self, field, None) for field in _SAMPLING}
        told |= {"stop": self.stop, "n": self.n, "cache_salt": self.cache_salt or None}
        sampling = {field: value for field, value in told.items() if value is not None}
        return {"model_name": self.model_name, "base_url": self.base_url, **sampling}

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"api_key": "AGENTFLOW_API_KEY"}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True


def _listed(stop: Sequence[str] | str | None) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or ())
