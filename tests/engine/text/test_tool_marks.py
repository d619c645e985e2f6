"""Special tokens that mark tool calls: a model may write them, contents of others may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import small_tokenizers
from support.engine.tool_template_shapes import (
    HERMES,
    MARKS,
    MISTRAL,
    SPEC,
    SPECIAL,
    TEMPLATES,
    THINKING_HERMES,
    TOKENIZER,
    TOKENS,
)

from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.detokenizer import Detokenizer
from agentflow.engine.text.state.token_state import TokenState
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.chat import CalledTool, Message, ToolSpec

SENTENCEPIECE = {
    prepend: Tokenizer(
        small_tokenizers.sentencepiece(prepend, extra=MARKS), named_tokens=TOKENS, tool_markup="[TOOL_CALLS] "
    )
    for prepend in ("every", "first", "none")
}
ALL = {"byte_level": TOKENIZER, **SENTENCEPIECE}
texts = st.lists(st.sampled_from([*SPECIAL, "a", " ", "[", "{é", "\n"]), max_size=5).map("".join)


@pytest.mark.parametrize("name", ALL)
@given(text=texts)
def test_a_mark_is_open_to_models_alone(name: str, text: str) -> None:
    tokenizer = ALL[name]
    mark = tokenizer.find_id("[TOOL_CALLS]")
    assert tokenizer.mark_ids == {mark}
    assert tokenizer.token_bytes(mark) == b"[TOOL_CALLS]"
    assert tokenizer.closed_ids.isdisjoint(tokenizer.encode(text, continues=True))
    written = tokenizer.encode_written(text)
    assert written.count(mark) == text.count("[TOOL_CALLS]")
    assert (tokenizer.closed_ids - {mark}).isdisjoint(written)
    if tokenizer.space_prefix == "none":
        assert Detokenizer(tokenizer).push_all(written) == text


@pytest.mark.parametrize("name", ALL)
@given(text=texts)
def test_spans_of_closed_tokens(name: str, text: str) -> None:
    tokenizer = ALL[name]
    closed = [text[start:end] for start, end in tokenizer.closed_spans(text)]
    ids = [token for token in tokenizer.encode_markup(text) if token in tokenizer.closed_ids]
    assert [tokenizer.find_id(one) for one in closed] == ids


@pytest.mark.parametrize("name", SENTENCEPIECE)
@given(said=st.lists(texts, min_size=5, max_size=5))
def test_untrusted_text_gives_no_special_token_after_prepended_spaces(name: str, said: list[str]) -> None:
    tokenizer, template = SENTENCEPIECE[name], TEMPLATES["mistral"]

    def special(words: list[str]) -> list[int]:
        description, key, argument, result, called = words
        tool = ToolSpec("weather", description, {"type": "object", "properties": {key: {"enum": [argument]}}})
        call = CalledTool(called, "weather", f'{{"x": "{argument}"}}'.replace("\n", ""))
        state = TokenState(tokenizer, template)
        state.tools([tool])
        for message in (
            Message("user", description),
            Message("assistant", "", tool_calls=(call,)),
            Message("tool", result, tool_call_id=called, name=key),
        ):
            state.turn(message)
        return [token for token in state.ids() if token in tokenizer.closed_ids]

    assert special(said) == special(["a", "b", "c", "d", "e"])


PLAIN_MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
"""Added tokens that the tokenizer does not call special, as in Qwen's."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, ChatTemplate]:
    spec = small_tokenizers.byte_level(
        ["<|im_start|>", "<|im_end|>"], plain_added=[*PLAIN_MARKS, "<other>", "  "]
    )
    folder = small_tokenizers.write_folder(tmp_path_factory.mktemp("qwen"), spec, {}, THINKING_HERMES)
    return Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)


cut_texts = st.lists(
    st.sampled_from(
        [*PLAIN_MARKS, "<tool_", "call>", "<", "/think>", "<th", "ink>", "<other>", "a", " ", "é"]
    ),
    min_size=1,
    max_size=6,
)


@given(said=st.lists(cut_texts, min_size=5, max_size=5), cuts=st.sets(st.integers(0, 5)))
def test_no_content_forms_a_mark_that_the_tokenizer_calls_plain_text(qwen, said, cuts):
    """Written in one go or in pieces, in any turn, in tools and in calls of tools."""
    tokenizer, template = qwen
    marks = {tokenizer.find_id(mark) for mark in PLAIN_MARKS}

    def state_with(words: list[list[str]]) -> TokenState:
        user, assistant, description, argument, result = words
        state = TokenState(tokenizer, template)
        state.tools([ToolSpec("weather", "".join(description), {})])
        for role, pieces in (("user", user), ("assistant", assistant), ("user", result)):
            state.begin_role(role)
            for number, piece in enumerate(pieces):
                state.text(piece)
                if number in cuts:
                    state.cut()
            state.end_role()
        call = CalledTool("call_1", "weather", json.dumps({"x": "".join(argument)}, ensure_ascii=False))
        state.turn(Message("assistant", "".join(assistant), tool_calls=(call,)))
        state.turn(Message("tool", "".join(result), tool_call_id="call_1", name="weather"))
        state.begin_role("assistant")
        return state

    state, harmless = state_with(said), state_with([["x"]] * 5)
    found, expected = [[i for i in one.ids() if i in marks] for one in (state, harmless)]
    assert found == expected
    assert tokenizer.find_id("<tool_call>") in expected  # the template's marks are there
    assert tokenizer.decode(state.ids(), skip_special=False) == state.text_view()
    content = "".join(said[0])
    assert marks.isdisjoint(tokenizer.encode(content))
    assert tokenizer.decode(tokenizer.encode(content)) == content


def test_a_model_may_write_the_marks_under_a_grammar(qwen):
    """It marks its calls and reasoning by tokens that contents cannot have."""
    tokenizer, _ = qwen
    marks = {tokenizer.find_id(mark) for mark in PLAIN_MARKS}
    assert tokenizer.mark_ids == marks
    vocabulary = GrammarCache(tokenizer, tokenizer.vocab_size).vocabulary
    assert [vocabulary.token_bytes[tokenizer.find_id(mark)].decode() for mark in PLAIN_MARKS] == PLAIN_MARKS
    written = tokenizer.encode_written("a<think>b</think><tool_call>")
    assert [i for i in written if i in marks] == [
        tokenizer.find_id(mark) for mark in ("<think>", "</think>", "<tool_call>")
    ]


def test_an_added_token_without_a_meaning_is_one_token_of_contents(qwen):
    """Such as the runs of spaces that some tokenizers add."""
    tokenizer, _ = qwen
    for text in ("<other>", "  "):
        assert tokenizer.encode(f"a{text}b", continues=True).count(tokenizer.find_id(text)) == 1


def test_marks_are_those_of_the_folders_template(tmp_path: Path) -> None:
    """A token that begins turns is none, nor is a special one that the format does not write."""
    calls = {"<tool_call>", "</tool_call>"}
    for template, marks in ((MISTRAL, {"[TOOL_CALLS]"}), (HERMES, calls), (None, calls)):
        folder = tmp_path / str(len(template or ""))
        folder.mkdir()
        config = {"bos_token": "<s>", "eos_token": "</s>"}
        tokenizer = Tokenizer.from_folder(small_tokenizers.write_folder(folder, SPEC, config, template))
        assert tokenizer.mark_ids == {tokenizer.find_id(mark) for mark in marks}
