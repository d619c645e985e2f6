"""The space that some tokenizers put in front of a text before they encode it, found and taken away.

A conversation is encoded piece by piece, and a piece in the middle must not get that space. The
tokenizer's description says where it comes from; without those parts it encodes the same text as it
stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

SpacePrefix = Literal["none", "first", "every"]
"""``first``: only where the whole text begins. ``every``: also after each added token inside it."""

_CHILDREN = ("normalizers", "pretokenizers")


def find_space_prefix(*parts: Mapping[str, Any] | None) -> SpacePrefix:
    """Where the given normalizer and pre-tokenizer of a ``tokenizer.json`` put a space in front."""
    found: set[SpacePrefix] = {"none"}
    for part in parts:
        if part is not None:
            found.add(_own_prefix(part))
            children = [child for name in _CHILDREN for child in part.get(name, [])]
            found.add(find_space_prefix(*children))
    return "every" if "every" in found else "first" if "first" in found else "none"


def without_space_prefix(part: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The same normalizer or pre-tokenizer, which leaves the front of the text as it is."""
    if part is None or part.get("type") == "Prepend":
        return None
    bare = dict(part)
    if part.get("type") == "Metaspace":
        bare["prepend_scheme"] = "never"
        bare.pop("add_prefix_space", None)  # the older name for it
    elif part.get("type") == "ByteLevel":
        bare["add_prefix_space"] = False
    for name in _CHILDREN:
        if name in part:
            children = [without_space_prefix(child) for child in part[name]]
            bare[name] = [child for child in children if child is not None]
    return bare


def _own_prefix(part: Mapping[str, Any]) -> SpacePrefix:
    kind = part.get("type")
    if kind == "Prepend":
        return "every"
    if kind == "Metaspace":
        scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
        return "first" if scheme == "first" else "every" if scheme == "always" else "none"
    if kind == "ByteLevel" and part.get("add_prefix_space", True):
        return "every"
    return "none"
