"""Text inside the quotes of a Mermaid label."""

from __future__ import annotations


def escaped(text: str) -> str:
    """Inside quotes Mermaid reads such entities; the first one makes room for the others."""
    for char, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;"), ("`", "#96;")):
        text = text.replace(char, entity)
    return text
