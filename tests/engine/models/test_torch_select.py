"""Selects on a small random Llama: against a plain scoring of each choice and against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.engine.device import DEVICE
from support.engine.family_models import saved_model
from support.engine.requests import request_of as new_request

from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.request import Request
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.protocol.sampling import SamplingParams

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-4

choices_to_score = st.lists(
    st.lists(st.integers(10, 12), min_size=1, max_size=5)
    | st.lists(st.integers(10, 319), min_size=1, max_size=4),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module", params=["llama", "mistral_window"])
def reference(folder: Path, request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    return saved_model(request.param, folder)


@pytest.fixture(scope="module")
def runner(folder: Path, reference: transformers.PreTrainedModel) -> Iterator[TorchRunner]:
    made = TorchRunner(folder, num_slots=600, device=DEVICE, dtype="float32")
    yield made
    made.close()


def request_of(number: int, tokens: list[int], count: int = 0, **kwargs) -> Request:
    return new_request(number, np.array(tokens, dtype=np.int32), count, SamplingParams(), **kwargs)


def select_of(number: int, prompt: list[int], choices: list[list[int]]) -> Request:
    return request_of(number, prompt, choices=choices)


def scores(request: Request) -> list[float]:
    assert request.tree is not None
    return [value for values in request.tree.by_choice(request.target_logprobs) for value in values]


def run(
    runner: TorchRunner, requests: list[Request], *, token_budget: int = 64, num_slots: int = 600
) -> Scheduler:
    """A scheduler with all requests in one step, on an empty cache."""
    config = SchedulerConfig(token_budget=token_budget, max_running=16)
    scheduler = Scheduler(num_slots=num_slots, max_context=256, config=config)
    for request in requests:
        scheduler.add(request)
    while (batch := scheduler.schedule()) is not None:
        for result in scheduler.complete(run_batch(runner, batch)):
            request = result.request
            request.logprobs += result.logprobs
            ended = request.num_generated >= request.max_new_tokens and request.num_to_compute <= 1
            if ended and (request.max_new_tokens or request.num_to_compute == 0):
                scheduler.release(request)
    scheduler.check_idle()
    return scheduler


def plain_scores(runner: TorchRunner, prompt: list[int], choices: list[list[int]]) -> list[float]:
    """The reference: one scoring request for each choice."""
    scored = [
        request_of(number, prompt + choice, score_from=len(prompt)) for number, choice in enumerate(choices)
    ]
    run(runner, scored)
    return [value for request in scored for value in request.logprobs]


@given(
    choices=choices_to_score,
    more_choices=choices_to_score,
    prompt=st.lists(st.integers(10, 319), min_size=2, max_size=70),
    token_budget=st.sampled_from([5, 16, 64]),
    shared=st.integers(0, 70),
)
def test_scores_are_those_of_plain_scorings_in_any_company(
    runner, choices, more_choices, prompt, token_budget, shared
):
    """Two selects that share some of their prompts, next to a generation and a prefill."""
    select = select_of(1, prompt, choices)
    other_prompt = [*prompt[:shared], 13]
    other = select_of(2, other_prompt, more_choices)
    others = [request_of(3, [*prompt[: shared // 2], 14], 12), request_of(4, [15] * 30)]
    run(runner, [select, other, *others], token_budget=token_budget)
    torch.testing.assert_close(scores(select), plain_scores(runner, prompt, choices), rtol=0, atol=TOLERANCE)
    expected = plain_scores(runner, other_prompt, more_choices)
    torch.testing.assert_close(scores(other), expected, rtol=0, atol=TOLERANCE)


@settings(max_examples=10)
@given(choices=choices_to_score, prompt=st.lists(st.integers(10, 319), min_size=1, max_size=40))
def test_scores_are_those_of_transformers(runner, reference, choices, prompt):
    select = select_of(1, prompt, choices)
    run(runner, [select])
    expected = []
    for choice in choices:
        with torch.inference_mode():
            logprobs = reference(torch.tensor([prompt + choice])).logits[0].log_softmax(-1)
        expected += [float(logprobs[len(prompt) + n - 1, token]) for n, token in enumerate(choice)]
    torch.testing.assert_close(scores(select), expected, rtol=0, atol=TOLERANCE)


def test_a_thousand_choices(runner):
    """More rows than a step has, and more logits than are kept in memory."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(10, 320, 60).tolist()
    choices = [[10 + n // 40, 10 + n % 40, 11][: 2 + n % 2] for n in range(1000)]
    select = select_of(1, prompt, choices)
    scheduler = Scheduler(num_slots=600, max_context=256, config=SchedulerConfig(token_budget=512))
    scheduler.add(select)
    steps = 0
    while (batch := scheduler.schedule()) is not None:
        steps += 1
        scheduler.complete(run_batch(runner, batch))
        if not select.num_to_compute:
            scheduler.release(select)
    num_rows = len(prompt) + 25 + 500
    assert (select.num_nodes, steps) == (525, -(-num_rows // 512))
    some = list(range(0, 1000, 37))
    by_choice = select.tree.by_choice(select.target_logprobs)
    found = [value for n in some for value in by_choice[n]]
    expected = plain_scores(runner, prompt, [choices[n] for n in some])
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_long_choices(runner):
    """Paths longer than a step has rows: earlier steps computed most of the keys that a row sees."""
    rng = np.random.default_rng(1)
    prompt, long = rng.integers(10, 320, 40).tolist(), rng.integers(10, 320, 150).tolist()
    choices = [long, [*long[:100], *rng.integers(10, 320, 50).tolist()], long[:30], [13]]
    select = select_of(1, prompt, choices)
    run(runner, [select, request_of(2, [14] * 20, 30)], token_budget=32)
    torch.testing.assert_close(scores(select), plain_scores(runner, prompt, choices), rtol=0, atol=TOLERANCE)


def test_a_certain_token_has_a_log_probability_of_zero(folder, reference, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1000
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    sure = TorchRunner(tmp_path, num_slots=100, device=DEVICE, dtype="float32")
    prompt = [20, 30, 40]
    with torch.inference_mode():
        likeliest = [int(reference(torch.tensor([prompt])).logits[0, -1].argmax())]
        likeliest.append(int(reference(torch.tensor([prompt + likeliest])).logits[0, -1].argmax()))
    select = select_of(1, prompt, [likeliest, [likeliest[0] - 1]])
    run(sure, [select], num_slots=100)
    [certain, [unlikely]] = select.tree.by_choice(select.target_logprobs)
    assert certain == [0.0, 0.0]
    assert unlikely < -100
