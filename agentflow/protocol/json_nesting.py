"""How deep a JSON value nests. What walks through one calls itself at each level, and must not be led so deep
that Python calls no further."""

from __future__ import annotations

from typing import Any, Final

MOST_NESTING: Final = 200


def nests_deeper(value: Any, most: int) -> bool:
    """Whether more than ``most`` objects and lists stand inside each other.

    >>> nests_deeper({"a": [1, 2]}, 2), nests_deeper({"a": [1, 2]}, 1)
    (False, True)
    """
    level = [value]
    for _ in range(most + 1):
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return False
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return True
