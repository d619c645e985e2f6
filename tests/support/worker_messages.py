"""Fewer messages from the workers of pytest-xdist. It sends six for each test, in the format of execnet,
which is written in Python: they are more work than to run a short test."""

from __future__ import annotations

import marshal
from typing import Any

import pytest

INPUT = "sends_events_together"
"""The key in a worker's input by which it knows that the controller expects such messages."""
LEAST_S = 0.005
"""Durations below it are not printed, and so not sent."""
HELD = ("testreport", "logfinish")
"""Events that wait for the end of their test."""


class WorkerMessages:
    """Sends the events of a test in one message. ``interactor`` is xdist's ``WorkerInteractor``."""

    def __init__(self, interactor: Any) -> None:
        self.send = interactor.sendevent
        self.keeps_all = interactor.config.option.verbose > 0 or interactor.config.option.xmlpath
        self.held: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, **event: Any) -> None:
        is_needed = not _says_nothing(event["data"]) if name == "testreport" else name != "logstart"
        if not (is_needed or self.keeps_all):
            return
        self.held.append((name, event))
        if name not in HELD:
            held, self.held = self.held, []
            self.send("together", events=marshal.dumps(held))


def _says_nothing(report: dict[str, Any]) -> bool:
    return (
        report["when"] != "call"
        and report["outcome"] == "passed"
        and report["duration"] < LEAST_S
        and not report["sections"]
    )


def expect_together(node: Any) -> None:
    """The controller's side: takes the messages of ``node``, a ``WorkerController``, apart."""
    process = node.process_from_remote

    def process_each(message: Any) -> None:
        if isinstance(message, tuple) and message[0] == "together":
            for event in marshal.loads(message[1]["events"]):
                process(event)
        else:
            process(message)

    node.workerinput[INPUT] = True
    node.process_from_remote = process_each


def send_together(config: pytest.Config) -> None:
    """The worker's side."""
    if getattr(config, "workerinput", {}).get(INPUT):
        for plugin in config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "WorkerInteractor":
                plugin.sendevent = WorkerMessages(plugin)
