"""Conversations with tools as token ids: the template's text, and nothing special that came from outside."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.conversations import TEMPLATES as PLAIN_TEMPLATES
from support.engine.conversations import messages_of, replay, scripts, state_of
from support.engine.tool_template_shapes import SPECIAL, TEMPLATES, TOKENIZER
from support.examples import examples
from support.faults import has_param

from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.state import parts
from agentflow.engine.text.state.parts import Part, TextRun
from agentflow.engine.text.state.token_state import TokenState
from agentflow.engine.text.tool_format import RESULT_BEGIN
from agentflow.errors import NotSupported
from agentflow.protocol.chat import CalledTool, Message, ToolSpec

harmless = st.text(st.sampled_from("the an \n{}\"'é日"), max_size=8)
hostile = harmless | st.lists(
    st.sampled_from([*SPECIAL, "a", "<|im_", "end|>", "INST", "</s", "user\n"]), max_size=3
).map("".join)
NAMES = st.sampled_from(["weather", "get_time", "x"])


def conversations(texts: st.SearchStrategy[str], names: st.SearchStrategy[str]) -> Any:
    """Tools and messages that all templates take."""
    schemas = st.builds(
        lambda key, description, value: {
            "type": "object",
            "properties": {key: {"type": "string", "description": description, "enum": [value]}},
            "required": [key],
        },
        texts,
        texts,
        texts,
    )
    tools = st.lists(st.builds(ToolSpec, names, texts, schemas), min_size=1, max_size=2).map(tuple)
    arguments = st.dictionaries(texts, texts | st.integers() | st.lists(texts, max_size=2), max_size=2)
    calls = st.builds(
        CalledTool,
        texts.map(lambda text: f"call_{text}"),
        names,
        arguments.map(lambda value: json.dumps(value, ensure_ascii=False)),
    )

    @st.composite
    def draw_messages(draw: st.DrawFn) -> list[Message]:
        messages = [Message("system", draw(texts))] if draw(st.booleans()) else []
        messages.append(Message("user", draw(texts)))
        for _ in range(draw(st.integers(0, 2))):
            call = draw(calls)
            messages.append(Message("assistant", draw(st.just("") | texts), tool_calls=(call,)))
            messages.append(Message("tool", draw(texts), tool_call_id=call.id, name=call.name))
        if draw(st.booleans()):
            messages += [Message("assistant", draw(texts)), Message("user", draw(texts))]
        return messages

    return st.tuples(tools, draw_messages())


def state_with(template: ChatTemplate, tools: tuple[ToolSpec, ...], messages: list[Message]) -> TokenState:
    state = TokenState(TOKENIZER, template)
    state.tools(tools)
    for message in messages:
        state.turn(message)
    state.begin_role("assistant")
    return state


def tamed(value: Any, words: dict[str, str]) -> Any:
    """The same with each text replaced by a distinct harmless one."""
    if isinstance(value, str):
        return words.setdefault(value, f"w{len(words)}") if value.strip() else value
    if isinstance(value, dict):
        known = ("type", "object", "string", "properties", "required", "description", "enum")
        return {
            key if key in known else tamed(key, words): member if key == "type" else tamed(member, words)
            for key, member in value.items()
        }
    return [tamed(item, words) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", TEMPLATES)
@examples(50)
@given(said=conversations(hostile, NAMES | hostile.filter(bool)))
def test_untrusted_text_gives_no_special_token(
    name: str, said: tuple[tuple[ToolSpec, ...], list[Message]]
) -> None:
    """The same special tokens, in the same order, as in the same conversation with harmless words."""
    tools, messages = said
    words: dict[str, str] = {}
    tame_tools = tuple(
        ToolSpec(tamed(t.name, words), tamed(t.description, words), tamed(t.parameters, words)) for t in tools
    )
    tame_messages = [
        Message(
            message.role,
            tamed(message.content, words),
            tool_calls=tuple(
                CalledTool(
                    tamed(c.id, words),
                    tamed(c.name, words),
                    json.dumps(tamed(json.loads(c.arguments), words)),
                )
                for c in message.tool_calls
            ),
            tool_call_id=message.tool_call_id and tamed(message.tool_call_id, words),
            name=message.name and tamed(message.name, words),
        )
        for message in messages
    ]
    found = []
    for one_tools, one_messages in ((tools, messages), (tame_tools, tame_messages)):
        state = state_with(TEMPLATES[name], one_tools, one_messages)
        found.append([i for i in state.ids() if i in TOKENIZER.closed_ids])
        rendered = TEMPLATES[name].render(
            one_messages, tools=one_tools, add_generation_prompt=True, now=state._now
        )
        assert state.text_view() == rendered
        assert TOKENIZER.decode(state.ids(), skip_special=False) == rendered
    assert found[0] == found[1]


@pytest.mark.parametrize("name", TEMPLATES)
@given(said=conversations(st.text(st.sampled_from("the an{}\"'é日"), min_size=1, max_size=8), NAMES))
def test_ids_of_harmless_words_are_those_of_the_rendering(
    name: str, said: tuple[tuple[ToolSpec, ...], list[Message]]
) -> None:
    """Pieces of markup and contents are each encoded in one go, for any text in tools and calls."""
    tools, messages = said
    state = state_with(TEMPLATES[name], tools, messages)
    layout = state._lay_out()
    assert layout is not None
    assert layout.untrusted_spans
    expected: list[int] = []
    for piece in layout.pieces():
        if piece.text:
            expected += (TOKENIZER.encode_markup if piece.turn is None else TOKENIZER.encode)(piece.text)
    assert state.ids() == expected
    assert "".join(piece.text for piece in layout.pieces()) == TEMPLATES[name].render(
        messages, tools=tools, add_generation_prompt=True
    )


@given(script=scripts(with_ids=False))
@pytest.mark.parametrize("name", PLAIN_TEMPLATES)
def test_whole_turns_are_turns(name: str, script: Any) -> None:
    by_parts, given_whole = state_of(name), state_of(name)
    turns = script.contents()
    if not turns:
        return
    try:
        replay(by_parts, script)
        expected = by_parts.ids()
    except NotSupported:
        return
    for message in messages_of(turns):
        given_whole.turn(message)
    if script.opens:
        given_whole.begin_role("assistant")
    assert given_whole.ids() == expected
    assert given_whole.messages() == by_parts.messages()


def test_a_special_name_that_the_template_completes() -> None:
    """The template writes the brackets, the tool the rest of a special token."""
    template = ChatTemplate(
        "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}"
    )
    state = TokenState(TOKENIZER, template)
    state.tools([ToolSpec("INST", "", {}), ToolSpec("other", "", {})])
    state.turn(Message("user", "x"))
    assert state.text_view() == "[INST][other]x"
    assert TOKENIZER.special_ids.isdisjoint(state.ids())


def test_special_text_in_what_a_template_alters() -> None:
    template = ChatTemplate(
        "{% for tool in tools %}{{ tool.function.description[:12] }}{% endfor %}{{ messages[0].content }}"
    )
    for description, is_fine in (("Tells the weather.", True), ("0123456</s>89012", False), ("</s>", False)):
        state = TokenState(TOKENIZER, template)
        state.tools([ToolSpec("f", description, {})])
        state.turn(Message("user", "x"))
        if is_fine:
            assert TOKENIZER.special_ids.isdisjoint(state.ids())
            assert state.text_view() == description[:12] + "x"
        else:
            with pytest.raises(NotSupported, check=has_param("tools")):
                state.ids()


def test_arguments_are_shown_as_they_were_written() -> None:
    arguments = '{"place":"\\u00e9", "days" : 1.50}'
    call = CalledTool("call_1", "weather", arguments)
    messages = [Message("user", "?"), Message("assistant", "", tool_calls=(call,))]
    for name, template in TEMPLATES.items():
        assert arguments in template.render(messages), name


def test_a_template_that_writes_json_in_its_own_way() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set given = c.function.arguments %}"
        "{{ given | tojson(indent=1) }}{{ given.items() | list | length }}{% endfor %}{% endfor %}"
    )
    call = CalledTool("call_1", "weather", '{"a":1}')
    messages = [Message("assistant", "", tool_calls=(call,))]
    assert template.render(messages) == '{\n "a": 1\n}1'


@pytest.mark.parametrize("arguments", ["[1]", '{"city": "Os', "x" * 100, "[" * 100_000])
def test_arguments_that_are_no_object_are_written_as_they_are(arguments: str) -> None:
    call = CalledTool("call_1", "weather", arguments)
    assert f'"arguments": {arguments}' in TEMPLATES["hermes"].render(
        [Message("assistant", "", tool_calls=(call,))]
    )


def test_ids_that_a_template_takes() -> None:
    template = TEMPLATES["mistral_with_ids"]
    for given_id, is_kept in (("call_0123456789", False), ("abcdefghi", True)):
        call = CalledTool(given_id, "weather", "{}")
        messages = [Message("user", "?"), Message("assistant", "", tool_calls=(call,))]
        messages.append(Message("tool", "rain", tool_call_id=given_id))
        text = template.render(messages)
        assert (given_id in text) == is_kept
        shown = text.partition('"id": "')[2][:9]
        assert f'"call_id": "{shown}"' in text


def test_a_fork_has_the_tools() -> None:
    state = TokenState(TOKENIZER, TEMPLATES["hermes"])
    state.tools([ToolSpec("weather", "Tells it.", {"type": "object"})])
    branch = state.fork()
    branch.turn(Message("user", "x"))
    assert '"name": "weather"' in branch.text_view()


def test_text_between_turns_finds_its_place_after_tools() -> None:
    state = TokenState(TOKENIZER, TEMPLATES["hermes"])
    state.tools([ToolSpec("weather", "Tells it.", {"type": "object"})])
    state.turn(Message("user", "x"))
    state.text("between")
    state.turn(Message("user", "y"))
    assert "x<|im_end|>\nbetween<|im_start|>user\ny" in state.text_view()


def test_f37_results_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The characters of all texts that are made, for twice as many results: twice as many."""
    made: dict[int, int] = {}
    for count in (200, 400):
        given = [Part("tool", (TextRun("x"),)) for _ in range(count)]
        made[count] = 0

        def counting(text: str, *, to: int = count) -> TextRun:
            made[to] += len(text)
            return TextRun(text)

        monkeypatch.setattr(parts, "TextRun", counting)
        [turn] = parts.PlainTools("", has_system=True).rewritten(given)
        monkeypatch.undo()
        assert turn.text.count(RESULT_BEGIN) == count
        assert len(turn.runs) == 1
    assert made[400] < 2.1 * made[200]
