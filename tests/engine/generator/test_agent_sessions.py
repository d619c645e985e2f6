"""Long sessions of agents find the tokens of their earlier turns, however their clients write them."""

from __future__ import annotations

import pytest
from support.engine.agent_sessions import CLIENTS, TURNS, AgentSession
from support.engine.tool_template_shapes import TEMPLATES, TOKENIZER, WITHOUT_TOOLS
from support.examples import times
from support.reasoning_models import DEEPSEEK_MODEL, QWEN_MODEL, SPELLED_MODEL

from agentflow.engine.text.state.rendered_prefixes import RenderedPrefixes

MODELS = {name: (template, TOKENIZER) for name, template in {**TEMPLATES, **WITHOUT_TOOLS}.items()}
MODELS |= {
    name: (model.template, model.tokenizer)
    for name, model in {"qwen": QWEN_MODEL, "deepseek": DEEPSEEK_MODEL, "spelled": SPELLED_MODEL}.items()
}
# These write the text of earlier turns differently in later prompts: tools, results, dropped reasoning.
REWRITING = {"inst", "mistral", "mistral_with_ids", "thinking_hermes", "qwen", "deepseek", "spelled"}

# One template for each notation, and one that drops reasoning. Others: with the client that rewrites most.
EACH_NOTATION = {"hermes", "mistral", "by_parameter", "qwen"}
SESSIONS = [(n, one) for n in MODELS for one in CLIENTS if n in EACH_NOTATION or one == "claude_code"]


@pytest.mark.parametrize(("name", "client"), SESSIONS)
def test_earlier_turns_are_found(name: str, client: str):
    template, tokenizer = MODELS[name]
    session = AgentSession(template, tokenizer, CLIENTS[client], RenderedPrefixes(tokenizer))
    found = session.run(
        TURNS if name == "spelled" else max(20, times(TURNS))
    )  # it loses some in the first turns
    assert found.share_of_same_text >= 0.98
    assert found.share >= (0.9 if name in REWRITING else 0.98)


def test_answers_with_reasoning_are_lost_without_prefixes():
    session = (QWEN_MODEL.template, QWEN_MODEL.tokenizer, CLIENTS["codex"])
    before = AgentSession(*session, None).run(12)
    after = AgentSession(*session, RenderedPrefixes(QWEN_MODEL.tokenizer)).run(12)
    assert before.same_text - before.found > 100
    assert after.same_text - after.found == 0
