"""Answers in channels, streamed, against a reader of whole ones; and by their tokens."""

from __future__ import annotations

import re
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st
from support.reasoning_models import CHANNEL_MODEL, QWEN_MODEL

from agentflow.engine.text.channel_output import ChannelOutput, ChannelTokens, read_channels
from agentflow.engine.text.channels import ANSWER_HEAD, REASONING_HEAD, call_head, has_channels
from agentflow.protocol.chat import Arguments, CallBegun, ReasoningPiece, ReplyPiece, TextPiece

NEXT = "<|end|><|start|>assistant"
HEADS = {
    REASONING_HEAD: "reasoning",
    ANSWER_HEAD: "text",
    "<|channel|>commentary<|message|>": "text",
    call_head("look"): "look",
    " to=functions.look<|channel|>commentary json<|message|>": "look",
    "<|channel|>analysis to=functions.look <|message|>": "look",
    call_head("other"): "text",
    "<|channel|>commentary to=python code<|message|>": "text",
}
WORDS = st.lists(
    st.sampled_from(["a", " to=", "b\n", "<", "|>", "<|", "{", '"', "final", "\u2003é"]), max_size=5
)
ARGUMENTS = st.sampled_from(["{}", '{"a": "}<|end|>"}', '{"a": [{"b": "\\""}]}'])
BODIES = st.tuples(WORDS.map("".join), ARGUMENTS)
MESSAGES = st.lists(st.tuples(st.sampled_from([*HEADS]), BODIES), max_size=4)
CUTS = st.lists(st.integers(0, 400), max_size=8)


def streamed(text: str, cuts: list[int], *, is_truncated: bool = False, **options) -> list[ReplyPiece]:
    reader, pieces, at = ChannelOutput(("look",), **options), [], 0
    for cut in sorted(cut for cut in cuts if cut <= len(text)):
        pieces += reader.push(text[at:cut])
        at = cut
    pieces += reader.finish(text[at:], is_truncated=is_truncated)
    assert reader.num_calls == sum(isinstance(piece, CallBegun) for piece in pieces)
    assert all(piece.text for piece in pieces if not isinstance(piece, CallBegun))
    return pieces


def joined(pieces: list[ReplyPiece]) -> list[tuple[type, str]]:
    """Adjacent pieces of one kind as one."""
    shown = [(type(p), p.name if isinstance(p, CallBegun) else p.text) for p in pieces]
    return [(kind, "".join(text for _, text in group)) for kind, group in groupby(shown, lambda one: one[0])]


@given(MESSAGES, CUTS, st.booleans(), st.sampled_from(["", "<|call|>", "<|return|>"]))
def test_streamed_answers_are_read_as_what_was_written(messages, cuts, is_constrained, end) -> None:
    written, expected, kinds_seen = [], [], set()
    for head, (words, arguments) in messages:
        kind = HEADS[head]
        written.append(head + (arguments if kind == "look" else words))
        if kind == "look":
            expected += [(CallBegun, "look"), (Arguments, arguments)]
        elif words:
            piece = ReasoningPiece if kind == "reasoning" else TextPiece
            expected.append((piece, ("\n\n" if piece in kinds_seen else "") + words))
            kinds_seen.add(piece)
    text = NEXT.join(written) + (end if written else "")
    merged = [(k, "".join(t for _, t in group)) for k, group in groupby(expected, lambda one: one[0])]
    assert joined(streamed(text, cuts, is_constrained=is_constrained)) == merged
    message = read_channels(text)
    calls = [arguments for head, (_, arguments) in messages if "functions." in head and HEADS[head] == "look"]
    assert [call.arguments for call in message.tool_calls if call.name == "look"] == calls


PARTS = [
    *HEADS,
    NEXT,
    "<|end|>",
    "<|start|>",
    "<|call|>",
    "<|message|>",
    " ",
    "\n",
    "{",
    "}",
    '{"a": 1}',
    "yes",
]


@given(
    st.lists(st.sampled_from(PARTS), max_size=8).map("".join),
    st.integers(0, 300),
    CUTS,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_how_an_output_is_split_changes_nothing(text, length, cuts, is_open, is_constrained, is_cut) -> None:
    """For any text of a model, stopped anywhere."""
    options = {"is_open": is_open, "is_constrained": is_constrained, "is_truncated": is_cut}
    text = text[:length]
    assert joined(streamed(text, cuts, **options)) == joined(streamed(text, [], **options))
    assert joined(streamed(text, [*range(len(text))], **options)) == joined(streamed(text, [], **options))


def test_pieces_are_delivered_as_they_come() -> None:
    reader = ChannelOutput(("look",), is_constrained=True)
    assert reader.push("<|channel|>analysis<|message|>A bear") == [ReasoningPiece("A bear")]
    assert reader.push("?<|end|><|start|>assistant<|channel|>comm") == [ReasoningPiece("?")]
    assert reader.is_undecided
    assert reader.push("entary<|message|>I look.<|e") == [TextPiece("I look.")]
    begun, arguments = reader.push(f"nd|><|start|>assistant{call_head('look')}" + '{"a": ')
    assert isinstance(begun, CallBegun)
    assert (begun.name, arguments) == ("look", Arguments('{"a": '))
    assert reader.push("1}<|call|>") == [Arguments("1}")]
    assert reader.finish() == []


def test_calls_that_are_none_are_text() -> None:
    for text in (call_head("other") + '{"a": 1}', call_head("look") + '{"a": nonsense}', "Hello", " to=x"):
        [kind, *rest] = joined(streamed(text, []))
        assert kind[0] is TextPiece
        assert not rest
    # A call that a limit truncated counts as a call.
    cut = call_head("look") + '{"a": '
    assert joined(streamed(cut, [], is_truncated=True)) == [(CallBegun, "look"), (Arguments, '{"a": ')]
    assert joined(streamed(call_head("look")[:-3], [], is_truncated=True)) == []


TOKENS = re.compile(r"<\|[a-z]+\|>|[a-z]+|.", re.DOTALL)


@given(MESSAGES, st.booleans())
def test_tokens_are_divided_where_the_text_is(messages, has_calls) -> None:
    text = NEXT.join(
        head + (arguments if "functions" in head else words) for head, (words, arguments) in messages
    )
    follower = ChannelTokens(is_open=False, has_answer=True, has_calls=has_calls)
    tokens = TOKENS.findall(text)
    for token in tokens:
        if not follower.is_over:
            follower.read(token.encode())
    before = follower.data.decode()
    assert text.startswith(before)
    assert follower.num_inside <= follower.num_tokens <= len(tokens)
    if follower.has_head:
        assert before.endswith(ANSWER_HEAD)
    kinds = [HEADS[head] for head, _ in messages]
    if follower.is_over and all("<|" not in words for _, (words, _) in messages):
        num_reasoning = next(n for n, kind in enumerate(kinds) if kind != "reasoning")
        assert before.count(REASONING_HEAD) == num_reasoning


def test_a_template_shows_whether_its_model_writes_in_channels() -> None:
    assert has_channels(CHANNEL_MODEL.template.source)
    assert not has_channels(QWEN_MODEL.template.source)
