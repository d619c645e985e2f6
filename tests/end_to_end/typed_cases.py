"""The types that tests on the real model request: every kind, and how its values are checked
without the code that made them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import jsonschema
import msgspec
import pydantic

import agentflow as af

PATTERN = r"[A-Z][a-z]{1,9}( [A-Z][a-z]{1,9}){0,2}, (19|20)\d\d"
GRAMMAR = """
start: move ", then " move ("." | "!")
move: "move " PIECE " to " SQUARE
PIECE: "king" | "queen" | "rook"
SQUARE: /[a-h][1-8]/
"""
TREE = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"$ref": "#"}]},
    "minItems": 1,
    "maxItems": 3,
}


@dataclass
class Person:
    name: Annotated[str, msgspec.Meta(max_length=20)]
    age: Annotated[int, msgspec.Meta(ge=0, le=120)]
    is_alive: bool


class City(pydantic.BaseModel):
    name: str = pydantic.Field(pattern=r"^[A-Z][a-z]{2,10}$")
    rivers: list[Annotated[str, pydantic.Field(max_length=12)]] = pydantic.Field(max_length=2)
    size: Literal["small", "large"]
    height_m: float | None


class Book(TypedDict):
    title: Annotated[str, msgspec.Meta(min_length=3, max_length=16)]
    year: Annotated[int, msgspec.Meta(ge=1500, le=2030)]


TAG = af.Tag(" the ", regex=r"(red|green|blue) [a-z]{3,8}", end=".")


def _matches(pattern: str) -> Callable[[str, Any], bool]:
    return lambda text, value: text == value and re.fullmatch(pattern, text) is not None


def _is_tree(text: str, value: Any) -> bool:
    jsonschema.validate(json.loads(text), TREE)
    return bool(value == json.loads(text))


def _is_city(text: str, value: Any) -> bool:
    jsonschema.validate(json.loads(text), City.model_json_schema())
    return isinstance(value, City) and value == City(**json.loads(text))


def _are_pieces(text: str, value: Any) -> bool:
    """The text after each tag is valid or truncated."""
    behind_marks = text.split(" the ")[1:]
    begun = re.compile(r"(red|green|blue) [a-z]{3,8}\.")
    if value is None:  # truncated within its last tag
        *behind_marks, last = behind_marks
        return "the " + last in text[-20:] and all(map(begun.match, behind_marks))
    tagged = [piece for piece in value if not isinstance(piece, str)]
    return (
        all(begun.match(behind) or "the " + behind in text[-20:] for behind in behind_marks)
        and len(tagged) in (len(behind_marks), len(behind_marks) - 1)
        and all(re.fullmatch(r"(red|green|blue) [a-z]{3,8}", piece.value) for piece in tagged)
    )


Case = tuple[str, dict[str, Any], Callable[[str, Any], bool]]
CASES: dict[str, Case] = {
    "regex": ("Who wrote it, and when?", {"regex": PATTERN}, _matches(PATTERN)),
    "dataclass": (
        "Describe a person.",
        {"schema": Person},
        lambda text, value: value == msgspec.json.decode(text, type=Person) and len(value.name) <= 20,
    ),
    "pydantic": ("Describe a city.", {"schema": City}, _is_city),
    "typed_dict": (
        "Name a book.",
        {"schema": Book, "whitespace": "tight"},
        lambda text, value: value == msgspec.json.decode(text, type=Book) and '":"' in text,
    ),
    "recursion": ("A list of three digits, or of such lists.", {"schema": TREE}, _is_tree),
    "int": ("How many?", {"type": int}, lambda text, value: str(value) == text or text == "-0"),
    "float": ("How much?", {"type": float}, lambda text, value: json.loads(text) == value),
    "bool": ("Is it?", {"type": bool}, lambda text, value: json.loads(text) is value),
    "grammar": (
        "Your move?",
        {"grammar": GRAMMAR},
        _matches(r"move (king|queen|rook) to [a-h][1-8], then move (king|queen|rook) to [a-h][1-8][.!]"),
    ),
    "tags": ("Tell me of the sky.", {"tags": [TAG]}, _are_pieces),
}
ALWAYS_END = CASES.keys() - {"recursion", "grammar", "tags"}
