"""Input of malicious or faulty clients: sessions of random ops, and frames of
these that were bent, cut, mixed up and blown up.

A ``Conversation`` is one connection's input. Everything follows from the random generator, so that a seed
is all that is needed to see a failure again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, TypeAlias

import msgspec
from support.server.fuzzed_ops import FRAME_BYTES, NAMES, OpsWriter

from agentflow.protocol import ops
from agentflow.protocol.wire import VERSION, ClientFrame, Hello, Ops, Resume, encode

# Numbers at the edges of integer types.
NUMBERS = [0, -1, 1, 2, 255, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, -0.0, 1e300]
JSON_NUMBERS = [*NUMBERS, 2**64, 2**200, -(2**64)]
MSGPACK_NUMBERS = [*NUMBERS, math.inf, -math.inf, math.nan]

Ending: TypeAlias = Literal["bye", "hang up", "come back", "take over"]
ENDINGS: tuple[Ending, ...] = ("bye", "hang up", "come back", "take over")


@dataclass
class Conversation:
    """``messages``: the first is a hello, more often than not. ``pauses``: before each of them, the turns of
    the event loop that the client leaves to others. ``is_deaf``: it reads nothing after the welcome.
    ``is_sane``: each frame is one that a client could mean."""

    binary: bool
    messages: list[bytes | str]
    pauses: list[int]
    ending: Ending
    is_deaf: bool
    is_sane: bool


def conversation(random: Random, *, has_logprobs: bool) -> Conversation:
    """One connection's worth of frames. ``has_logprobs``: to ask for them, and for token ids, makes sense."""
    binary = random.random() < 0.6
    writer = OpsWriter(random, has_logprobs=has_logprobs)
    frames = [_hello(random), *writer.frames()]
    fault = random.choice(["none", "order", "bent", "bent"])
    if fault == "order":
        _mix_up(random, frames)
    messages: list[bytes | str] = []
    for place, frame in enumerate(frames):
        data = encode(frame, binary=binary)
        # The first one that cannot be read is the last one that is: rather a later one.
        if fault == "bent" and random.random() < (0.03 if place == 0 else 0.2):
            messages.append(_bent(random, data, binary))
        else:
            messages.append(data if binary else data.decode())
    return Conversation(
        binary,
        messages,
        pauses=[random.choice([0, 0, 0, 1, 5, 20]) for _ in messages],
        ending=random.choice(ENDINGS),
        is_deaf=random.random() < 0.1,
        is_sane=fault == "none" and writer.wrongness == 0,
    )


def _hello(random: Random) -> ClientFrame:
    match random.randrange(30):
        case 0:
            return Hello(random.choice([0, -1, 2, 2**31]))
        case 1:
            return Hello(VERSION, Resume("nobody", "secret", {1: 2**31}, {-1: 2}))
        case 2:
            return Hello(VERSION, model=random.choice(NAMES))
        case _:
            return Hello(VERSION)


# Frames that were right.


def _mix_up(random: Random, frames: list[ClientFrame]) -> None:
    """Lost, repeated and swapped frames; a second hello; ops that are numbered wrongly."""
    place = random.randrange(len(frames))
    match random.randrange(5):
        case 0:
            del frames[place]
        case 1:
            frames.insert(place, frames[place])
        case 2:
            random.shuffle(frames)
        case 3:
            frames.insert(place, Hello(VERSION))
        case _:
            frame = frames[place]
            if isinstance(frame, Ops):
                frames[place] = Ops(frame.first + random.choice([-1, 1, -frame.first, 2**40]), frame.ops)


def _bent(random: Random, data: bytes, binary: bool) -> bytes | str:
    """A message that was a frame. In a session of text it is text, as the websocket makes sure."""
    bends = (_flip, _cut, _splice, _replace_something, _replace_something, _blow_up)
    bent = random.choice(bends)(random, data, binary)
    if random.random() < 0.02:
        binary = not binary
    return bent if binary else bent.decode(errors="replace")


def _flip(random: Random, data: bytes, binary: bool) -> bytes:
    flipped = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 8])):
        flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
    return bytes(flipped)


def _cut(random: Random, data: bytes, binary: bool) -> bytes:
    return data[: random.randrange(len(data))]


def _splice(random: Random, data: bytes, binary: bool) -> bytes:
    start, end = sorted(random.choices(range(len(data)), k=2))
    other = random.choice([b"", random.randbytes(9), data[start:end] * 3, data])
    return data[:start] + other + data[end:]


def _blow_up(random: Random, data: bytes, binary: bool) -> bytes:
    """Much larger, or much deeper, than a frame should be."""
    depth = random.choice([50, 500, 900, 5_000])
    deep_list = b"\x91" * depth + b"\x01" if binary else b"[" * depth + b"]" * depth
    error: Any = {"code": "run_failed", "message": "m"}
    for _ in range(random.choice([10, 100, 300, 900])):
        error = {"code": "run_failed", "message": "m", "cause": error}
    provided = {
        "frame": "ops",
        "first": 1,
        "ops": [
            {"op": "open", "state": 1},
            {"op": "expect", "state": 1, "var": 1, "name": "e"},
            {"op": "provide", "var": 1, "error": error},
        ],
    }
    giant = Ops(1, (ops.Open(1), ops.Text(1, ("x" * (FRAME_BYTES + random.randrange(-120, 20)),))))
    many = Ops(1, (ops.Open(1), *(ops.Text(1, ("",)) for _ in range(random.choice([100, 700])))))
    return random.choice(
        [deep_list, _write(provided, binary), encode(giant, binary=binary), encode(many, binary=binary)]
    )


def _replace_something(random: Random, data: bytes, binary: bool) -> bytes:
    """One value, somewhere, is another one; or is called something else; or is gone."""
    frame = msgspec.msgpack.decode(data) if binary else msgspec.json.decode(data)
    for _ in range(random.choice([1, 1, 3])):
        holder, key = _somewhere(random, frame)
        numbers = MSGPACK_NUMBERS if binary else JSON_NUMBERS
        other = [
            None,
            True,
            "",
            "1",
            "é" * 2000,
            [],
            {},
            [[]],
            {"op": "text"},
            random.choice(numbers),
            random.choice(numbers),
        ]
        if isinstance(holder[key], int | float):
            other = numbers
        match random.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[random.choice(["frame", "op", "state", "var", "odd"])] = holder.pop(key)
            case 2 if isinstance(holder, list):
                holder.extend([holder[key]] * random.choice([1, 30]))
            case _:
                holder[key] = random.choice(other)
    return _write(frame, binary)


def _somewhere(random: Random, frame: Any) -> tuple[Any, Any]:
    """A list or dict in the frame, and an index or key of it."""
    found: list[tuple[Any, Any]] = []
    holders = [frame]
    while holders:
        holder = holders.pop()
        places = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in places:
            found.append((holder, key))
            if isinstance(value, list | dict):
                holders.append(value)
    return random.choice(found) if found else ({0: 0}, 0)


def _write(frame: Any, binary: bool) -> bytes:
    try:
        return msgspec.msgpack.encode(frame) if binary else msgspec.json.encode(frame)
    except OverflowError:  # no encoder accepts this number
        return b""
