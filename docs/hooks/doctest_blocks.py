"""A griffe extension: the examples of docstrings (``>>>`` and ``::``) become blocks of code in Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _EXAMPLE.sub(r"\n```pycon\n\g<0>\n```\n", obj.docstring.value)
            obj.docstring.value = re.sub(
                r"(\S?)::$", lambda end: f"{end[1]}:" if end[1] else "", text, flags=re.MULTILINE
            )
