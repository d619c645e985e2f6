"""The format of an answer: what it lets through is parsed, and so is what brings a cut answer to its end."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import replace
from typing import Any, Literal

import dspy
import jsonschema
import pydantic
import pytest
from dspy_agentflow.answer_format import _PROSE, AnswerFormat, format_of
from dspy_agentflow.answers import Asked, CertainText, _joined
from hypothesis import given
from hypothesis import strategies as st

from agentflow.integrations import Answer, Delta
from agentflow.protocol.chat import TextPiece
from agentflow.protocol.events import TokenLogprob, Usage


class Plant(pydantic.BaseModel):
    """Of a garden."""

    name: str
    height_cm: int


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"
    BLUE = 3


# DSPy 3.0's JSONAdapter takes any brace for one of the answer's own, also in its texts.
_BRACES = "{}" if dspy.__version__.startswith("3.0.") else ""
_TEXT = rf"[^\s\[\]{_BRACES}]([^\[\]\s{_BRACES}]| [^\[\]\s{_BRACES}]){{0,20}}"

KINDS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.from_regex(_TEXT, fullmatch=True),
    int: st.integers(-(10**17), 10**17),
    float: st.integers(-(10**6), 10**6).map(lambda whole: whole / 4),
    bool: st.booleans(),
    Literal["yes", "no [?]", "may be"]: st.sampled_from(["yes", "no [?]", "may be"]),
    Colour: st.sampled_from(["red", "green", "BLUE"]),
    int | None: st.integers(0, 9),
    list[int]: st.lists(st.integers(-9, 99), max_size=3),
    dict[str, Any]: st.dictionaries(st.sampled_from(["x", "y"]), st.integers(0, 9)),
    Plant: st.fixed_dictionaries({"name": st.sampled_from(["oak", 'a "b"']), "height_cm": st.just(3)}),
}
ADAPTERS = [dspy.ChatAdapter, dspy.JSONAdapter]


def signature_of(kinds: list[Any]) -> Any:
    fields: dict[str, Any] = {f"field_{n}": (kind, dspy.OutputField()) for n, kind in enumerate(kinds)}
    return dspy.Signature({"question": (str, dspy.InputField()), **fields}, "Answer.")


def matches(constraint: dict[str, Any], text: str) -> bool:
    """Whether the text keeps the constraint, as Python's own engine and json see it."""
    if "schema" in constraint:
        value = json.loads(text)
        return bool(text == json.dumps(value, ensure_ascii=False)) and value.keys() == (
            constraint["schema"]["properties"].keys()
        )
    if "regex" in constraint:
        return re.fullmatch(constraint["regex"], text) is not None
    return read_grammar(constraint["grammar"], text)


def runs_of(grammar: str) -> tuple[list[str], list[dict[str, Any]]]:
    runs = re.findall(r"^RUN_\d+: /(.*)/$", grammar, re.MULTILINE)
    schemas = re.findall(r"^value_\d+: %json (.*)$", grammar, re.MULTILINE)
    assert len(runs) == len(schemas) + 1
    return [run.replace(r"\/", "/") for run in runs], [json.loads(schema) for schema in schemas]


def read_grammar(grammar: str, text: str, place: int = 0) -> bool:
    """Runs of a regular expression, and JSON between them."""
    runs, schemas = runs_of(grammar)

    def read(n: int, begins: int) -> bool:
        if n == len(schemas):
            return re.compile(runs[n]).fullmatch(text, begins) is not None
        for end in range(begins, len(text) + 1):
            if re.compile(runs[n]).fullmatch(text, begins, end):
                try:
                    _, after = json.JSONDecoder().raw_decode(text, end)
                except ValueError:
                    continue
                if read(n + 1, after):
                    return True
        return False

    return read(0, place)


def example_of(schema: dict[str, Any]) -> Any:
    """Some value of it."""
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    if schema.get("properties"):
        return {name: example_of(part) for name, part in schema["properties"].items()}
    if "anyOf" in schema:
        return example_of(schema["anyOf"][0])
    examples: dict[str, Any] = {
        "string": "s",
        "integer": 7,
        "number": 0.5,
        "boolean": True,
        "array": [],
        "object": {},
    }
    return examples[schema["type"]]


@st.composite
def said_under(draw: st.DrawFn, constraint: dict[str, Any]) -> str:
    """Some text that keeps it."""
    if "regex" in constraint:
        return draw(st.from_regex(constraint["regex"], fullmatch=True))
    runs, schemas = runs_of(constraint["grammar"])
    texts = [draw(st.from_regex(run, fullmatch=True)) for run in runs]
    values = [json.dumps(example_of(schema)) for schema in schemas]
    return "".join([part for pair in zip(texts, [*values, ""], strict=True) for part in pair])


@st.composite
def answers(draw: st.DrawFn) -> tuple[Any, Any, AnswerFormat, dict[str, Any], str]:
    """A signature's answer, as its adapter itself would write it."""
    kinds = draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=4))
    adapter, signature = draw(st.sampled_from(ADAPTERS))(), signature_of(kinds)
    values = {f"field_{n}": draw(KINDS[kind]) for n, kind in enumerate(kinds)}
    found = format_of(adapter, signature)
    assert found is not None
    if found.schema is None:
        text = adapter.format_assistant_message_content(signature, values).rstrip()
    else:
        text = json.dumps(values, ensure_ascii=False)
    return adapter, signature, found, values, text


@given(answers())
def test_what_an_adapter_writes_keeps_the_format(answer: Any) -> None:
    adapter, signature, found, _, text = answer
    assert matches(found.constraint(), text)
    assert adapter.parse(signature, text).keys() == signature.output_fields.keys()
    assert found.rest(text) is None


@given(st.lists(st.sampled_from([str, int, float, bool, Colour]), min_size=1, max_size=4), st.data())
def test_all_that_keeps_the_format_is_parsed(kinds: list[Any], data: st.DataObject) -> None:
    signature = signature_of(kinds)
    found = format_of(dspy.ChatAdapter(), signature)
    assert found is not None
    text = data.draw(said_under(found.constraint()))
    assert dspy.ChatAdapter().parse(signature, text).keys() == signature.output_fields.keys()


@given(answers(), st.data())
def test_an_answer_cut_anywhere_is_brought_to_its_end(answer: Any, data: st.DataObject) -> None:
    adapter, signature, found, values, text = answer
    place = data.draw(st.integers(0, len(text) - 1))
    rest = found.rest(text[:place])
    assert rest is not None
    assert text.startswith(rest.kept)
    whole = rest.kept + data.draw(said_under(rest.constraint))
    parsed = adapter.parse(signature, whole)
    assert parsed.keys() == signature.output_fields.keys()
    for name, kind in zip(values, signature.output_fields.values(), strict=True):
        if kind.annotation is str:  # as much of it as was said
            assert parsed[name] == values[name] or len(rest.kept) < len(text)


@given(answers(), st.data())
def test_what_is_streamed_is_the_answer_wherever_it_was_cut(answer: Any, data: st.DataObject) -> None:
    """Nothing that was told is said again, and all of free text comes at once."""
    _, _, found, _, text = answer
    place = data.draw(st.integers(0, len(text)))
    telling, told = CertainText(found), ""
    for at in range(0, place, 3):
        told += said_by(telling, Delta(0, TextPiece(text[at : min(at + 3, place)])))
    assert text.startswith(told)
    rest = found.rest(text[:place])
    whole = text[:place]
    if rest is not None:
        more = data.draw(said_under(rest.constraint))
        whole = rest.kept + more
        telling.continue_after(rest)
        for at in range(0, len(more), 5):
            told += said_by(telling, Delta(0, TextPiece(more[at : at + 5])))
    told += said_by(
        telling,
        Answer(
            index=0,
            text="",
            finish_reason="stop",
            usage=Usage(1, 0, 1),
            model="m",
            logprobs=None,
            top_logprobs=None,
            tokens=None,
        ),
    )
    assert told == whole


def said_by(telling: CertainText, event: Delta | Answer) -> str:
    pieces = [one.piece for one in telling.events(event) if isinstance(one, Delta)]
    return "".join([piece.text for piece in pieces if isinstance(piece, TextPiece)])


@pytest.mark.parametrize(
    "text",
    [
        "[1] Smith et al.",
        "[1, 2]",
        "[link](x) and [[a]]",
        "if [[ -f x ]]",
        "[[ 0.1 0.2 ]]",
        "[[ # ]]",
        "[[[ #a",
        "a [[ [[ #b",
        "# a",
    ],
)
def test_text_may_have_brackets(text: str) -> None:
    signature = signature_of([str, int])
    found = format_of(dspy.ChatAdapter(), signature)
    assert found is not None
    written = f"[[ ## field_0 ## ]]\n{text}\n\n[[ ## field_1 ## ]]\n1\n\n[[ ## completed ## ]]"
    assert matches(found.constraint(), written)
    assert dspy.ChatAdapter().parse(signature, written) == {"field_0": text, "field_1": 1}


@given(st.text("[ #a\n", max_size=12))
def test_text_has_everything_but_what_begins_a_header(text: str) -> None:
    is_text = re.fullmatch(_PROSE, text) is not None
    if "[[ ##" in text or not text.strip() or text[0].isspace():
        assert not is_text
    elif text[-1] not in "[ #":  # it may not end where a header could have begun
        assert is_text


@pytest.mark.parametrize("end", ["\\", '\\"', "\\\\", "\\u", "\\u00", "\\u00e", "\\\\\\", "é"])
def test_json_strings_cut_within_an_escape(end: str) -> None:
    signature = signature_of([str, int])
    found = format_of(dspy.JSONAdapter(), signature)
    assert found is not None
    rest = found.rest('{"field_0": "so' + end)
    assert rest is not None
    whole = f"{rest.kept}{example_from(rest.constraint)}"
    assert json.loads(whole).keys() == {"field_0", "field_1"}
    assert whole.startswith('{"field_0": "so' + end)


def example_from(constraint: dict[str, Any]) -> str:
    """The only text of a constraint whose runs are literal."""
    runs, schemas = runs_of(constraint["grammar"])
    values = [json.dumps(example_of(schema)) for schema in schemas]
    literals = [re.sub(r"\\(.)", r"\1", run) for run in runs]
    return "".join([part for pair in zip(literals, [*values, ""], strict=True) for part in pair])


def test_text_that_may_be_none_is_text() -> None:
    signature = signature_of([str | None, int])
    found = format_of(dspy.ChatAdapter(), signature)
    assert found == format_of(dspy.ChatAdapter(), signature_of([str, int]))


def test_text_that_is_no_such_answer_stays_as_it_is() -> None:
    found = format_of(dspy.ChatAdapter(), signature_of([str, int]))
    assert found is not None
    assert found.rest("I cannot say.") is None


def test_formats_that_are_not_known_here() -> None:
    class Own(dspy.ChatAdapter):
        """Reads another format."""

        def parse(self, signature: Any, completion: str) -> dict[str, Any]:
            """Always the same."""
            return {"field_0": completion}

    signature = signature_of([str])
    assert format_of(Own(), signature) is None
    assert format_of(dspy.ChatAdapter(), dspy.Signature("question -> answer").delete("answer")) is None


def test_adapters_that_only_ask_differently() -> None:
    class Own(dspy.ChatAdapter):
        """Says please."""

        def format_task_description(self, signature: Any) -> str:
            """Says so."""
            return "please " + str(super().format_task_description(signature))

    assert format_of(Own(), signature_of([str])) == format_of(dspy.ChatAdapter(), signature_of([str]))


def test_a_type_without_a_schema_is_left_to_the_adapter() -> None:
    class Odd:
        """pydantic knows nothing of it."""

    signature = signature_of([str])
    signature.output_fields["field_0"].annotation = Odd
    assert format_of(dspy.JSONAdapter(), signature) is None


class Garden(pydantic.BaseModel):
    """With lists and mappings in it."""

    plants: list[Plant]
    notes: list[str]
    more: dict[str, Any]
    kind: Literal["wild", "tidy"]


def test_what_is_still_missing_is_short() -> None:
    found = format_of(dspy.JSONAdapter(), signature_of([str, Garden]))
    assert found is not None
    rest = found.rest('{"field_0": "so')
    assert rest is not None
    _, [schema] = runs_of(rest.constraint["grammar"])
    long = {"plants": [], "notes": ["x" * 31], "more": {}, "kind": "wild"}
    short = {"plants": [{"name": "x" * 30, "height_cm": 3}] * 2, "notes": [], "more": {}, "kind": "tidy"}
    for wrong in (long, {**short, "notes": ["x"] * 3}, {**short, "more": {"x": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    jsonschema.validate(short, schema)
    Garden.model_validate(short)


def test_classes_of_one_name_are_two() -> None:
    first = pydantic.create_model("Item", weight=(int, ...))
    second = pydantic.create_model("Item", colour=(str, ...))
    found = format_of(dspy.JSONAdapter(), signature_of([list[first], list[second]]))  # type: ignore[valid-type]
    assert found is not None
    assert found.schema is not None
    jsonschema.validate({"field_0": [{"weight": 1}], "field_1": [{"colour": "red"}]}, found.schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"field_0": [{"colour": "red"}], "field_1": []}, found.schema)


def test_none_is_written_as_json() -> None:
    signature = signature_of([int | None])
    text = "[[ ## field_0 ## ]]\nnull\n\n[[ ## completed ## ]]"
    found = format_of(dspy.ChatAdapter(), signature)
    assert found is not None
    assert matches(found.constraint(), text)
    assert dspy.ChatAdapter().parse(signature, text) == {"field_0": None}


@pytest.mark.parametrize(
    "kept_tokens", [["[[ ## n ## ]]\n", "12"], ["[[ ## n", " ## ]]\n1", "2"], ["[[ ## n ## ]]"]]
)
def test_f37_log_probabilities_of_a_completed_answer_are_those_of_its_tokens(kept_tokens: list[str]) -> None:
    answer_format = format_of(dspy.ChatAdapter(), dspy.Signature("q -> n: int, answer: str"))

    def answer(tokens: list[str], logprob: float) -> Answer:
        text = json.dumps([{"text": "".join(tokens)}], separators=(",", ":"))
        top = tuple([(TokenLogprob(5, "x", logprob),) for _ in tokens])
        return Answer(0, "m", "length", Usage(), text, (logprob,) * len(tokens), top, tuple(tokens))

    first, end = answer(kept_tokens, -0.1), answer(["E", "nd"], -0.2)
    rest = Asked([], {}, answer_format=answer_format).rest_of(first)
    assert rest is not None
    joined = _joined(first, end, rest)
    assert joined.tokens is not None
    assert joined.logprobs is not None
    assert joined.top_logprobs is not None
    num = len(joined.tokens)
    assert num == len(joined.logprobs) == len(joined.top_logprobs)
    assert joined.tokens[-2:] == ("E", "nd")
    assert joined.logprobs == (-0.1,) * (num - 2) + (-0.2,) * 2
    # Nothing of the dropped part, here the unfinished number.
    assert (rest.kept + "End").startswith("".join(joined.tokens[:-2]))
    unknown = _joined(replace(first, tokens=None), replace(end, tokens=None), rest)
    is_whole = rest.kept == "".join(kept_tokens)
    assert (unknown.logprobs is not None) == is_whole
