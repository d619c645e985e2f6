"""Replies as text: written and read piece by piece, wherever the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.errors import ProtocolError
from agentflow.protocol.chat import (
    Arguments,
    CallBegun,
    CalledTool,
    Reply,
    ReplyPiece,
    ReplyReader,
    ReplySoFar,
    ReplyWriter,
    TextPiece,
    read_reply,
)
from agentflow.protocol.growing_text import GrowingText

texts = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\{}[],:\n'), max_size=12)


@st.composite
def replies(draw: st.DrawFn) -> list[ReplyPiece]:
    """Prose and calls, each in pieces."""
    pieces: list[ReplyPiece] = []
    for is_call in draw(st.lists(st.booleans(), max_size=5)):
        said = draw(st.lists(texts, max_size=3))
        if is_call:
            pieces += [CallBegun(draw(texts), draw(texts)), *map(Arguments, said)]
        else:
            pieces += map(TextPiece, said)
    return pieces


def written(pieces: list[ReplyPiece]) -> str:
    """The text of the pieces, one push for each piece."""
    writer = ReplyWriter()
    return "".join([writer.push([piece]) for piece in pieces]) + writer.finish()


def joined(pieces: list[ReplyPiece]) -> list[ReplyPiece]:
    """Drops empty pieces, and joins consecutive pieces of one kind."""
    whole: list[ReplyPiece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if isinstance(piece, CallBegun):
            whole.append(piece)
        elif last is not None and type(last) is type(piece):
            whole[-1] = type(piece)(last.text + piece.text)
        elif piece.text:
            whole.append(piece)
    return whole


@given(replies(), st.lists(st.integers(0, 400), max_size=8))
def test_a_written_reply_is_read_in_any_pieces(pieces: list[ReplyPiece], cuts: list[int]) -> None:
    text = written(pieces)
    reader, read = ReplyReader(), []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        read += reader.push(text[start:end])
    assert joined(read) == joined(pieces)


@given(replies())
def test_the_text_is_json(pieces: list[ReplyPiece]) -> None:
    members = json.loads(written(pieces))
    assert [set(member) for member in members if "text" not in member] == [
        {"id", "name", "arguments"} for piece in pieces if isinstance(piece, CallBegun)
    ]
    prose = "".join([piece.text for piece in pieces if isinstance(piece, TextPiece)])
    assert "".join([member["text"] for member in members if "text" in member]) == prose


@given(replies())
def test_a_prefix_of_the_text_gives_a_prefix_of_the_reply(pieces: list[ReplyPiece]) -> None:
    """Each prefix of the text gives a prefix of the whole text's reply."""
    text, whole = written(pieces), joined(pieces)
    for end in range(len(text)):
        *before, last = joined(ReplyReader().push(text[:end])) or [None]
        assert before == whole[: len(before)]
        if isinstance(last, CallBegun):
            assert last == whole[len(before)]
        elif last is not None:
            assert whole[len(before)].text.startswith(last.text)


@given(replies())
def test_a_partial_reply_grows_to_the_whole_one(pieces: list[ReplyPiece]) -> None:
    notation, so_far = written(pieces), ReplySoFar()
    whole = read_reply(notation)
    for end in range(len(notation) + 1):
        reply = so_far.follow(GrowingText(notation[:end])).now()
        assert so_far.is_over == (end == len(notation))
        assert whole.text.startswith(reply.text)
        assert reply.tool_calls[:-1] == whole.tool_calls[: len(reply.tool_calls)][:-1]
    assert so_far.now() == whole
    assert so_far.text is so_far.text  # a complete one is not copied


def test_a_whole_reply() -> None:
    pieces = [
        TextPiece("I "),
        TextPiece("look."),
        CallBegun("c1", "weather"),
        Arguments('{"city":'),
        Arguments('"Oslo"}'),
    ]
    text = written(pieces)
    assert text == '[{"text":"I look."},{"id":"c1","name":"weather","arguments":"{\\"city\\":\\"Oslo\\"}"}]'
    assert read_reply(text) == Reply("I look.", (CalledTool("c1", "weather", '{"city":"Oslo"}'),))


def test_a_reply_may_be_empty() -> None:
    assert written([]) == "[]"
    assert read_reply("[]") == Reply("")


@pytest.mark.parametrize(
    "text", ["", "[", "hello", '{"text":1}', '[{"text":"I lo', '["a"]', "[]]", '[{"id":1,"arguments":"']
)
def test_an_incomplete_reply_is_rejected(text: str) -> None:
    with pytest.raises(ProtocolError):
        read_reply(text)
