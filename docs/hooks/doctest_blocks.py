"""A griffe extension: the examples of docstrings (``>>>``) become code blocks, as Markdown wants them."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*)*", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(r"\n```pycon\n\g<0>\n```\n", obj.docstring.value)
