"""The options of an engine: their defaults, and values that are not allowed."""

from __future__ import annotations

import inspect

import pytest
from msgspec.structs import asdict
from support.faults import has_param

from agentflow.backends.local import Embedded
from agentflow.engine.options import EngineOptions
from agentflow.errors import BadArgument


def test_the_embedded_engine_has_the_same_options_and_defaults() -> None:
    defaults = {**asdict(EngineOptions()), "embed_model": None}  # which has a separate engine
    for name, parameter in inspect.signature(Embedded).parameters.items():
        assert parameter.default == defaults[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int8"),
        ("device", "tpu"),
        ("device", "cuda:"),
        ("policy", "best"),
        ("kv_tokens", 0),
        ("step_timeout_s", 0.0),
    ],
)
def test_an_option_with_a_value_that_is_not_allowed_is_rejected(name: str, value: object) -> None:
    with pytest.raises(BadArgument, check=has_param(name)):
        EngineOptions(**{name: value})  # type: ignore[arg-type]
