"""The tokens that a call wrote to its provider's cache, which some models charge for."""

from __future__ import annotations

from typing import Any

import pytest
from support.apis import anthropic_answers, openai_answers, responses_answers
from support.apis.fake_server import Answer as Response

from agentflow.backends.apis.answers.answer import AnswerCollector
from agentflow.backends.apis.chat.chat_completions import ChatReader
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.event_stream import EventReader
from agentflow.backends.apis.messages.anthropic_stream import AnthropicErrors, MessagesReader
from agentflow.backends.apis.responses.responses_stream import ResponsesReader
from agentflow.protocol.sampling import GenParams


def chat(answer: AnswerCollector) -> ChatReader:
    return ChatReader(answer, ErrorMapping("OpenAI", "gpt-5.6-sol"), 100)


def responses(answer: AnswerCollector) -> ResponsesReader:
    return ResponsesReader(answer, ErrorMapping("OpenAI", "gpt-5.6-sol"), 100)


def messages(answer: AnswerCollector) -> MessagesReader:
    return MessagesReader(answer, AnthropicErrors("Anthropic", "claude-opus-5-5"))


@pytest.mark.parametrize(
    ("reader", "response", "written"),
    [
        (chat, openai_answers.text_stream("x", usage=openai_answers.usage(20, 1, cached=8, written=12)), 12),
        (chat, openai_answers.text_stream("x"), 0),
        (chat, openai_answers.text_stream("x", usage=None), 0),
        (
            responses,
            responses_answers.text_stream("x", usage=responses_answers.usage(20, 1, cached=8, written=12)),
            12,
        ),
        (responses, responses_answers.text_stream("x", usage=None), 0),
        (
            messages,
            anthropic_answers.stream(
                anthropic_answers.beginning(4, cached=8, written=12),
                anthropic_answers.text_block("x"),
                anthropic_answers.ending(),
            ),
            12,
        ),
        (messages, anthropic_answers.text_stream("x"), 0),
    ],
)
def test_written_tokens_are_counted(reader: Any, response: Response, written: int) -> None:
    answer = AnswerCollector(GenParams(), lambda text: None)
    sink, events = reader(answer), EventReader()
    for step in response.body:
        assert isinstance(step, bytes)
        for event in events.push(step):
            sink.event(event)
    assert sink.is_over
    assert answer.written_tokens == written
    assert answer.usage.prompt_tokens >= written
