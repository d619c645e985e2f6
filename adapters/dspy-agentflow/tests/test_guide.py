"""The Python blocks of docs/guides/dspy.md run, in order, on a script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dspy
import dspy_agentflow
import pytest
from dspy_agentflow import AgentflowEmbedding
from scripts import chat, scripted

import agentflow as af

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "dspy.md"
PASSAGES = ["Bees make honey.", "A glacier is a river of ice.", "Owls hunt at night."]


def test_f37_the_blocks_of_the_guide_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {"passages": PASSAGES, "__name__": __name__}

    def run(block: str) -> None:
        (file := tmp_path / f"{len(block)}.py").write_text(block, encoding="utf-8")  # ``wired`` reads it
        exec(compile(block, str(file), "exec", dont_inherit=True), namespace)

    configured, judge, essay, embedder = blocks
    run(configured)  # neither of the two has connected yet
    on_a_script = AgentflowEmbedding(backend=af.Scripted(""))
    monkeypatch.setattr(dspy_agentflow, "AgentflowEmbedding", lambda model: on_a_script)
    lm, _ = scripted([chat(reasoning="It is clear.", related="yes", score=7)])
    dspy.configure(lm=lm, adapter=dspy.ChatAdapter())
    run(judge)
    assert capsys.readouterr().out == "7\n"
    lm, _ = scripted(
        [
            chat(reasoning="Springs first.", outline="Springs, then seas."),
            chat(essay="Rivers flow.", words=2),
            chat(title="Rivers"),
        ]
    )
    dspy.configure(lm=lm)
    run(essay)
    assert namespace["program"].unwired == ()
    run(embedder)
    assert namespace["search"]("What do owls hunt?").passages[0] == "Owls hunt at night."
