"""Answers with tool calls that come back in a conversation continue with the tokens that were generated,
even if the client changes the white space around the calls or in their arguments."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.engine.tool_requests import ALL, NOW, WEATHER
from support.engine.tool_template_shapes import TEMPLATES, TOKENIZER, WITHOUT_TOOLS

from agentflow.engine.generator.context import (
    EngineContext,
    OutputTokenCache,
    PromptLimits,
    fill_conversation,
)
from agentflow.engine.messages import Finished
from agentflow.engine.request import Origin
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.state.token_state import TokenState
from agentflow.engine.text.tool_format import tool_format
from agentflow.engine.text.tools import ReplyText
from agentflow.protocol.chat import CalledTool, Conversation, Message, ToolSpec, read_reply

LIMITS = PromptLimits(TOKENIZER, RunnerInfo("x", TOKENIZER.vocab_size, 10**6, 10**6, (0,), 1, 1, ""))
TOOLS = (WEATHER, NOW)
ASKED = (Message("system", "Be brief."), Message("user", "What is the weather?"))
# Templates that write each content unchanged after the prompt.
EXACT = {**TEMPLATES, **WITHOUT_TOOLS}
for name in ("mistral", "mistral_with_ids", "thinking_hermes", "inst"):
    del EXACT[name]


def filled(
    template: ChatTemplate,
    messages: tuple[Message, ...],
    outputs: OutputTokenCache,
    *,
    salt: str = "",
    tools: tuple[ToolSpec, ...] = TOOLS,
) -> EngineContext:
    context = EngineContext(TokenState(TOKENIZER, template), Origin("", salt), LIMITS)
    fill_conversation(context, Conversation(messages, tools), template, outputs)
    return context


def answered(
    context: EngineContext, text: str, outputs: OutputTokenCache, reason: str = "stop"
) -> tuple[list[int], Message]:
    """The tokens of an answer, one for each byte, and the message that the client gets."""
    ids = [token for char in text for token in TOKENIZER.encode(char, continues=True)]
    end = Finished(0, ids, text, reason, 0, 0, len(ids), [])
    reply = ReplyText(context.tools).finish(text, None, is_truncated=reason == "length")
    message = read_reply(reply).message()
    outputs.put_answer(context, end, message)
    return ids, message


def call_of(template: ChatTemplate, name: str, arguments: str, space: str) -> str:
    """A call in the notation of the template, with ``space`` around its members."""
    form = tool_format(template)
    members = [(key, json.dumps(value)) for key, value in form.constants]
    named = [(form.name_key, json.dumps(name)), (form.arguments_key, arguments)]
    members += named if form.name_first else named[::-1]
    inner = f"{space},{space}".join([f'"{key}"{space}:{space}{value}' for key, value in members])
    written = f"{{{space}{inner}{space}}}"
    return f"{form.mark}{space}{f'[{written}]' if form.is_list else written}{space}{form.end.strip()}"


def sent_back(answer: Message, *, rewritten: bool) -> tuple[Message, ...]:
    """An answer and the results of its calls, as a client sends them: with other ids, and perhaps with the
    arguments written differently (``rewritten``)."""
    calls = [replace(call, id=f"call_{number:04}") for number, call in enumerate(answer.tool_calls)]
    if rewritten:
        texts = [json.dumps(json.loads(call.arguments), sort_keys=True, indent=1) for call in calls]
        calls = [replace(call, arguments=text) for call, text in zip(calls, texts, strict=True)]
    results = [Message("tool", f"rain {call.id}", tool_call_id=call.id) for call in calls]
    return (replace(answer, generated=False, tool_calls=tuple(calls)), *results)


SPACES = st.sampled_from(["", " ", "\n", "  \n\n", "\t"])
# Special tokens of the model among them.
PIECES = ["a", "é", " ", "\n", "<", "{", "<|im_end|>", "</s>", "<tool_response>"]
PROSE = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
CITIES = st.sampled_from(["Oslo", "Rome", "</tool_call>", "<|im_end|>", "[TOOL_CALLS]", "\u00e9"])


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
def test_calls_keep_their_tokens(name: str, data: st.DataObject):
    template, outputs = EXACT[name], OutputTokenCache()
    form = tool_format(template)
    messages, known = ASKED[1:], []
    for _ in range(data.draw(st.integers(1, 3))):
        context = filled(template, messages, outputs)
        prompt = context.tokens.ids()
        assert prompt[: len(known)] == known
        space, city = data.draw(SPACES), json.dumps(data.draw(CITIES))
        arguments = f'{{{space}"days"{space}:{space}1.0,{space}"city":{city}{space}}}'
        calls = [call_of(template, "weather", arguments, space)]
        if form.between is not None and data.draw(st.booleans()):
            calls.append(call_of(template, "now", "{}", data.draw(SPACES)))
        prose = data.draw(PROSE) if form.mark else ""
        text = f"{prose}{data.draw(SPACES)}{data.draw(SPACES).join(calls)}" if form.mark else calls[0]
        if "| trim" in template.source:
            text = text.strip()  # as it trims all answers
        ids, answer = answered(context, text, outputs)
        assert len(answer.tool_calls) == len(calls)
        known = prompt + ids
        messages += sent_back(answer, rewritten=data.draw(st.booleans()))
    context = filled(template, messages, outputs)
    assert context.tokens.ids()[: len(known)] == known


@pytest.mark.parametrize("name", ALL)
def test_other_calls_and_other_prompts_have_other_tokens(name: str):
    template, outputs = ALL[name], OutputTokenCache()
    context = filled(template, ASKED, outputs)
    text = call_of(template, "weather", '{"city": "Oslo", "days": 1}', " ")
    _, answer = answered(context, text, outputs)
    assert len(outputs) == 1
    messages = (*ASKED, *sent_back(answer, rewritten=False))
    [call] = messages[2].tool_calls
    others = [
        {"messages": (*ASKED, replace(messages[2], content="Hm."), messages[3])},
        {"messages": (*ASKED, with_call(messages[2], replace(call, name="now")), messages[3])},
        {"messages": (*ASKED, with_call(messages[2], replace(call, arguments="{}")), messages[3])},
        {"messages": (replace(ASKED[0], content="Be long."), *messages[1:])},
        {"salt": "another"},
        {"tools": (WEATHER,)},
    ]
    for other in others:
        given = {"messages": messages, **other}
        found = filled(template, outputs=outputs, **given).tokens.ids()
        assert found == filled(template, outputs=OutputTokenCache(), **given).tokens.ids()


def with_call(message: Message, call: CalledTool) -> Message:
    return replace(message, tool_calls=(call,))


@pytest.mark.parametrize("name", ALL)
def test_a_truncated_call_is_not_kept(name: str):
    template, outputs = ALL[name], OutputTokenCache()
    whole = call_of(template, "weather", '{"city": "Oslo", "days": 1}', " ")
    for length in range(len(tool_format(template).mark) + 1, len(whole)):
        context = filled(template, ASKED, outputs)
        _, answer = answered(context, whole[:length], outputs, "length")
        assert len(outputs) == (answer.content == whole[:length])
        outputs = OutputTokenCache()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_with_kept_calls_shows_the_same_conversation(name: str):
    template, outputs = TEMPLATES[name], OutputTokenCache()
    context = filled(template, ASKED, outputs)
    _, answer = answered(context, call_of(template, "weather", '{"city": "Oslo", "days": 1}', "\n"), outputs)
    messages = (*ASKED, *sent_back(answer, rewritten=True))
    kept, rendered = [filled(template, messages, o).tokens.text_view() for o in (outputs, OutputTokenCache())]
    assert "".join(kept.split()) == "".join(rendered.split())
