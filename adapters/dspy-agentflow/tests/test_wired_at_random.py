"""Random programs in DSPy: wired, they send the same prompts and return the same as unwired."""

from __future__ import annotations

import itertools
import linecache
import tempfile
from pathlib import Path
from typing import Any, Literal

import dspy
from dspy_agentflow import wired
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wired import both

_FOLDER = tempfile.TemporaryDirectory(prefix="wired-programs-")
_numbers = itertools.count()

SIGNATURES = {
    "first": ("text -> draft, size: int", ["draft", "size"]),
    "second": ("text, note -> answer, is_long: bool", ["answer", "is_long", "reasoning"]),
    "third": ("text -> points: list[str], essay", ["points", "essay"]),
}


class Predictors(dspy.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict(SIGNATURES["first"][0])
        self.second = dspy.ChainOfThought(SIGNATURES["second"][0])
        self.third = dspy.Predict(SIGNATURES["third"][0])


Step = tuple[str, int, int, str, str]
_steps = st.lists(
    st.tuples(
        st.sampled_from(list(SIGNATURES)),
        st.integers(0, 9),
        st.integers(0, 9),
        st.sampled_from(["field", "field", "field", "key", "alias", "alias", "format", "all"]),
        st.sampled_from(["line", "line", "line", "helper", "if", "try", "loop"]),
    ),
    min_size=1,
    max_size=5,
)


def source_of(todo: list[Step], ending: Literal["last", "fields", "all"]) -> str:
    """The source of a program's function."""
    lines = ["def forward(self, topic):", "    v0 = dspy.Prediction(draft=topic, size=3)"]
    fields: list[list[str]] = [["draft", "size"]]
    for number, (name, of, field, form, around) in enumerate(todo, 1):
        source = of % number
        chosen = fields[source][field % len(fields[source])]
        given = f"v{source}.{chosen}"
        match form:
            case "key":
                given = f"v{source}[{chosen!r}]"
            case "alias":
                lines.append(f"    t{number} = {given}")
                given = f"t{number}"
            case "format":
                given = f"f'<{{{given}}}>'"
            case "all":
                given = f"v{source}"
        owner = "self.helped" if around == "helper" and name == "first" else f"self.{name}"
        inputs = f"text={given}" + (f", note=v{source}.{chosen}" if name == "second" else "")
        call = f"v{number} = {owner}({inputs})"
        match around:
            case "if":
                lines += [
                    f"    if v{source}:",
                    f"        {call}",
                    "    else:",
                    f"        v{number} = v{source}",
                ]
            case "try":
                lines += ["    try:", f"        {call}", "    finally:", "        pass"]
            case "loop":
                lines += ["    for _ in range(2):", f"        {call}"]
            case _:
                lines.append(f"    {call}")
        fields.append(SIGNATURES[name][1])
    last = len(todo)
    match ending:
        case "last":
            lines.append(f"    return v{last}")
        case "fields":
            given = ", ".join([f"x{at}=v{at}.{names[0]}" for at, names in enumerate(fields)])
            lines.append(f"    return dspy.Prediction({given})")
        case "all":
            given = ", ".join([f"x{at}=v{at}" for at in range(last + 1)])
            lines.append(f"    return dspy.Prediction({given}, n=len(v{last}.toDict()))")
    lines += ["", "def helped(self, text):", "    made = self.first(text=text)", "    return made"]
    return "\n".join(lines) + "\n"


def program_of(source: str) -> dspy.Module:
    """A module with the functions of a source."""
    path = Path(_FOLDER.name, f"program_{next(_numbers)}.py")
    path.write_text(source)
    names: dict[str, Any] = {"dspy": dspy, "__name__": path.stem}
    exec(compile(source, str(path), "exec"), names)
    linecache.checkcache(str(path))
    made = type("Program", (Predictors,), {name: names[name] for name in ("forward", "helped")})
    return made()


@settings(max_examples=30)
@given(
    _steps,
    st.sampled_from(["last", "fields", "all"]),
    st.sampled_from([dspy.ChatAdapter(), dspy.JSONAdapter()]),
)
def test_random_programs(todo: list[Step], ending: Any, adapter: Any) -> None:
    source = source_of(todo, ending)
    both(program_of(source), adapter, topic="rivers")


def test_they_are_wired_where_only_lines_and_fields_are_used() -> None:
    todo: list[Step] = [
        ("first", 0, 0, "field", "line"),
        ("second", 1, 0, "alias", "line"),
        ("third", 2, 0, "key", "loop"),
    ]
    program = program_of(source_of(todo, "fields"))
    assert wired(program).unwired == ()
    assert both(program, dspy.ChatAdapter(), 4, topic="rivers").num_refs == 4
