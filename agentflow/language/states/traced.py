"""Begins the spans of gens, selects and decides."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import msgspec

from agentflow.language.op_log import ToolCalls, Transcript, TurnBegins, TurnEnds
from agentflow.language.states.outliner import known_text
from agentflow.language.states.run import VariableNode
from agentflow.protocol import ops

GenOp = TypeVar("GenOp", ops.Gen, ops.Select, ops.Decide)


def traced(
    op: GenOp, node: VariableNode, *, num_entries: int, in_turn: bool, transcript: Transcript | None = None
) -> GenOp:
    """Begins the span of an op's variable, if the state has a span. Returns the op with it.

    Args:
        op: The gen, select or decide.
        node: Its variable.
        num_entries: The number of own entries of the transcript in its prompt.
        in_turn: Whether it is in a turn.
        transcript: The transcript of its prompt; by default the state's.
    """
    state = node.state
    if state.span is None:
        return op
    prompt = partial(list_turns, transcript or state.transcript, num_entries)
    node.span = state.span.gen(op, state.path, in_turn=in_turn, prompt=prompt)
    return msgspec.structs.replace(op, trace=node.span.traceparent)


def list_turns(transcript: Transcript, num_own: int) -> list[tuple[str, str]]:
    """The turns up to entry ``num_own`` of the transcript: role and text. The role of text outside turns is
    empty."""
    found: list[tuple[str, list[str]]] = []
    is_open = False
    for entry in transcript.all(num_own):
        match entry:
            case TurnBegins(role=role):
                found.append((role, []))
                is_open = True
            case TurnEnds():
                is_open = False
            case ToolCalls():
                pass
            case _:
                if not (found and (is_open or not found[-1][0])):
                    found.append(("", []))
                found[-1][1].append(known_text(entry))
    return [(role, "".join(texts)) for role, texts in found]
