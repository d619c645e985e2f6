"""Loads the engine of a model that is divided over the nodes of a Ray cluster, in the process of rank 0.

The other ranks are processes on other nodes, each in an actor (``host``) that waits for this one to connect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentflow.cluster.ray.host import connect_actor
from agentflow.engine.local_engine import limit_spinning, load_with
from agentflow.engine.models.tensor_parallel.rank_group import RankGroup
from agentflow.engine.options import EngineOptions
from agentflow.engine.runner import ModelRunner
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import EngineFailed

LOADER = f"{__name__}:load_divided_engine"


class Peer(NamedTuple):
    """Where a rank listens. ``head``: the first bytes of a connection."""

    address: str
    port: int
    head: bytes


def load_divided_engine(
    engine: Mapping[str, Any], host: str, peers: Sequence[Sequence[Any]]
) -> tuple[ModelRunner, Tokenizer, SchedulerConfig]:
    """Loads an engine, as ``local_engine.load_engine`` does on one machine.

    Args:
        engine: The fields of ``EngineOptions``.
        host: The address of this node for the others.
        peers: The other ranks, from rank 1 on, as ``Peer``.

    Raises:
        EngineFailed: A rank does not answer.
    """
    limit_spinning()
    with contextlib.ExitStack() as opened:
        try:
            connections = [
                opened.enter_context(connect_actor((address, port), head)) for address, port, head in peers
            ]
        except OSError as error:
            raise EngineFailed(f"cannot reach another rank of the model: {error}") from error
        for connection in connections:
            connection.settimeout(None)
        group = RankGroup(len(peers) + 1, connections, host)
        opened.pop_all()
    return load_with(EngineOptions(**engine), group)
