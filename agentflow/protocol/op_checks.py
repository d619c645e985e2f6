"""What an op must hold, whichever backend takes it, and what a backend must be able to do for it.

The one list of these checks. The frontend makes them before it sends an op, so that an argument that makes no
sense is refused in the line that has it; the interpreter makes them when the op's turn comes, and then the op
fails its state. What needs a session's other states and variables is the interpreter's own.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from agentflow.errors import BadArgument, NotSupported
from agentflow.protocol import ops
from agentflow.protocol.transform import check_transforms, check_written
from agentflow.runtime.generator import Capabilities

_encoder = msgspec.msgpack.Encoder()


def check_sendable(op: ops.Op, capabilities: Capabilities) -> None:
    """Before anything of ``op`` is sent: its types, all values in it, and what it asks of the backend, for a
    graph of each of its ops. ``BadArgument``, ``NotSupported``."""
    check_types(op)
    for one in op.ops if isinstance(op, ops.Submit) else (op,):
        check_values(one)
        if isinstance(one, ops.Text | ops.Set):
            for part in one.parts:
                if isinstance(part, ops.Ref):
                    check_transforms(part.transforms)
        check_supported(one, capabilities)


def check_types(value: msgspec.Struct) -> None:
    """``BadArgument`` where a field of ``value``, or of what is in it, is not what its class says, or where a
    text is not Unicode: what could not go over the wire."""
    name = type(value).__name__.lower()
    try:
        _decoder_of(type(value)).decode(_encoder.encode(value))
    except UnicodeEncodeError as error:
        raise BadArgument(f"{name}: half a character (a lone surrogate) is no text: {error}") from None
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadArgument(f"{name}: {error}") from None


@functools.cache
def _decoder_of(kind: type) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def check_values(op: ops.Op) -> None:
    """``BadArgument`` where a value in the op makes no sense. Compiles no pattern of a transform."""
    match op:
        case ops.Open():
            for name, text in (("cache_salt", op.cache_salt), ("program", op.program)):
                if len(text) > ops.MAX_SALT_CHARS:
                    raise BadArgument(f"{name}: {ops.MAX_SALT_CHARS} characters at most, not {len(text):,}")
        case ops.Text() | ops.Set():
            for part in op.parts:
                if isinstance(part, ops.Ref):
                    check_written(part.transforms)
        case ops.Converse():
            op.conversation.check()
        case ops.Gen():
            op.params.check()
            if op.constraint is not None:
                op.constraint.check()
            ops.check_timeout(op.timeout_s)
        case ops.Select():
            ops.check_choices(op.name, op.choices)
        case ops.Hint():
            ops.check_hint(op.output_tokens, op.forks, op.deadline_s)
        case ops.Limit():
            ops.check_limit(op.deadline_s, op.output_tokens)
        case _:
            pass


def check_supported(op: ops.Op, capabilities: Capabilities) -> None:
    """``NotSupported`` where a backend of these capabilities cannot do what the op asks."""
    match op:
        case ops.Begin() | ops.End() if not capabilities.roles:
            raise NotSupported(f"{capabilities.model} has no chat template: use plain text instead of roles")
        case ops.Converse() | ops.Gen(reply=True) if not capabilities.conversations:
            raise NotSupported(
                f"{capabilities.model} takes no whole conversations: append its turns one by one"
            )
        case ops.Gen():
            if op.params.wants_logprobs and not capabilities.logprobs:
                raise NotSupported(f"{capabilities.model} has no log-probabilities: ask an engine for them")
            capabilities.require(op.constraint)
        case ops.Select() if not capabilities.select:
            raise NotSupported(f"{capabilities.model} cannot select: it scores no choices")
        case ops.Image():
            capabilities.require_images()
        case ops.Read(what="token_ids") if not capabilities.token_ids:
            raise NotSupported(f"{capabilities.model} does not tell its token ids")
        case _:
            pass
