"""Patterns keep their meaning when they are written for xgrammar, without the forms that it misreads."""

from __future__ import annotations

import itertools
import re

import pytest

from agentflow.backends.apis.grammars.xgrammar_pattern import xgrammar_pattern

TEXTS = ["".join(part) for count in range(4) for part in itertools.product("^a]-.\n\\", repeat=count)]


@pytest.mark.parametrize(
    "pattern",
    [
        r"[\^\]\-\\]{2}",
        r"[\^]",
        r"[\^^a].",
        r"[\^^]+",
        r"[\x5ea]*",
        r"[\^-]a",
        r"[^\^a]",
        r"[]a].",
        r"\.[.a]",
        r"\\.",
        r"\[\^.",
        r"(?:a|.)\s?",
    ],
)
def test_a_rewritten_pattern_means_the_same(pattern: str) -> None:
    written = xgrammar_pattern(pattern)
    for text in TEXTS:
        assert bool(re.fullmatch(written, text)) == bool(re.fullmatch(pattern, text)), (written, text)
    assert not re.search(r"(?<!\\)\[(\\\^|\\x5e)", written)
    assert "." not in re.sub(r"\\.|\[(\\.|[^\]])*\]", "", written)
