"""Every public name has a docstring with an example, and the examples run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.fake_engine import FakeEngine
from support.language.docstring_examples import (
    SCRIPT,
    examples_in,
    names,
    open_names,
    public_members,
    run_examples,
)
from support.programs import by_end

import agentflow as af
from agentflow import errors
from agentflow.backends.local import Embedded
from agentflow.backends.remote import Remote
from agentflow.errors import AgentflowError

ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, Warning | AgentflowError)
}
PUBLIC: dict[str, Any] = {name: getattr(af, name) for name in af.__all__} | ERRORS
CLASSES = {name: public for name, public in PUBLIC.items() if inspect.isclass(public)}
FUNCTIONS = {name: public for name, public in PUBLIC.items() if inspect.isfunction(public)}
MEMBERS = {f"{name}.{inner}": member for name in CLASSES for inner, member in public_members(CLASSES[name])}
DOCUMENTED = {**CLASSES, **FUNCTIONS, **MEMBERS}
WITH_EXAMPLES = {
    name: inspect.getdoc(public) or ""
    for name, public in DOCUMENTED.items()
    if examples_in(inspect.getdoc(public) or "")
}
# The scripted backend has no tokens: these run on an engine with a fake runner.
OF_TOKENS = {"State.token_ids", "TokenLogprob", "Variable.logprobs", "Variable.top_logprobs"}
# These block until their result is there, and are rejected inside an event loop.
SYNCHRONOUS = {"run", "map"}


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sessions that an example opens run on the script too; the files that examples read are there."""
    for backend in (Embedded, Remote):
        monkeypatch.setattr(backend, "connect", af.Scripted(by_end(SCRIPT)).connect)
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    for name in ("chart.png", "screen.png"):
        (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "match.mp4").write_bytes(b"\x00\x00\x00\x18ftypmp42")
    monkeypatch.chdir(tmp_path)


def test_dir_shows_the_public_names_and_nothing_else():
    assert dir(af) == sorted(af.__all__)


def test_every_public_name_has_a_docstring():
    missing = [name for name, public in DOCUMENTED.items() if not inspect.getdoc(public)]
    # A struct without one would show its base's.
    missing += [name for name, public in CLASSES.items() if not public.__dict__.get("__doc__")]
    assert missing == []


def test_every_public_name_has_an_example():
    """A class's example may show its methods, and the example of an error's base or subclass may show the
    error. Names whose docstring says "For …" need none: programs do not use them."""
    missing = []
    for name, public in DOCUMENTED.items():
        owner, _, member = name.partition(".")
        shown = WITH_EXAMPLES.get(owner, "") if member else ""
        is_inner = member and re.search(r"\bFor [^.]+\.$", inspect.getdoc(public) or "")
        if not (name in WITH_EXAMPLES or is_inner or f".{member}" in shown or _is_shown_nearby(public)):
            missing.append(name)
    assert missing == []


def _is_shown_nearby(public: Any) -> bool:
    if not inspect.isclass(public) or not issubclass(public, AgentflowError):
        return False
    bases = [base for base in public.__mro__[1:] if issubclass(base, AgentflowError)]
    nearby = [base for base in bases if base is not AgentflowError] + public.__subclasses__()
    return any(examples_in(error.__doc__ or "") for error in nearby)


@pytest.mark.anyio
@pytest.mark.parametrize("name", [name for name in WITH_EXAMPLES if name not in SYNCHRONOUS])
async def test_examples_run(name: str):
    with anyio.fail_after(20):
        backend = FakeEngine() if name in OF_TOKENS else af.Scripted(by_end(SCRIPT))
        async with open_names(backend) as namespace:
            await run_examples(examples_in(WITH_EXAMPLES[name]), namespace)


@pytest.mark.parametrize("name", sorted(SYNCHRONOUS))
def test_synchronous_examples_run(name: str):
    running = run_examples(examples_in(WITH_EXAMPLES[name]), names())
    with pytest.raises(StopIteration):  # it never waits
        running.send(None)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "wrong",
    [
        ">>> 1 + 1\n3",
        ">>> 1  # raises BadArgument",
        ">>> af.gen('')  # raises NotSupported",
        ">>> 1\nTraceback (most recent call last):\nBadArgument: ...",
        ">>> af.gen('')\nTraceback (most recent call last):\nBadArgument: another message",
    ],
)
async def test_wrong_examples_fail(wrong: str):
    with pytest.raises(AssertionError, match=r"raises nothing|shows"):
        await run_examples(examples_in(wrong), names())
