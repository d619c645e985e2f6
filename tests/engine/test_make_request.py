"""The request that the scheduler gets from a client's message, and the checks before it is sent."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from support.faults import has_param

from agentflow.engine.request import Origin, Submit, check_request, make_request
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.errors import BadArgument, PromptTooLong
from agentflow.protocol.sampling import SamplingParams


def submitted(origin: Origin) -> Submit:
    """A request in the form in which the engine receives it from the pipe."""
    message = Submit(1, [5, 6, 7], SamplingParams(max_tokens=4), origin=origin)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Submit)


def test_a_request_keeps_its_tenant_with_its_share_and_its_priority() -> None:
    info = FakeRunner().info
    request = make_request(submitted(Origin("ann", "salt", weight=2.5, priority=-3)), info, 100)
    assert (request.tenant, request.origin.weight, request.origin.priority) == ("ann", 2.5, -3)
    request = make_request(submitted(Origin()), info, 100)
    assert (request.tenant, request.origin.weight, request.origin.priority) == ("", 1.0, 0)


@pytest.mark.parametrize(
    ("num_slots", "max_context", "num_prompt", "bias", "error"),
    [
        (100, 50, 49, (), None),
        (100, 50, 50, (), PromptTooLong),
        (50, 100, 49, (), None),
        (50, 100, 50, (), PromptTooLong),
        (100, 50, 1, ((15, 1.0),), None),
        (100, 50, 1, ((16, 1.0),), BadArgument),
    ],
)
def test_the_client_rejects_what_the_engine_would_reject(
    num_slots: int,
    max_context: int,
    num_prompt: int,
    bias: tuple[tuple[int, float], ...],
    error: type[Exception] | None,
) -> None:
    info = FakeRunner(vocab_size=16, num_slots=num_slots, max_context=max_context).info
    params = SamplingParams(max_tokens=4, logit_bias=bias)

    def in_engine() -> None:
        scheduler = Scheduler(num_slots=num_slots, max_context=max_context, config=SchedulerConfig())
        scheduler.add(make_request(Submit(1, [1] * num_prompt, params), info, scheduler.max_total_tokens))

    for check in (in_engine, lambda: check_request(num_prompt, params, info)):
        with pytest.raises(error) if error is not None else contextlib.nullcontext():
            check()


def test_a_token_that_only_the_tokenizer_knows_is_rejected() -> None:
    info = FakeRunner(vocab_size=16, num_slots=100, max_context=50).info
    make_request(Submit(1, [1, 15], SamplingParams(max_tokens=4)), info, 50)
    with pytest.raises(BadArgument, check=has_param("prompt")):
        make_request(Submit(1, [1, 16], SamplingParams(max_tokens=4)), info, 50)
