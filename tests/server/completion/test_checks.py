"""The header by which an answer reports the places that its text violates."""

from agentflow.server.completion.checks import violations, write_paths


def test_a_schema_that_cannot_be_checked_has_no_violations() -> None:
    assert violations({"$ref": "#"}, "1") is None
    assert violations({"type": "null"}, "1") == [("type",)]


def test_places_are_pointers_in_a_header() -> None:
    places = [("find", ("properties", "größe, ~/", "not")), ("", ("$defs", "a"))]
    assert write_paths(places) == "find#/properties/gr%C3%B6%C3%9Fe%2C%20~0~1/not, #/$defs/a"
    long = write_paths([("f" * 60, ("x" * 100,))] * 50)
    assert long.isascii()
    assert len(long) < 1000
    assert long.endswith("more")
