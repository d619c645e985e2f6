"""An engine that runs in the test's own thread, without a client."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import msgspec
from support.fake_engine import TOKENIZER

from agentflow.engine.engine import Engine
from agentflow.engine.messages import Failed, Finished, FromEngine, Progress, Stop, ToEngine
from agentflow.engine.request import Submit
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner


class SteppedEngine:
    """Runs until ``num_deliveries`` lists of messages are delivered or (None) a request has ended."""

    def __init__(self, runner: FakeRunner, num_deliveries: int | None) -> None:
        self.engine = Engine(runner, TOKENIZER, SchedulerConfig(), self._deliver)
        self.delivered: list[list[FromEngine]] = []
        self._num_deliveries = num_deliveries

    def _deliver(self, messages: list[FromEngine]) -> None:
        self.delivered.append(messages)
        has_ended = self._num_deliveries is None and isinstance(messages[-1], Finished | Failed)
        if has_ended or len(self.delivered) == self._num_deliveries:
            self.engine.send(Stop())

    def run(self, *messages: ToEngine) -> list[list[FromEngine]]:
        for message in messages:
            self.engine.send(message)
        self.engine.run()
        return self.delivered


def assert_resumable(make_runner: Callable[[], FakeRunner], submit: Submit, at: int) -> None:
    """Resubmitted with the output of its first ``at`` steps, a request gives the same rest and end."""
    whole = [*chain(*SteppedEngine(make_runner(), None).run(submit))]
    steps = [message for message in whole if isinstance(message, Progress)]
    before, after = steps[:at], steps[at:]
    resumed = msgspec.structs.replace(
        submit,
        generated_ids=[i for step in before for i in step.token_ids],
        generated_logprobs=[value for step in before for value in step.logprobs],
        generated_top_logprobs=[top for step in before for top in step.top_logprobs],
    )
    again = [*chain(*SteppedEngine(make_runner(), None).run(resumed))]
    assert [message for message in again if isinstance(message, Progress)] == after
    assert again[-1] == whole[-1]
    assert isinstance(whole[-1], Finished)
