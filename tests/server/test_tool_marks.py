"""Special tokens that mark tool calls: text in what a model writes, closed to what others say."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tool_template_shapes import HERMES, MARKS, MISTRAL, SPEC, SPECIAL, TEMPLATES, TOKENIZER, TOKENS

from agentflow.conversation import CalledTool, Message, ToolSpec
from agentflow.server.detokenizer import Detokenizer
from agentflow.server.token_state import TokenState
from agentflow.server.tokenizer import Tokenizer

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
    mark = tokenizer.id_of("[TOOL_CALLS]")
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
def test_places_of_closed_tokens(name: str, text: str) -> None:
    tokenizer = ALL[name]
    closed = [text[start:end] for start, end in tokenizer.closed_places(text)]
    ids = [token for token in tokenizer.encode_markup(text) if token in tokenizer.closed_ids]
    assert [tokenizer.id_of(one) for one in closed] == ids


@pytest.mark.parametrize("name", SENTENCEPIECE)
@given(said=st.lists(texts, min_size=5, max_size=5))
def test_nothing_from_outside_is_special_where_spaces_are_put_in_front(name: str, said: list[str]) -> None:
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


def test_marks_are_those_of_the_folders_template(tmp_path: Path) -> None:
    """A token that begins turns is none, nor is one that the format does not write."""
    for template, marks in ((MISTRAL, {"[TOOL_CALLS]"}), (HERMES, set()), (None, set())):
        folder = tmp_path / str(len(template or ""))
        folder.mkdir()
        config = {"bos_token": "<s>", "eos_token": "</s>"}
        tokenizer = Tokenizer.from_folder(small_tokenizers.write_folder(folder, SPEC, config, template))
        assert tokenizer.mark_ids == {tokenizer.id_of(mark) for mark in marks}
