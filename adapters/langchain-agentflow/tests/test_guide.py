"""The Python blocks of docs/guides/langchain.md run, in order, on a script."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import langchain_agentflow
import pytest
from langchain_agentflow import AgentflowEmbeddings, ChatAgentflow

import agentflow as af

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "langchain.md"


def script(prompt: Any) -> Any:
    """Answers the questions of the guide."""
    text = str(prompt)
    if "essay about science" in text:
        return '{"related": "yes", "reason": "It is about science."}'
    if "weather in Oslo" in text and "<tool>" not in text:
        return af.Reply("", (af.ToolCall("weather", {"city": "Oslo"}, "call_1"),))
    return "A text." if text.count("<user>") == 1 else "It rains."


def test_f37_the_blocks_of_the_guide_run(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}

    def run(block: str) -> None:
        exec(compile(block, str(GUIDE), "exec", dont_inherit=True), namespace)

    models, verdict, chain, embeddings, agent = blocks
    run(models)  # none of the three has connected yet
    namespace["model"] = ChatAgentflow(backend=af.Scripted(script))
    run(verdict)
    assert (namespace["verdict"].related, namespace["verdict"].reason) == ("yes", "It is about science.")
    run(chain)
    assert namespace["chain"].unwired == ()
    assert namespace["chain"].invoke({"topic": "rivers"}).content == "A text."
    scripted = partial(AgentflowEmbeddings, backend=af.Scripted(""))
    monkeypatch.setattr(langchain_agentflow, "AgentflowEmbeddings", lambda model, **given: scripted(**given))
    run(embeddings)
    assert [found.page_content for found in namespace["found"]] == ["Bees make honey."]
    run(agent)
    answer = namespace["agent"].invoke({"messages": [("user", "What is the weather in Oslo?")]})
    assert [message.type for message in answer["messages"]] == ["human", "ai", "tool", "ai"]
    assert answer["messages"][2].content == "rain in Oslo"
