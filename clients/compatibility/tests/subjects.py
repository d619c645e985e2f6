"""What every client is tested with: a tool, its result, and a typed answer."""

from typing import Literal

from pydantic import BaseModel

MODEL = "fake"
ANSWER = "It is sunny in Oslo."
"""What the model says once a tool has returned."""
LONG = "word " * 4000
"""The model repeats it, unless the client aborts."""
TOO_LONG = "a" * 70_000
"""Longer than the model's context."""


def weather(city: str) -> str:
    """Returns the weather.

    Args:
        city: The name of the city.
    """
    assert city == "Oslo"
    return "sunny"


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    mood: Literal["glad", "sad"]
    tags: list[str]


WEATHER_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER_TOOL = {"name": "weather", "description": "Returns the weather.", "parameters": WEATHER_SCHEMA}
