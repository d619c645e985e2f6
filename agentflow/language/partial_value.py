"""Partial values: what a JSON text that still grows says already.

What is shown never changes later: strings and lists grow, records get more fields, and what could still
become something else (``12`` of ``123``, ``tr`` of ``true``) is left out until it is complete.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jiter

_NUMBER_CHARS = "0123456789+-.eE"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+("?)', re.DOTALL)
"""A string, and the mark that ends it if it has one."""


class NothingYet(ValueError):
    """There is no part of a value to be shown."""


def partial_value(text: str) -> Any:
    """The part of a JSON value that ``text``, its beginning, is certain to be of. ``NothingYet`` where there
    is none (or where ``text`` is no beginning of JSON).

    >>> partial_value('{"title": "Leav')
    {'title': 'Leav'}
    """
    try:
        # A lone half of a character pair cannot be encoded; no engine writes one.
        data = _without_open_number(text).encode()
        return jiter.from_json(data, partial_mode="trailing-strings", allow_inf_nan=False)
    except ValueError as error:
        raise NothingYet(str(error)) from None


def whole_value(text: str) -> Any:
    """The value of a complete text. ``ValueError`` where it is no JSON."""
    return json.loads(text)


def _without_open_number(text: str) -> str:
    """Without a number at the end that more digits may follow."""
    before = text.rstrip(_NUMBER_CHARS)
    has_digits = any(char.isdigit() for char in text[len(before) :])
    is_in_string = "" in _STRING.findall(before)
    return before if has_digits and not is_in_string else text
