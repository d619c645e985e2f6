"""Failures that the server causes are explained in its log; its clients get a number."""

from __future__ import annotations

import logging
from itertools import count

import pytest
from support.asgi_peer import bench, check_still_served, connected
from support.session_peer import HangingGenerator

from agentflow.errors import BadArgument, EngineFailed, error_param, incident
from agentflow.protocol import ops

pytestmark = pytest.mark.anyio


def test_the_log_has_the_number_and_the_fault(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ZeroDivisionError("internals")
    except ZeroDivisionError as fault:
        errors = [incident(logging.getLogger("test"), "it", fault) for _ in range(2)]
    numbers = [str(error).split()[-1] for error in errors]
    assert len(set(numbers)) == 2
    for error, number, record in zip(errors, numbers, caplog.records, strict=True):
        assert isinstance(error, EngineFailed)
        assert "internals" not in str(error)
        assert number in record.getMessage()
        assert record.exc_info is not None
        assert str(record.exc_info[1]) == "internals"


async def test_a_client_does_not_receive_the_cause_of_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("internals")

    monkeypatch.setattr(HangingGenerator, "fill", fail)
    async with bench() as server, connected(server) as [peer]:
        await peer.greet()
        peer.put_ops(1, ops.Open(1), ops.Text(1, ("a",)), ops.Await(1, 1))
        events = await peer.events(lambda events: any("engine_failed" in repr(event) for event in events))
        assert "internals" not in repr(events)
        monkeypatch.undo()
        peer.put_ops(4, ops.Close(1))
        await check_still_served(peer, count(2), first_op=5)
        peer.bye()
        await server.is_idle()


def test_errors_name_the_argument_that_they_are_of() -> None:
    for given, named in ((None, "whole"), ("part", "part")):
        with pytest.raises(BadArgument) as caught, error_param("whole"):
            raise BadArgument("wrong", param=given)
        assert caught.value.param == named
