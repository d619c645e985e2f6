"""Where in a rendering the text of tools and tool calls stands, which comes from outside like contents.

It stands inside the template's markup, where special tokens count. So the conversation is rendered again
with a nonce before and behind each such string: what stands between two nonces came from outside, and a
special token that is even partly written by it is content.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from agentflow.engine.text.chat_values import Mark
from agentflow.errors import NotSupported

Place: TypeAlias = "tuple[int, int]"
"""From the first character to behind the last one."""

Places: TypeAlias = Callable[[str], "Sequence[Place]"]
"""Where a text writes tokens that no content may have, such as ``Tokenizer.closed_places``."""


def outside_places(render: Callable[[Mark], str], text: str, closed_places: Places) -> tuple[Place, ...]:
    """The places in ``text``, in order. ``render`` gives ``text`` under the mark that changes nothing.

    Some templates look at the strings (at the type of a parameter, at the length of an id) and write
    something else for marked ones: then only those parts are marked that a special token is written in.
    Raises ``NotSupported`` where the template does not show these as they are.
    """
    for around in (_all_of, closed_places):
        nonce = new_nonce()
        try:
            marked = render(partial(_marked, nonce, around))
        except NotSupported:
            continue
        parts = marked.split(nonce)
        if len(parts) % 2 and "".join(parts) == text:
            return _inside(parts)
    raise NotSupported(
        "the model's chat template alters what is written in tools or tool calls, and a special token of the "
        "model is written there: leave that out"
    )


def cut_out(text: str, start: int, end: int, outside: Sequence[Place], closed_places: Places) -> list[Place]:
    """The places between ``start`` and ``end`` where a closed token is written, wholly or in part, by what
    came from outside: in order, and none in the other."""
    firsts, ends = [place[0] for place in outside], [place[1] for place in outside]
    found: list[Place] = []
    unread = [(start, end)]
    while unread:
        low, high = unread.pop()
        if bisect_right(ends, low) >= bisect_left(firsts, high):
            continue  # nothing in it came from outside
        at = low
        for a, b in closed_places(text[low:high]):
            a, b = a + low, b + low
            if a < b and bisect_right(ends, a) < bisect_left(firsts, b):
                found.append((a, b))
                # What stands around may be read otherwise without it.
                unread.append((at, a))
                at = b
        if at > low:
            unread.append((at, high))
    return sorted(found)


def new_nonce() -> str:
    """A text that nobody could have guessed: digits, which stay the same in capitals, and of one length, as
    templates may look at that."""
    return str(10**38 + secrets.randbelow(10**38))


def _all_of(string: str) -> list[Place]:
    """But for white space at its ends, which templates trim."""
    return [(len(string) - len(string.lstrip()), len(string.rstrip()))]


def _marked(nonce: str, around: Places, string: str) -> str:
    parts: list[str] = []
    at = 0
    for start, end in around(string):
        if start < end:
            parts += [string[at:start], nonce, string[start:end], nonce]
            at = end
    return "".join([*parts, string[at:]])


def _inside(parts: list[str]) -> tuple[Place, ...]:
    places: list[Place] = []
    at = 0
    for number, part in enumerate(parts):
        if number % 2 and part:
            places.append((at, at + len(part)))
        at += len(part)
    return tuple(places)
