"""The part of a JSON value that a prefix of its text determines: what a typed variable yields as it grows."""

from __future__ import annotations

import re
from typing import Any

import jiter

_NUMBER_CHARS = "0123456789+-.eE"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+("?)', re.DOTALL)
"""A string, and its closing quote if it has one."""


class NothingYet(ValueError):
    """No part of the value is certain yet."""


def partial_value(text: str) -> Any:
    """The part of a JSON value that ``text``, a prefix of it, determines. ``NothingYet`` if there is none, or
    if ``text`` is not a prefix of JSON.

    What it returns never changes as the text grows: strings and lists become longer and records get more
    fields. What may still become something else (``12`` of ``123``, ``tr`` of ``true``) is left out.

    >>> partial_value('{"title": "Leav')
    {'title': 'Leav'}
    """
    try:
        # A lone surrogate cannot be encoded; no engine writes one.
        data = _without_open_number(text).encode()
        return jiter.from_json(data, partial_mode="trailing-strings", allow_inf_nan=False)
    except ValueError as error:
        raise NothingYet(str(error)) from None


def _without_open_number(text: str) -> str:
    """``text`` without a number at its end that may get more digits."""
    before = text.rstrip(_NUMBER_CHARS)
    has_digits = any(char.isdigit() for char in text[len(before) :])
    is_in_string = "" in _STRING.findall(before)
    return before if has_digits and not is_in_string else text
