"""Answers with reasoning that come back in a conversation continue with the tokens that were generated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from support.fake_engine import FakeEngine
from support.reasoning_models import QWEN_MODEL

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.protocol.chat import Message
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.completion.completion import completing
from agentflow.server.completion.request import AnswerEnded, CompletionRequest

pytestmark = pytest.mark.anyio

TOKENIZER = QWEN_MODEL.tokenizer
REASONING, ANSWER = "The question is the answer.", "The quick brown fox"
SCRIPT = f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"
ASKED = (Message("user", "What is the answer?"),)
# The template shows the reasoning of answers after the user's last message.
HISTORY = (*ASKED, Message("assistant", ANSWER, reasoning=REASONING), Message("tool", "x", tool_call_id="1"))


def next_token(tokens: NDArray[np.int64]) -> int:
    """Writes the script one character after the other, which the tokenizer would not do."""
    text = TOKENIZER.decode(tokens.tolist(), skip_special=False, continues=True)
    rest = SCRIPT.removeprefix(text.rpartition("<|im_start|>assistant\n")[2])
    marks = [mark for mark in ("<think>", "</think>") if rest.startswith(mark)]
    return TOKENIZER.encode_written(marks[0] if marks else rest[:1])[0] if rest else 0


async def answered(generator: EngineGenerator, messages: Sequence[Message], salt: str = "") -> AnswerEnded:
    request = CompletionRequest(tuple(messages), SamplingParams(max_tokens=200), cache_salt=salt)
    async with completing(generator, request) as completion:
        *_, end = await completion.rest()
    assert isinstance(end, AnswerEnded)
    return end


async def test_an_answer_with_reasoning_is_found():
    engine = FakeEngine(runner=QWEN_MODEL.runner(next_token=next_token), tokenizer=TOKENIZER)
    async with engine.open_client() as client:
        generator = EngineGenerator(client, QWEN_MODEL.template)
        first = await answered(generator, ASKED)
        assert len(first.token_ids) > len(TOKENIZER.encode_written(SCRIPT))
        known = first.usage.prompt_tokens + len(first.token_ids)
        # Other salts share neither the cache nor the index.
        other = await answered(generator, HISTORY, "other")
        again = await answered(generator, HISTORY)
    assert again.usage.cached_tokens == known
    assert again.usage.prompt_tokens > other.usage.prompt_tokens
