"""Multi-turn chat: each prompt is the one before with the reply and the new question."""

import io

import chat
import pytest
from rich.console import Console
from scripted_example import Asked, in_turn, run, scripted, shown

pytestmark = pytest.mark.anyio

QUESTIONS = ["Hello!", "And then?", "Bye."]
REPLIES = ["Good morning to you.", "I feed the bears.", "See you."]


async def asked_one_by_one():
    for question in QUESTIONS:
        yield question


async def test_each_prompt_extends_the_one_before():
    asked = Asked(in_turn(REPLIES))
    heard: list[str] = []
    talk = await run(chat.chat, scripted(asked), asked_one_by_one(), heard.append)
    turns = [message for pair in zip(QUESTIONS, REPLIES, strict=True) for message in pair]
    assert [message["content"] for message in talk.messages[1:]] == turns
    assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 3]
    assert "".join(heard) == "".join(f"{reply}\n" for reply in REPLIES)
    for i in (1, 2):
        last_turn = f"{REPLIES[i - 1]}</assistant><user>{QUESTIONS[i]}</user><assistant>"
        assert asked.prompts[i] == asked.prompts[i - 1] + last_turn
    assert [usage.output_tokens for usage in talk.usage] == [len(reply.split()) for reply in REPLIES]


async def test_the_conversation_is_shown():
    page = await shown(chat.main, scripted(lambda prompt: "a [bold]reply[/bold]"))
    for question in chat.QUESTIONS:
        assert f"> {question}\na [bold]reply[/bold]\n" in page
    assert "of which cached" in page


@pytest.mark.parametrize("stdin", ["One?\n  Two?  \n\nThree?\n", "One?\nTwo?\n", "One?\nTwo?"])
async def test_typed_lines_are_questions_until_an_empty_line(monkeypatch, stdin):
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    asked = Asked(lambda prompt: "so")
    await shown(chat.main, scripted(asked), is_typed=True)
    assert len(asked.prompts) == 2
    assert "<user>One?</user>" in asked.prompts[1]
    assert asked.prompts[1].endswith("<user>Two?</user><assistant>")


async def test_an_empty_input_has_no_questions(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert [text async for text in chat.typed(Console(file=io.StringIO()))] == []
