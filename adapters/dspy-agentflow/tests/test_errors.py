"""Failures are DSPy's own exceptions, with a remedy in the message."""

from __future__ import annotations

import asyncio
import importlib.metadata
import warnings
from typing import Any

import dspy
import dspy_agentflow
import pytest
from dspy_agentflow import AgentflowLM
from scripts import answering, chat, scripted

import agentflow as af

HAS_OWN_ERRORS = hasattr(dspy.utils.exceptions, "LMError")
# agentflow's, DSPy's, and LiteLLM's, which DSPy shows where it has none of its own.
KINDS = [
    (af.PromptTooLong, "ContextWindowExceededError", "ContextWindowExceededError"),
    (af.errors.UnknownModel, "LMUnsupportedModelError", "NotFoundError"),
    (af.errors.NotAuthorized, "LMAuthError", "AuthenticationError"),
    (af.errors.RateLimited, "LMRateLimitError", "RateLimitError"),
    (af.DeadlineExceeded, "LMTimeoutError", "Timeout"),
    (af.errors.ServerUnreachable, "LMTransportError", "APIConnectionError"),
    (af.ServerLost, "LMTransportError", "APIConnectionError"),
    (af.errors.BadArgument, "LMInvalidRequestError", "BadRequestError"),
    (af.BudgetExceeded, "LMInvalidRequestError", "BadRequestError"),
    (af.errors.ScriptMismatch, "LMInvalidRequestError", "BadRequestError"),
    (af.errors.RunFailed, "LMProviderError", "BadRequestError"),
    (af.errors.ReplayDiffers, "LMProviderError", "BadRequestError"),
    (af.errors.EngineFailed, "LMServerError", "InternalServerError"),
    (af.Overloaded, "LMServerError", "InternalServerError"),
]


def kind_of(name: str, older: str) -> type[Exception]:
    if hasattr(dspy.utils.exceptions, name):
        return getattr(dspy.utils.exceptions, name)  # type: ignore[no-any-return]
    import litellm

    return getattr(litellm, older)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("error", "name", "older"), KINDS)
def test_each_kind(error: type[Exception], name: str, older: str) -> None:
    lm, _ = scripted(lambda prompt: error("this is why"))
    with pytest.raises(kind_of(name, older)) as caught:
        lm("?")
    assert "this is why" in str(caught.value) + str(caught.value.__cause__)
    with pytest.raises(kind_of(name, older)):
        asyncio.run(lm.acall("?"))


def test_an_error_is_no_answer_that_cannot_be_parsed() -> None:
    lm, model = scripted(lambda prompt: af.errors.BadArgument("this is why"))
    with (
        dspy.context(lm=lm),
        pytest.raises(kind_of("LMInvalidRequestError", "BadRequestError"), match="this is why"),
    ):
        dspy.Predict("question -> answer")(question="?")
    assert len(model.prompts) <= 3  # older versions try other adapters


def test_what_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = [af.Overloaded("too much"), chat(answer="sugar")]
    lm, model = scripted(lambda prompt: left.pop(0), num_retries=1)
    assert lm("?") == [chat(answer="sugar")]
    assert len(model.prompts) == 2


def test_a_script_that_does_not_match_is_not_tried_again() -> None:
    """The same call would fail again: it is no failure of a server."""
    lm, model = scripted(["sugar"], num_retries=3)
    lm("?")
    for _ in range(2):
        with pytest.raises(kind_of("LMInvalidRequestError", "BadRequestError"), match="has 1"):
            lm("?")
    lm, model = scripted([], num_retries=3)
    with pytest.raises(kind_of("LMInvalidRequestError", "BadRequestError"), match="has 0"):
        asyncio.run(lm.acall("?"))
    assert len(model.prompts) == 1


@pytest.mark.parametrize("url", ["ws://127.0.0.1:1", "http://127.0.0.1:1/v1"])
def test_nobody_answers_there(url: str) -> None:
    lm = AgentflowLM(base_url=url, num_retries=0, cache=False)
    with pytest.raises(kind_of("LMTransportError", "APIConnectionError"), match=url):
        lm("?")


def test_nobody_answers_with_advice() -> None:
    lm = AgentflowLM(base_url="ws://127.0.0.1:1", num_retries=0, cache=False)
    with pytest.raises(kind_of("LMTransportError", "APIConnectionError"), match="agentflow serve"):
        asyncio.run(lm.acall("?"))


@pytest.mark.parametrize("url", ["127.0.0.1:8410", "ws://"])
def test_what_is_no_address(url: str) -> None:
    lm = AgentflowLM(base_url=url, num_retries=0, cache=False)
    with pytest.raises(kind_of("LMError", "BadRequestError") if HAS_OWN_ERRORS else Exception, match="ws://"):
        lm("?")


def test_no_such_model() -> None:
    lm = AgentflowLM("no-such-model", num_retries=0, cache=False)
    with pytest.raises(kind_of("LMUnsupportedModelError", "NotFoundError"), match="no-such-model"):
        lm("?")


@pytest.mark.parametrize("told", [{"made_up": 1}, {"temperature": 1.0, "max_tokens": 0}])
def test_what_there_is_not(told: dict[str, Any]) -> None:
    lm, _ = scripted(answering("x"))
    with pytest.raises(Exception, match=r"made_up|max_tokens"):
        lm("?", **told)


def test_pictures_are_not_taken() -> None:
    lm, _ = scripted(answering("x"))
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    messages = [{"role": "user", "content": [picture]}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions want other objects
        unsupported = kind_of("LMUnsupportedFeatureError", "UnsupportedParamsError")
        with pytest.raises(unsupported, match="takes text"):
            lm(messages=messages)


def test_a_dspy_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.6.27")
    with pytest.raises(ImportError, match=r"2\.6\.27.*pip install -U dspy"):
        importlib.reload(dspy_agentflow)
