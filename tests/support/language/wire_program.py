"""A program as bare ops, with an op of each kind, and the check of all that comes of it."""

from __future__ import annotations

import anyio
import anyio.lowlevel
from support.session_peer import HANG, Listener, count_words, gen

from agentflow.protocol import ops
from agentflow.protocol.backend import Connection
from agentflow.protocol.events import StateFailed, Value, VarFailed
from agentflow.protocol.text.transform import Transform

MADE = '["tyoNv2OPVT8=", "pBwpvR7If78="]'
"""The embeddings of the script, in two dimensions."""


def program(first: int = 1, num_words: int = 30) -> list[ops.Op]:
    """States, variables and tickets from ``first`` on: gens, wired values, a select, a fork, failures,
    a cancellation and closes."""
    root, left, right, broken, idle = range(first, first + 5)
    answer, wired, choice, failed, hung, note, seen, mine, made = range(first + 5, first + 14)
    return [
        ops.Open(root),
        ops.Begin(root, "user"),
        ops.Text(root, (f"count #{num_words}",)),
        gen(root, answer),
        ops.End(root),
        ops.Fork(root, (left, right, idle)),
        ops.Text(left, ("after ", ops.Ref(answer), f" #{num_words}")),
        gen(left, wired),
        ops.Text(right, (" yes",)),
        ops.Select(right, choice, "choice", ("yes", "no")),
        ops.Await(right, 1),
        ops.Close(right),
        ops.Open(broken),
        ops.End(broken),
        gen(broken, failed),
        ops.Text(idle, (HANG,)),
        gen(idle, hung),
        ops.GetStats(first),
        ops.Await(root, 2),
        ops.Expect(left, mine, "mine"),
        ops.Hint(left, "latency", 3, 2),
        ops.Limit(left, 3600.0, 1_000_000),
        ops.Set(left, note, "note", ("so ", ops.Ref(mine, (Transform("upper"),)), ops.Ref(choice))),
        ops.Begin(left, "tool"),
        ops.Image(left, "https://example.com/a.png"),
        ops.Text(left, (ops.Ref(note, (Transform("regex", "[A-Z]+"),)),)),
        ops.Read(left, seen, "seen", "text"),
        ops.Embed(left, made, "made", ("one two", "three"), dimensions=2),
        ops.Await(left, 1),
        ops.Close(left),
    ]


async def check_program(
    connection: Connection, listener: Listener, first: int = 1, num_words: int = 30
) -> None:
    """Submits the program in pieces, and checks everything that comes of it."""
    root, left, right, broken, idle = range(first, first + 5)
    answer, wired, choice, failed, hung, note, seen, mine, made = range(first + 5, first + 14)
    recorded = program(first, num_words)
    connection.send(recorded[:4])
    await anyio.lowlevel.checkpoint()
    connection.send(recorded[4:])
    await listener.wait_for(lambda received: hung in received.texts)
    connection.send([ops.Cancel(idle), ops.Provide(mine, "gi", more=True)])
    await anyio.lowlevel.checkpoint()
    connection.send([ops.Provide(mine, "ve", more=True), ops.Provide(mine, "n")])
    await listener.wait_for(
        lambda received: (
            {answer, wired, choice, failed, hung, note, seen, mine, made} <= received.ends.keys()
            and {root, left, right} <= received.reached.keys()
            and {broken, idle} <= received.failed.keys()
            and first in received.stats
        )
    )
    turn = f"<user>count #{num_words}"
    expected = count_words(turn)
    assert listener.texts[answer] == expected
    prompt = f"{turn}{expected}</user>after {expected} #{num_words}"
    assert listener.texts[wired] == count_words(prompt)
    assert (listener.texts[mine], listener.texts[note]) == ("given", "so GIVENyes")
    assert listener.texts[seen] == f"{prompt}{listener.texts[wired]}<tool><image>GIVEN"
    assert listener.texts[made] == MADE
    end = listener.ends[choice]
    assert isinstance(end, Value)
    assert (listener.texts[choice], end.choices) == ("yes", {"yes": 0.0, "no": -10.0})
    for var, code in ((failed, "run_failed"), (hung, "cancelled")):
        error = listener.ends[var]
        assert isinstance(error, VarFailed)
        assert error.error.code == code
    assert isinstance(listener.failed[broken], StateFailed)
    assert listener.failed[broken].error.code == "bad_argument"
    connection.send([ops.Close(root), ops.Close(broken), ops.Close(idle)])
