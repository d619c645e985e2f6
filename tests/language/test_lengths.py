"""Strings, lists and dicts of typed values have a default bound, which a schema's own lengths replace."""

from __future__ import annotations

import json
import warnings
from typing import Annotated, Any

import pytest
from pydantic import Field
from support.fake_engine import ConstrainedEngine

import agentflow as af
from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.grammar import is_allowed
from agentflow.engine.grammar.llguidance import LlguidanceGrammar, LlguidanceVocabulary
from agentflow.language.typed import values

pytestmark = pytest.mark.anyio


def lengths_of(schema: Any) -> tuple[int | None, int | None]:
    constraint = af.gen("x", schema=schema).value_type.constraint
    assert constraint is not None
    return constraint.string_chars, constraint.list_items


def test_a_schema_raises_the_defaults_and_never_lowers_them():
    assert lengths_of(list[str]) == (4000, 200)
    assert lengths_of(Annotated[str, Field(max_length=10)]) == (4000, 200)
    assert lengths_of(list[Annotated[str, Field(max_length=9000)]]) == (9000, 200)
    assert lengths_of(Annotated[list[int], Field(max_length=500)]) == (4000, 500)
    assert lengths_of(Annotated[dict[str, int], Field(max_length=500)]) == (4000, 500)
    assert lengths_of({"type": "array", "items": {"type": "string", "minLength": 5000}}) == (5000, 200)
    members = {f"m{number}": {"type": "boolean"} for number in range(300)}
    assert lengths_of({"type": "object", "properties": members}) == (4000, 300)
    assert af.gen("x", type=int).value_type.constraint.string_chars is None


@pytest.mark.parametrize("seed", range(3))
async def test_a_model_that_does_not_stop_ends_with_a_value(monkeypatch, seed):
    monkeypatch.setattr(values, "DEFAULT_STRING_CHARS", 20)
    monkeypatch.setattr(values, "DEFAULT_LIST_ITEMS", 3)
    engine = ConstrainedEngine()
    async with af.session(backend=engine, seed=seed) as flow, flow.state() as s:
        names = af.gen("names", schema=list[str], temperature=1.0, max_tokens=800)
        s += "Names: " + names
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = await s[names]
        assert s[names].finish_reason != "length"
        assert len(found) <= 3
        assert all(len(name) < 20 + 10 for name in found)  # the longest token has 10 characters
        is_bounded = len(found) == 3 or any(len(name) >= 20 for name in found)
        assert [warning.category for warning in caught] == [RuntimeWarning] * is_bounded


class Bytes:
    """A vocabulary of single bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        return list(text.encode())


def test_values_in_tags_are_bounded(monkeypatch):
    monkeypatch.setattr(values, "DEFAULT_STRING_CHARS", 20)
    monkeypatch.setattr(values, "DEFAULT_LIST_ITEMS", 3)
    tag = af.Tag("<names>", schema=list[str | None], end="</names>")
    compiled = compile_constraint(af.gen("x", tags=[tag]).value_type.constraint)
    grammar = LlguidanceGrammar(compiled.payload.decode(), LlguidanceVocabulary(Bytes(), 256))

    def next_bytes(text: str) -> bytes:
        matcher = grammar.matcher()
        for byte in text.encode():
            matcher.accept(byte)
        return bytes([byte for byte in range(256) if is_allowed(matcher.mask(), byte)])

    assert b"x" in next_bytes('So: <names>["' + "x" * 19)
    assert next_bytes('So: <names>["' + "x" * 20) == b'"'
    assert b"," in next_bytes('<names>["a", null')
    assert next_bytes('<names>["a", null, ""') == b"]"


async def test_a_value_in_a_tag_at_the_default_bound_is_reported():
    tag = af.Tag("<name>", schema=str, end="</name>")
    answers = [f'<name>"{"x" * length}"</name>' for length in (3999, 4000)]
    async with af.session(backend=af.Scripted(answers)) as flow, flow.state() as s:
        s += af.gen("x", tags=[tag], max_tokens=5000) + af.gen("y", tags=[tag], max_tokens=5000)
        await s["x"]
        with pytest.warns(RuntimeWarning, match=r"'<name>': a string ended after 4,000 characters"):
            await s["y"]


async def test_a_value_at_the_default_bound_is_reported():
    long = "x" * 4000
    answers = [long, [1] * 200, {"a": long[1:]}, [long]]
    schemas = [str, list[int], dict[str, str], list[Annotated[str, Field(max_length=5000)]]]
    reported = []
    async with af.session(backend=af.Scripted([json.dumps(answer) for answer in answers])) as flow:
        for schema in schemas:
            async with flow.state() as s:
                s += af.gen("x", schema=schema, max_tokens=1000)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    await s["x"]
                reported.append(len(caught))
                assert all("'x'" in str(warning.message) for warning in caught)
    assert reported == [1, 1, 0, 0]
