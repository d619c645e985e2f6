"""The fields that ``ChatAgentflow`` and ``Agentflow`` share: where the model runs, and how it samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from langchain_core.caches import BaseCache
from langchain_core.utils import secret_from_env
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, field_validator, model_validator

import agentflow as af
from agentflow.integrations import ModelConnection, cache_key, connection_through, connection_to
from langchain_agentflow.errors import langchain_errors

DEFAULT_MAX_TOKENS: Final = 1024
# For a synchronous batch; these threads only wait.
MAX_THREADS: Final = 256

# Fields and arguments of a call, with their names in ``af.gen``.
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
# Names in ``ChatOpenAI``, as fields and as arguments of a call.
_OPENAI_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "openai_api_key": "api_key",
    "openai_api_base": "base_url",
}
# Dictionaries of further parameters in ``ChatOpenAI``.
_COLLECTIONS: Final = ("model_kwargs", "extra_body")
# Fields of ``ChatOpenAI`` without effect on agentflow's answers.
_WITHOUT_EFFECT: Final = frozenset(
    {"openai_organization", "organization", "service_tier", "stream_usage", "tiktoken_model_name", "user"}
)
# Constraints on the text; at most one per call.
CONSTRAINTS: Final = ("regex", "schema", "grammar")
_ELSEWHERE: Final = ("n", "model", "model_name", "cache_salt", "max_retries", "stream")


class ModelSettings(BaseModel):
    """Fields of ``ChatAgentflow`` and ``Agentflow``."""

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True)

    model_name: str | None = Field(default=None, alias="model")
    """One of the server's models, a model that ``agentflow pull`` knows, or a Hugging Face folder. Default:
    the server's first model, or ``smollm2-135m`` in this process."""

    base_url: str | None = Field(default_factory=lambda: os.environ.get("AGENTFLOW_URL") or None)
    """``ws://…`` or ``wss://…``. Without it, the model runs in this process."""

    api_key: SecretStr | None = Field(default_factory=secret_from_env("AGENTFLOW_API_KEY", default=None))
    """The server's API key."""

    backend: Any = Field(default=None, exclude=True, repr=False)
    """An agentflow backend, instead of ``base_url`` and ``model``; for tests, ``af.Scripted``. With a script,
    LangChain's global cache is off, unless ``cache=True``: its keys then distinguish the scripts of a
    process, so nothing in it is found after this process."""

    cache: BaseCache | bool | None = Field(default=None, exclude=True)
    """As in LangChain's models: None uses the global cache if there is one."""

    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int | None = None
    temperature: float | None = None
    """Default: 0, which is greedy decoding."""
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
    """The time limit for one answer, in seconds, from when it is scheduled."""
    max_retries: int = 2
    """Retries of a call after a transient failure. A stream is not retried once it has begun."""
    n: int = 1
    """The number of answers to each prompt, which is computed once."""
    streaming: bool = False
    """Whether LangChain streams ``invoke`` internally, so that its callbacks receive each token."""
    cache_salt: str = ""
    """Only prompts with the same salt share cached KV."""

    _own_connection: ModelConnection | None = PrivateAttr(default=None)
    _backend_key: str | None = PrivateAttr(default=None)
    """The backend's part of the keys of LangChain's caches."""

    @model_validator(mode="before")
    @classmethod
    def _read_openai_names(cls, values: Any) -> Any:
        return _translated(values) if isinstance(values, dict) else values

    @field_validator("base_url")
    @classmethod
    def _read_http_address(cls, address: str | None) -> str | None:
        """Also accepts the address of the server's HTTP API."""
        if address is None or not address.startswith(("http://", "https://")):
            return address
        return "ws" + address.removeprefix("http").rstrip("/").removesuffix("/v1")

    @model_validator(mode="after")
    def _check_numbers(self) -> ModelSettings:
        if self.n < 1:
            raise ValueError(f"n must be at least 1, not {self.n}")
        if self.backend is not None:
            self._own_connection = connection_through(self.backend)
            self._backend_key = cache_key(self.backend)
            if self.cache is None and not hasattr(self.backend, "source"):
                self.cache = False
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return super().__deepcopy__({**(memo or {}), id(self.backend): self.backend})

    def connection(self, model: str | None = None) -> ModelConnection:
        """Returns the connection to the model, which opens with the first call."""
        if self._own_connection is not None:
            return self._own_connection
        key = None if self.api_key is None else self.api_key.get_secret_value()
        return connection_to(self.base_url, model or self.model_name, key)

    def _max_retries(self, asked: Mapping[str, Any]) -> int:
        return int(asked.get("max_retries", self.max_retries))

    def options(self, stop: Sequence[str] | str | None, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of ``af.gen`` and ``af.reply``: the fields, overridden by the arguments of
        the call. Raises ``BadArgument`` for an unknown parameter."""
        unknown = asked.keys() - _SAMPLING.keys() - set(CONSTRAINTS) - set(_ELSEWHERE)
        if unknown:
            raise af.errors.BadArgument(f"there is no parameter {', '.join(sorted(unknown))}")
        options: dict[str, Any] = {}
        for field, name in _SAMPLING.items():
            value = asked.get(field, getattr(self, field, None))
            if value is not None:
                options[name] = value
        options |= {name: asked[name] for name in CONSTRAINTS if asked.get(name) is not None}
        stops = _listed(self.stop if stop is None else stop)
        return {**options, "stop": stops} if stops else options

    def get_token_ids(self, text: str) -> list[int]:
        """Returns the token ids of a text, without special tokens, from the model's own tokenizer."""
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
        values = {field: getattr(self, field, None) for field in _SAMPLING}
        values |= {"stop": self.stop, "n": self.n, "cache_salt": self.cache_salt or None}
        values["backend"] = self._backend_key
        sampling = {field: value for field, value in values.items() if value is not None}
        return {"model_name": self.model_name, "base_url": self.base_url, **sampling}

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"api_key": "AGENTFLOW_API_KEY"}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields, or arguments of a call, with the names of ``ChatOpenAI`` replaced by this package's.
    Raises ``BadArgument`` if two names of one field are given."""
    try:
        return _translated(given)
    except ValueError as error:
        raise af.errors.BadArgument(str(error)) from error


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        inner = (value or {}).items() if name in _COLLECTIONS else [(name, value)]
        for one, its_value in inner:
            if one in _WITHOUT_EFFECT:
                continue
            known = _OPENAI_NAMES.get(one, one)
            if known in found and found[known] != its_value:
                raise ValueError(f"{known} is given twice with different values, also as {name}")
            found[known] = its_value
    return found


def _listed(stop: Sequence[str] | str | None) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or ())
