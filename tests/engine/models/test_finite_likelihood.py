"""A scored gen on a random Llama in float32: it finds the likeliest text, which token by token is missed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from support.engine.random_model import write_random_model
from support.server.http_clients import only_asyncio

import agentflow as af
from agentflow.engine.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
anyio_backend = pytest.fixture(only_asyncio)

PATTERN = "[abc][xyz]?|(?:no|yes|maybe)(?:, (?:no|yes))?"
PROMPTS = [f"Question {number}: which?" for number in range(8)]


def logprob(model: transformers.PreTrainedModel, prompt: list[int], ids: list[int]) -> float:
    """The reference: of these ids after the prompt."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0].double()
    steps = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return float(steps[torch.arange(len(ids)), torch.tensor(ids)].sum())


async def test_a_scored_gen_is_the_likeliest_text(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", initializer_range=0.5)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_folder(folder)
    [turn_end] = tokenizer.encode_markup("<|im_end|>", continues=True)
    scored, written = af.gen("scored", regex=PATTERN, scored=True), af.gen("written", regex=PATTERN)
    num_distorted = 0
    backend = af.Embedded(str(folder), dtype="float32", device="cpu", kv_tokens=2000)
    async with af.session(backend=backend) as flow:
        for prompt in PROMPTS:
            async with flow.state() as s:
                s += af.user(prompt)
                greedy = s.copy()
                async with s.assistant():
                    before = await s.token_ids()
                    s += scored
                greedy += written
                chosen, by_token, scores = await s[scored], await greedy[written], s[scored].choices
            assert scores is not None
            expected = {}
            for text in scores:
                goes_on = any(other != text and other.startswith(text) for other in scores)
                ids = tokenizer.encode(text, continues=True) + ([turn_end] if goes_on else [])
                expected[text] = logprob(model, before, ids)
            assert expected == pytest.approx(scores, abs=1e-3)
            assert chosen == max(expected, key=expected.__getitem__)
            num_distorted += expected[by_token] < expected[chosen] - 0.1
    assert num_distorted
