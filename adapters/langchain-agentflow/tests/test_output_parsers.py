"""Transforms of agentflow's variables read answers as LangChain's output parsers do."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import (
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    MarkdownListOutputParser,
    NumberedListOutputParser,
    XMLOutputParser,
)

import agentflow as af
from agentflow.protocol.text.transform import Transform, apply_transforms

LISTS = {
    "comma": CommaSeparatedListOutputParser(),
    "numbered": NumberedListOutputParser(),
    "bulleted": MarkdownListOutputParser(),
}
PIECES = [
    "1. ",
    "12.",
    "- ",
    "* ",
    " ",
    "\n",
    "\t",
    "\r",
    "a",
    "b c",
    "3.\n",
    "٣. ",
    "\x1c",
    "\x85",
    ",",
    '"',
    ", ",
]


@pytest.mark.parametrize("kind", LISTS)
def test_lists(kind: str) -> None:
    choice = random.Random(kind)
    num_found = 0
    for _ in range(3000):
        text = "".join(choice.choices(PIECES, k=choice.randrange(12)))
        expected = LISTS[kind].parse(text)
        if not expected:
            with pytest.raises(af.errors.RunFailed):
                apply_transforms(text, (Transform("items", kind),))
            continue
        num_found += 1
        assert apply_transforms(text, (Transform("items", kind),)) == "\n".join(expected)
        for index, item in enumerate(expected):
            assert apply_transforms(text, (Transform("items", f"{kind}.{index}"),)) == item
    assert num_found > 100


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"b": "x"}}',
        ' \n{"a": {"b": "x"}}\n',
        'Here:\n```json\n{"a": {"b": "x"}}\n```',
        'Here:\n```\n{"a": {"b": "x"}}\n```\nThat is all.',
        '```json{"a": {"b": "x"}}',
        "no JSON",
        "```json\nno JSON\n```",
    ],
)
def test_json(text: str) -> None:
    try:
        expected: Any = JsonOutputParser().parse(text)
    except OutputParserException:
        with pytest.raises(af.errors.RunFailed):
            apply_transforms(text, (Transform("json"),))
        return
    assert json.loads(apply_transforms(text, (Transform("json"),))) == expected
    assert apply_transforms(text, (Transform("json", "a.b"),)) == expected["a"]["b"]


@pytest.mark.parametrize(
    "text", ["<a>x y</a>", "```xml\n<a> x\n</a>\n```", "\n<a>x</a>\n", '<a b="c">x</a>', "<c>x</c>"]
)
def test_the_text_of_an_xml_element(text: str) -> None:
    expected = XMLOutputParser(parser="xml").parse(text)
    if "a" in expected:
        assert apply_transforms(text, (Transform("xml", "a"),)) == expected["a"]
    else:
        with pytest.raises(af.errors.RunFailed):
            apply_transforms(text, (Transform("xml", "a"),))
