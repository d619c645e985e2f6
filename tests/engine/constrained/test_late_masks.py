"""Token masks are computed while a batch runs: once for each token that is sampled, and a failure ends one
request."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest
from engine.constrained.test_constrained_engine import PATTERNS, Asked, ask
from support.plain_model import plain_model_engine

from agentflow.engine.batch import Batch
from agentflow.engine.client import EngineClient
from agentflow.engine.constrained.constrained_request import ConstrainedRequest
from agentflow.engine.constrained.jump_forward import ConstrainedText
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.grammar import TokenWords
from agentflow.engine.grammar.regex import parse_regex
from agentflow.engine.runner import OutOfMemory
from agentflow.errors import AgentflowError, EngineFailed, RequestRefused
from agentflow.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
AHEAD = pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in turn"])
NINE = "[0-9]{9}"
BAD_PROMPT = 11
"""The first token of requests whose mask cannot be computed."""


@pytest.mark.parametrize(  # each two of them together
    ("ahead", "num_tokens", "logprobs", "raised", "reported"),
    [
        (True, 0, True, RuntimeError("a fault"), EngineFailed),
        (True, 3, False, RequestRefused("no"), RequestRefused),
        (False, 0, False, RequestRefused("no"), RequestRefused),
        (False, 3, True, RuntimeError("a fault"), EngineFailed),
        (True, 0, False, RuntimeError("a fault"), EngineFailed),
        (False, 3, True, RequestRefused("no"), RequestRefused),
    ],
)
async def test_a_mask_that_cannot_be_computed_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
    num_tokens: int,
    logprobs: bool,
    raised: Exception,
    reported: type[AgentflowError],
) -> None:
    """At its first token, and later. The other requests of its batches have their texts."""
    really = ConstrainedRequest._mask

    def mask(self: ConstrainedRequest, text: ConstrainedText) -> TokenWords:
        if self._request.tokens[0] == BAD_PROMPT and self._request.num_generated == num_tokens:
            raise raised
        return really(self, text)

    monkeypatch.setattr(ConstrainedRequest, "_mask", mask)
    failures: list[AgentflowError] = []

    async def ask_bad(client: EngineClient) -> None:
        with pytest.raises(reported) as caught:
            await client.generate(
                [BAD_PROMPT, 7],
                SamplingParams(max_tokens=20, logprobs=logprobs),
                seed=0,
                constraint=CompiledConstraint(NINE, "dfa", build_dfa(parse_regex(NINE)).to_bytes()),
                jump_forward=False,
            )
        failures.append(caught.value)

    async with plain_model_engine(launches_ahead=ahead) as client:
        async with anyio.create_task_group() as group:
            for number, pattern in enumerate(PATTERNS):
                group.start_soon(ask, client, Asked((7, 8, number), pattern, 60, number % 2 > 0, logprobs))
            group.start_soon(ask_bad, client)
        assert len(failures) == 1
        await ask(client, Asked((7, 8), PATTERNS[0], 60, jumps=True, logprobs=logprobs))


@AHEAD
async def test_a_mask_is_computed_once_for_each_token(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Also for a batch that ran out of memory and runs again in halves. None is computed behind the last
    token."""
    really = ConstrainedRequest._mask
    computed: Counter[tuple[int, int]] = Counter()

    def mask(self: ConstrainedRequest, text: ConstrainedText) -> TokenWords:
        computed[self._request.id, self._request.num_generated] += 1
        return really(self, text)

    monkeypatch.setattr(ConstrainedRequest, "_mask", mask)
    num_steps = num_failures = num_tokens = 0

    def run_short(batch: Batch) -> None:
        nonlocal num_steps, num_failures
        num_steps += 1
        if num_steps % 3 == 0 and len(batch.query_lens) > 1:
            num_failures += 1
            raise OutOfMemory

    async def generate(client: EngineClient, number: int) -> None:
        nonlocal num_tokens
        end = await client.generate(
            [5, number],
            SamplingParams(max_tokens=6 + number),
            seed=0,
            constraint=CompiledConstraint(NINE, "dfa", build_dfa(parse_regex(NINE)).to_bytes()),
            jump_forward=False,
        )
        num_tokens += len(end.token_ids)

    engine = plain_model_engine(launches_ahead=ahead, on_step=run_short)
    async with engine as client, anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(generate, client, number)
    assert num_failures
    assert set(computed.values()) == {1}
    assert computed.total() == num_tokens
