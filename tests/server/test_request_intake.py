"""What reaches the scheduler of what a client says about its request."""

from __future__ import annotations

import msgspec
import pytest

from agentflow.errors import BadArgument
from agentflow.sampling import SamplingParams
from agentflow.server.engine_messages import Origin, Submit
from agentflow.server.fake_runner import FakeRunner
from agentflow.server.request_intake import request_of


def submitted(origin: Origin) -> Submit:
    """As it comes out of the engine's end of the pipe."""
    message = Submit(1, [5, 6, 7], SamplingParams(max_tokens=4), origin=origin)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Submit)


def test_a_request_keeps_its_tenant_with_its_share_and_its_priority() -> None:
    info = FakeRunner().info
    request = request_of(submitted(Origin("ann", "salt", share=2.5, priority=-3)), info, 100)
    assert (request.tenant, request.share, request.priority) == ("ann", 2.5, -3)
    request = request_of(submitted(Origin()), info, 100)
    assert (request.tenant, request.share, request.priority) == ("", 1.0, 0)


@pytest.mark.parametrize("origin", [Origin(share=0.0), Origin(share=1e9), Origin(priority=11)])
def test_what_would_upset_the_scheduler_is_refused(origin: Origin) -> None:
    with pytest.raises(BadArgument, match="must be"):
        request_of(submitted(origin), FakeRunner().info, 100)
