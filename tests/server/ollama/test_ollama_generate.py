"""``POST /api/generate``: prompts in the model's template, continued contexts, and raw text."""

from __future__ import annotations

from typing import Any

import pytest
from support.api_server import ApiServer, api_server
from support.chat_template_shapes import INST
from support.fake_engine import TOKENIZER
from support.server.ollama_peer import SAME, answer, error, lines, post, read_lines
from support.server.openai_peer import logit_engine_of_server, logit_server

from agentflow.engine.text.chat_template import ChatTemplate

pytestmark = pytest.mark.timeout(60)
PROMPT = "What do plants do?"

server = pytest.fixture(logit_server, scope="module")


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_prompt_is_the_only_message_of_a_conversation(server: ApiServer, system: str | None) -> None:
    whole = answer(server, "generate", prompt=PROMPT, system=system, options=SAME)
    parts = lines(server, "generate", prompt=PROMPT, system=system, options=SAME)
    turns = [{"role": "system", "content": system}] if system else []
    chat = answer(server, "chat", messages=[*turns, {"role": "user", "content": PROMPT}], options=SAME)
    assert "".join(part["response"] for part in parts) == whole["response"] == chat["message"]["content"]
    assert parts[-1]["context"] == whole["context"]
    assert len(whole["context"]) >= whole["prompt_eval_count"]
    assert not any("context" in part for part in parts[:-1])


def test_a_context_continues_the_conversation_token_by_token(server: ApiServer) -> None:
    first = answer(server, "generate", prompt=PROMPT, options=SAME)
    requests = server.observe_requests()
    second = answer(server, "generate", prompt="And animals?", context=first["context"], options=SAME)
    history = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": first["response"]},
        {"role": "user", "content": "And animals?"},
    ]
    chat = answer(server, "chat", messages=history, options=SAME)
    by_context, by_history = [submit.token_ids for submit in requests.submits]
    assert by_context == by_history
    assert by_context[: len(first["context"])] == first["context"]
    assert second["response"] == chat["message"]["content"]
    assert second["context"][: len(by_context)] == list(by_context)


def test_a_context_may_be_followed_by_a_system_message(server: ApiServer) -> None:
    first = answer(server, "generate", prompt=PROMPT, options=SAME)
    requests = server.observe_requests()
    answer(server, "generate", prompt="Go on.", system="Rhyme.", context=first["context"], options=SAME)
    end = "<|im_end|>\n<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n"
    assert requests.prompt.endswith(f"{first['response']}{end}<|im_start|>assistant\n")


def test_a_context_ends_as_the_template_ends_an_answer() -> None:
    template = ChatTemplate(INST, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    with api_server(logit_engine_of_server(), template=template, constraints=False) as server:
        first = answer(server, "generate", prompt=PROMPT, options=SAME)
        requests = server.observe_requests()
        answer(server, "generate", prompt="And animals?", context=first["context"], options=SAME)
        assert requests.submits[0].token_ids[: len(first["context"])] == first["context"]
        assert requests.prompt.endswith(f"{first['response']}<|im_end|>[INST] And animals? [/INST]")


def test_a_raw_prompt_is_continued_as_it_is(server: ApiServer) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell"
    requests = server.observe_requests()
    found = answer(server, "generate", prompt=text, raw=True, options=SAME)
    assert requests.submits[0].token_ids == TOKENIZER.encode_markup(text)
    assert found["response"]
    assert "context" not in found


def test_a_model_without_a_template_continues_the_text() -> None:
    engine = logit_engine_of_server()
    with api_server(engine, template=ChatTemplate(None), constraints=False) as server:
        requests = server.observe_requests()
        assert answer(server, "generate", prompt=PROMPT, options=SAME)["response"]
        assert requests.prompt == PROMPT
        assert error(server, "generate", prompt=PROMPT, system="Be brief.") == (400, "unsupported", "system")


def test_a_template_that_rewrites_earlier_turns_has_no_contexts() -> None:
    shouts = (
        "{% for m in messages %}[{{ m.content if loop.last or m.role != 'assistant' else '' }}]{% endfor %}"
    )
    engine = logit_engine_of_server()
    with api_server(engine, template=ChatTemplate(shouts), constraints=False) as server:
        assert error(server, "generate", prompt="a", context=[5, 6]) == (400, "invalid_value", "context")


def test_f37_a_neutral_field_of_ollamas_go_types_is_accepted(server: ApiServer) -> None:
    expected = answer(server, "generate", prompt=PROMPT, options=SAME)["response"]
    found = answer(server, "generate", prompt=PROMPT, options=SAME, _debug_render_only=False)
    assert found["response"] == expected


def test_empty_fields_are_the_same_as_none(server: ApiServer) -> None:
    fields: dict[str, Any] = {"suffix": "", "template": "", "system": "", "images": [], "context": []}
    empty = answer(server, "generate", prompt=PROMPT, options=SAME, **fields)
    assert empty["response"] == answer(server, "generate", prompt=PROMPT, options=SAME)["response"]


@pytest.mark.parametrize("fields", [{}, {"prompt": ""}, {"prompt": "", "keep_alive": -1}])
def test_without_a_prompt_the_model_is_reported_as_loaded(server: ApiServer, fields: dict[str, Any]) -> None:
    [last] = read_lines(post(server, "generate", **fields).text)
    assert (last["done_reason"], last["response"]) == ("load", "")
