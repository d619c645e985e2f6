"""The end tokens of a model, which its files, its tokenizer and its template each may name."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import small_tokenizers
from support.engine.random_model import write_random_model
from support.reasoning_models import CHANNEL_MODEL, CHANNEL_TOKENS

from agentflow.engine.local_engine import open_engine
from agentflow.engine.options import EngineOptions
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.turn_ends import all_end_ids

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
REFUSES = "{{ raise_exception('no conversations') }}"
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>"
    "{{ m.content }}<|im_end|>{% endfor %}"
)
SPEC = small_tokenizers.byte_level(special=("<s>", "</s>", "<|im_start|>", "<|im_end|>"))
END, TURN_END = 1, 3
CHANNEL_MARKS = (*CHANNEL_TOKENS, "<|channel|>", "<|constrain|>")


@pytest.mark.parametrize(
    ("source", "of_template"), [(CHATML, {TURN_END}), (PLAIN, set()), (REFUSES, set()), (None, set())]
)
@pytest.mark.parametrize("named", [{}, {"eos_token": "</s>"}])
@pytest.mark.parametrize("of_files", [(), (END,), (TURN_END,), (7, END)])
def test_f37b_the_ends_are_those_of_all_sources(
    source: str | None,
    of_template: set[int],
    named: dict[str, str],
    of_files: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = Tokenizer(SPEC, named_tokens=named)
    found = all_end_ids(of_files, tokenizer, ChatTemplate(source))
    assert found[: len(of_files)] == of_files
    expected = {*of_files} | of_template | ({END} if named else set())
    assert set(found) == expected
    assert len(found) == len(expected)
    assert len(caplog.records) == (len(expected) - len(of_files) if of_files else 0)


@pytest.mark.parametrize("named", [{}, {"eos_token": "</s>"}])
@pytest.mark.parametrize("of_files", [(), (END,)])
def test_f37b_a_mark_that_closes_a_turn_in_channels_ends_the_answer(
    of_files: tuple[int, ...], named: dict[str, str]
) -> None:
    """Without it, a model whose files have no end token never stopped."""
    found = all_end_ids(of_files, Tokenizer(SPEC, named_tokens=named), ChatTemplate(CHANNELS))
    assert set(found) == {*of_files, TURN_END} | ({END} if named else set())
    assert found[: len(of_files)] == of_files


@pytest.mark.parametrize("source", [CHANNEL_MODEL.template.source, CHANNELS.replace("<|im_end|>", "<|end|>")])
@pytest.mark.parametrize("eos", [None, "<|return|>", "<|end|>", "<|endoftext|>"])
@pytest.mark.parametrize("of_files", [(), ("<|return|>",), ("<|endoftext|>",), ("<|end|>",)])
def test_f37_answers_in_channels_end_with_their_last_message(
    source: str, eos: str | None, of_files: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """``<|end|>`` ends a message, such as the reasoning, and the answer only if the model's files say so."""
    spec = small_tokenizers.byte_level(special=CHANNEL_MARKS)
    tokenizer = Tokenizer(spec, named_tokens={"eos_token": eos} if eos else {}, template_source=source)
    ids = tuple(map(CHANNEL_MARKS.index, of_files))
    found = all_end_ids(ids, tokenizer, ChatTemplate(source))
    expected = {*of_files, "<|return|>", "<|call|>"} | ({eos} - {None, "<|end|>"})
    assert {CHANNEL_MARKS[token] for token in found} == expected
    assert len(caplog.records) == (len(expected) - len(of_files) if of_files else 0)


@pytest.mark.anyio
@pytest.mark.parametrize("of_files", [None, 7])
async def test_f37_an_engine_has_the_ends_of_all_sources(of_files: int | None, tmp_path: Path) -> None:
    """``</s>`` stands in ``tokenizer_config.json`` alone, and the other mark in the template."""
    folder = write_random_model(tmp_path, eos_token_id=of_files)
    async with open_engine(EngineOptions(str(folder), device="cpu", kv_tokens=500, threads=1)) as client:
        assert set(client.info.end_token_ids) == {END, TURN_END} | ({of_files} - {None})
