"""The blocks of docs/guides/tutorial.md run, in order, and print what the page shows."""

from __future__ import annotations

import inspect
import re
from typing import Any

import anyio
import pytest
from support.docs.page_blocks import DOCS, Block, blocks_of, run_block

import agentflow as af
from agentflow.backends.local import Embedded

PAGE = DOCS / "guides" / "tutorial.md"

ESSAY = "Every green leaf is a factory that runs on light."

# What the tutorial's model says to a prompt that ends so; the longest end counts.
SCRIPT = {
    "": "It is short and clear.",
    "Is it about science?</user><assistant>": "yes",
    "its clarity.</user><assistant>": "The sentences are short.",
    "its evidence.</user><assistant>": "It names no source.",
    "Sum that up.</user><assistant>": "Clear, but without evidence.",
    "What do plants live on?</user><assistant>": "Light, water and air. They need no more.",
    "Which of these is the most important?</user><assistant>": "Light.",
    "plants live on</user><assistant>": "light\nwater\nair",
    "as JSON.</user><assistant>": '{"title": "Leaves", "scores": [8, 3]}',
    "Write a report.</user><assistant>": '{"summary": "Clear, without evidence.", "score": 7}',
    "How many legs has a spider?</user><assistant>": "8",
    "What is the weather in Oslo?</user><assistant>": (
        '[{"name": "weather", "arguments": {"city": "Oslo"}}]'
    ),
    "Do I need an umbrella in Oslo?</user><assistant>": (
        'I will look it up.<call>{"name": "weather", "arguments": {"city": "Oslo"}}</call>'
    ),
    "rain in Oslo</tool><assistant>": "It rains in Oslo.",
    "Is it raining in Rome?</user><assistant>": af.Reply(
        "", (af.CalledTool("call_1", "weather", '{"city": "Rome"}'),)
    ),
    "rain in Rome</tool><assistant>": "Yes, it is.",
    "first paragraph: ": "Leaves catch light.",
    "second paragraph: ": "Roots bring water.",
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_the_tutorial_runs(monkeypatch: pytest.MonkeyPatch):
    # The page opens sessions as its readers do, without a backend.
    monkeypatch.setattr(Embedded, "connect", af.Scripted(SCRIPT).connect)
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    with anyio.fail_after(60):
        async with af.session(seed=7) as flow:
            namespace: dict[str, Any] = {"essay": ESSAY}
            for block in blocks_of(PAGE):
                namespace["flow"] = flow  # the page's own sessions end with their blocks
                await run_block(PAGE, block, namespace)


def test_all_that_gen_takes_is_named():
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition("## gen and select")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)(?:=[^`]*)?`", section))
    assert set(inspect.signature(af.gen).parameters) - {"name"} <= named


@pytest.mark.anyio
@pytest.mark.parametrize("source", ["print(1)\n# → 2\n", "print(1)\n", "1\n# → 1\n"])
async def test_a_block_that_prints_something_else_is_noticed(source: str):
    with pytest.raises(AssertionError, match="the block at line 7 shows"):
        await run_block(PAGE, Block("a heading", 7, source), {})
