"""Failures raise LangChain's exceptions, with one clear message."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys

import pytest
from langchain_agentflow import (
    Agentflow,
    AgentflowConnectionError,
    AgentflowInvalidRequestError,
    AgentflowModelNotFoundError,
    ChatAgentflow,
)
from langchain_agentflow.errors import as_langchain
from langchain_core import exceptions

import agentflow as af


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (af.PromptTooLong("x"), exceptions.ContextOverflowError),
        (af.errors.UnknownModel("x"), exceptions.ModelNotFoundError),
        (af.errors.NotAuthorized("x"), exceptions.ModelAuthenticationError),
        (af.errors.RateLimited("x"), exceptions.ModelRateLimitError),
        (af.Overloaded("x"), exceptions.ModelAPIError),
        (af.DeadlineExceeded("x"), exceptions.ModelTimeoutError),
        (af.ServerLost("x"), exceptions.ModelConnectionError),
        (af.errors.NotSupported("x"), exceptions.ModelInvalidRequestError),
        (af.errors.EngineFailed("x"), exceptions.ModelAPIError),
        (af.errors.RunFailed("x"), exceptions.ModelError),
        (af.errors.ScriptMismatch("x"), exceptions.ModelInvalidRequestError),
    ],
)
def test_each_error_is_both(error, kind):
    told = as_langchain(error)
    assert isinstance(told, kind)
    assert isinstance(told, af.AgentflowError)
    assert isinstance(told, type(error))
    assert str(told) == "x"
    again = pickle.loads(pickle.dumps(told))
    assert isinstance(again, kind)
    assert str(again) == "x"
    assert as_langchain(told) is told


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def test_no_server_at_the_address():
    model = ChatAgentflow(base_url=f"ws://127.0.0.1:{free_port()}", max_retries=0)
    with pytest.raises(AgentflowConnectionError, match=r"ws://127\.0\.0\.1"):
        model.invoke("x")


async def test_no_server_at_the_address_in_a_loop():
    model = ChatAgentflow(base_url=f"ws://127.0.0.1:{free_port()}", max_retries=0)
    with pytest.raises(AgentflowConnectionError, match=r"ws://127\.0\.0\.1"):
        await model.ainvoke("x")


def test_what_is_no_address():
    with pytest.raises(AgentflowInvalidRequestError, match="nowhere"):
        ChatAgentflow(base_url="nowhere", max_retries=0).invoke("x")


def test_an_unknown_model():
    with pytest.raises(AgentflowModelNotFoundError, match="no-such-model"):
        ChatAgentflow(model="no-such-model", max_retries=0).invoke("x")


def test_a_schema_that_is_none():
    with pytest.raises(AgentflowInvalidRequestError, match="schema"):
        ChatAgentflow(backend=af.Scripted(["x"])).bind(schema=7).invoke("x")


def test_a_call_is_tried_again_where_that_may_help(monkeypatch):
    monkeypatch.setattr("agentflow.language.batch.retries.FIRST_PAUSE_S", 0.0)
    answers = iter(
        [
            af.errors.EngineFailed("restarts"),
            af.Overloaded("full"),
            "Here.",
            af.errors.EngineFailed("a"),
            af.errors.BadArgument("b"),
        ]
    )
    model = ChatAgentflow(backend=af.Scripted(lambda _: next(answers)), max_retries=2)
    assert model.invoke("x").content == "Here."
    with pytest.raises(exceptions.ModelInvalidRequestError, match="b"):
        model.invoke("x")


def test_a_retry_after_is_kept():
    limited = af.errors.RateLimited("x")
    limited.retry_after_s = 7.5
    assert as_langchain(limited).retry_after_s == 7.5


def test_a_call_says_how_often_it_is_tried():
    failures = iter([af.errors.EngineFailed("a"), "Yes."])
    model = ChatAgentflow(backend=af.Scripted(lambda _: next(failures)))
    with pytest.raises(exceptions.ModelAPIError):
        model.invoke("x", max_retries=0)


@pytest.mark.parametrize("kind", [ChatAgentflow, Agentflow])
def test_a_field_that_is_spelt_wrongly_is_told(kind):
    with pytest.raises(ValueError, match="temprature"):
        kind(temprature=0.7)


def test_a_version_that_is_too_old_is_told():
    """In a separate process, where the package is imported again."""
    pretend = "import importlib.metadata as m; m.version = lambda name: '1.6.9'; import langchain_agentflow"
    command = [sys.executable, "-c", pretend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith(
        "ImportError: langchain-agentflow needs langchain-core 1.7 or later, and this is 1.6.9"
    )
