"""Extraction: a record of each text, by one gen under a schema."""

import msgspec
import pytest
from extraction import TEXTS, Person, extract, main
from scripted_example import Asked, run, scripted, shown

import agentflow as af

pytestmark = pytest.mark.anyio

RECORDS = {
    TEXTS[0]: Person("Anna Holm", 1867, "scientist"),
    TEXTS[1]: Person("Peter Lund", 1685, "musician"),
    TEXTS[2]: Person("Emil Novak", 1922, "athlete"),
    TEXTS[3]: Person("Rosa Feld", 1878, "scientist"),
}


def reader(prompt: str) -> str:
    """A model that reads well."""
    return next(msgspec.json.encode(person).decode() for text, person in RECORDS.items() if text in prompt)


@pytest.mark.parametrize("text", RECORDS)
async def test_a_text_becomes_a_record(text):
    asked = Asked(reader)
    assert await run(extract, scripted(asked), text) == RECORDS[text]
    (prompt,) = asked.prompts
    assert prompt.endswith("as JSON.</user><assistant>")


@pytest.mark.parametrize(
    "wrong",
    [
        '{"name": "Anna Holm", "born": 186, "kind": "scientist"}',
        '{"name": "", "born": 1867, "kind": "scientist"}',
        '{"name": "Anna Holm", "born": 1867, "kind": "physicist"}',
    ],
)
async def test_the_limits_are_part_of_the_type(wrong):
    with pytest.raises(af.InvalidValue, match="not a valid Person"):
        await run(extract, scripted(lambda _: wrong), TEXTS[0])


async def test_a_truncated_record_has_no_value():
    endless = '{"name": "' + "Anna " * 200 + '", "born": 1867, "kind": "scientist"}'
    with pytest.raises(af.InvalidValue, match="was truncated after 96 tokens and is not a complete Person"):
        await run(extract, scripted(lambda _: endless), TEXTS[0])


async def test_a_backend_without_schemas_refuses():
    with pytest.raises(af.NotSupported, match="'schema'"):
        await run(extract, scripted(reader, keeps_schemas=False), TEXTS[0])


async def test_the_records_are_shown():
    page = await shown(main, scripted(reader))
    assert "4 records" in page
    for person in RECORDS.values():
        assert all(value in page for value in (person.name, str(person.born), person.kind))
