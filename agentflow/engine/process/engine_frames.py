"""What goes over the socket between a server and its engine process, and how messages lie on it.

First ``Start`` and the answer to it, then the messages of ``engine_messages``: one a frame to the
engine, one list a frame from it (frames: ``message_frames.py``).
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from agentflow.engine.process.ipc import FromEngine, ToEngine
from agentflow.engine.runner import ModelRunner, RunnerInfo
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.tokenizer import Tokenizer


class LoadEngine(Protocol):
    """What ``Start.loader`` names: makes all that an engine needs, in the engine's process."""

    def __call__(self, **options: Any) -> tuple[ModelRunner, Tokenizer, SchedulerConfig]: ...


class Start(msgspec.Struct, frozen=True):
    """What an engine process is to run: ``loader`` is the name of a ``LoadEngine``, as in
    ``package.module:function``, and ``options`` its arguments (plain values only)."""

    loader: str
    options: dict[str, Any]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready for messages. ``tokenizer``: the fingerprint of its tokenizer."""

    info: RunnerInfo
    tokenizer: str


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """It will never be, and ends: an error of the tree in ``errors.py``, or the name of a package that
    is not installed."""

    code: str
    message: str
    missing_package: str | None = None


start_decoder = msgspec.msgpack.Decoder(Start)
answer_decoder: msgspec.msgpack.Decoder[Loaded | LoadFailed] = msgspec.msgpack.Decoder(Loaded | LoadFailed)
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[list[FromEngine]] = msgspec.msgpack.Decoder(list[FromEngine])
