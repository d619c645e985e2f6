"""Extraction: the same records, by one gen under a schema or by a branch for each field."""

import json

import extraction
import pytest
from extraction import Person, extract, year_in
from scripted_example import Asked, run, scripted, shown

import agentflow as af

pytestmark = pytest.mark.anyio

ANNA, PETER = extraction.TEXTS[:2]
RECORDS = {ANNA: Person("Anna Holm", 1867, "scientist"), PETER: Person("Peter Lund", 1685, "musician")}


def reader(prompt: str) -> str:
    """A model that reads well."""
    person = next(
        (person for text, person in RECORDS.items() if text in prompt), Person("Nobody", 0, "athlete")
    )
    answers = {
        "The name of this person is": f" {person.name}, who",
        "This person was born in the year": f" {person.born} or so.",
        "What was this person?</user><assistant>": f"A {person.kind}" if person.born else "An athlete",
        "as JSON.</user><assistant>": json.dumps(
            {"name": person.name, "born": person.born, "kind": person.kind}
        ),
    }
    return next(answer for end, answer in answers.items() if prompt.endswith(end))


@pytest.mark.parametrize("keeps_schemas", [True, False])
@pytest.mark.parametrize("text", RECORDS)
async def test_a_text_becomes_a_record(text, keeps_schemas):
    asked = Asked(reader)
    record = await run(extract, scripted(asked, keeps_schemas=keeps_schemas), text)
    assert record == RECORDS[text]
    assert len(asked.prompts) == (1 if keeps_schemas else 3)
    assert all(prompt.count(f"<user>{text}\n\n") == 1 for prompt in asked.prompts)


async def test_fields_know_nothing_of_each_other():
    asked = Asked(reader)
    await run(extract, scripted(asked, keeps_schemas=False), ANNA)
    assert all(prompt.count("</user>") == 1 and prompt.count("?") == 1 for prompt in asked.prompts)


async def test_a_backend_without_schemas_would_refuse_the_schema():
    async with af.session(backend=scripted(reader, keeps_schemas=False)) as flow, flow.state() as s:
        s.begin("user")
        with pytest.raises(af.NotSupported, match="'schema'"):
            await extraction.whole(s)


@pytest.mark.parametrize(
    ("text", "year"),
    [(" 1867 in a small", "1867"), ("born 1685.", "1685"), ("12345", "0"), ("", "0"), ("the year 867", "0")],
)
def test_a_year_has_four_digits(text, year):
    assert year_in(text) == year


@pytest.mark.parametrize("keeps_schemas", [True, False])
async def test_the_records_are_shown(keeps_schemas):
    page = await shown(extraction.main, scripted(reader, keeps_schemas=keeps_schemas))
    assert "4 records" in page
    for person in RECORDS.values():
        assert all(value in page for value in (person.name, str(person.born), person.kind))
    assert page.count("?") == 2  # of the two others, no year was found
