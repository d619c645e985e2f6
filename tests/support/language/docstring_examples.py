"""Runs the ``>>>`` examples of a docstring, which may await, in a namespace that is prepared for them."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

import agentflow as af
from agentflow.protocol.backend import Backend

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# The answer to a prompt that ends so; the longest end counts, and the empty one is everything else.
SCRIPT = {
    "": "Plants turn light into sugar.",
    "Is it about science?</user><assistant>": "yes",
    "Grade it.</user><assistant>": "A",
    "Name two.</user><assistant>": '["light", "water"]',
    "Write a report.</user><assistant>": '{"summary": "Clear and well argued.", "score": 8}',
    "How many legs has a spider?</user><assistant>": "8",
    "What is the weather in Oslo?</user><assistant>": af.ToolCall("weather", {"city": "Oslo"}),
    "Judge it in a sentence, with a score.</user><assistant>": "It is clear, <score>8</score> of 10.",
}


@dataclass
class Report:
    """The text of a judge."""

    summary: str
    score: int


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


@af.program
async def judge(s: af.State, essay: str, dimensions: tuple[str, ...] = ("clarity", "evidence")) -> str:
    """A program for examples: it forks, joins and looks at no value."""
    s += af.user(f"Judge this essay: {essay}")
    async with s.fork(len(dimensions)) as branches:
        for branch, dimension in zip(branches, dimensions, strict=True):
            branch += af.user(f"Judge its {dimension}.")
            branch += af.assistant(af.gen("judgment", max_tokens=64))
    s += af.user(*[branch["judgment"] for branch in branches], "Grade it.")
    s += af.assistant(af.select("grade", ["A", "B", "C"]))
    return await s["grade"]


def names() -> dict[str, Any]:
    """Names that every example may use."""
    return {
        "af": af,
        "anyio": anyio,
        "json": json,
        "Report": Report,
        "weather": weather,
        "judge": judge,
        "essay": "Every green leaf is a factory that runs on light.",
        "essays": ["On leaves.", "On light.", "On sugar."],
    }


@asynccontextmanager
async def open_names(backend: Backend) -> AsyncIterator[dict[str, Any]]:
    """``names()``, and an open session ``flow`` with a state ``s`` and its ``branches``."""
    async with af.session(backend=backend, seed=7) as flow, flow.state() as s:
        s += af.user("What do plants do?") + af.assistant(af.gen("answer"))
        branches = s.fork(2)
        for branch in branches:
            branch += af.user("Judge that.") + af.assistant(af.gen("judgment"))
        yield {**names(), "flow": flow, "s": s, "branches": branches}


def examples_in(text: str) -> list[doctest.Example]:
    """The examples of a docstring."""
    return doctest.DocTestParser().get_examples(inspect.cleandoc(text))


async def run_examples(examples: list[doctest.Example], namespace: dict[str, Any]) -> None:
    """Runs them one after the other; fails where one shows another output or error than it has. An error
    is shown as a traceback, or as ``# raises Name``."""
    for example in examples:
        raised = re.search(r"# raises (\w+)$", example.source, flags=re.MULTILINE)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                made = eval(_compiled(example), namespace)
                if inspect.iscoroutine(made):
                    await made
            except Exception as error:
                if example.exc_msg is None and raised is None:
                    raise
                found = f"{type(error).__name__}: {error}\n"
                wanted = example.exc_msg or f"{raised and raised[1]}: ...\n"
            else:
                assert example.exc_msg is None, f"raises nothing: {example.source}"
                assert raised is None, f"raises nothing: {example.source}"
                found, wanted = printed.getvalue(), example.want or "..."
        assert doctest.OutputChecker().check_output(wanted, found, FLAGS), (
            f"{example.source}shows\n{wanted}and gives\n{found}"
        )


def _compiled(example: doctest.Example) -> Any:
    is_expression = isinstance(ast.parse(example.source).body[0], ast.Expr)  # its value is shown
    return compile(
        example.source,
        "<example>",
        "single" if is_expression else "exec",
        flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
        dont_inherit=True,
    )


def public_members(owner: type) -> Iterator[tuple[str, Any]]:
    """The methods and properties of a class that come from this project and are meant to be used."""
    for name in dir(owner):
        member = inspect.getattr_static(owner, name)
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, classmethod | staticmethod):
            function = function.__func__
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        if function.__module__.startswith("agentflow"):
            yield name, member
