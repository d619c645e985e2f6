"""Extraction: a record of each PDF, by one gen under a schema; a stopped run continues."""

from pathlib import Path

import msgspec
import pytest
from extraction import PAPERS, Person, extract, main, text_of
from scripted_example import run, scripted, shown
from support.commands import run_python

import agentflow as af

pytestmark = pytest.mark.anyio

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDS = {
    "feld": Person("Rosa Feld", 1878, "scientist"),
    "holm": Person("Anna Holm", 1867, "scientist"),
    "lund": Person("Peter Lund", 1685, "musician"),
    "novak": Person("Emil Novak", 1922, "athlete"),
}


def reader(prompt: str) -> str:
    """A model that reads well."""
    return next(msgspec.json.encode(person).decode() for person in RECORDS.values() if person.name in prompt)


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.stem)
async def test_a_pdf_becomes_a_record(paper: Path):
    person, backend = RECORDS[paper.stem], af.Scripted(reader)
    assert await run(extract, backend, str(paper)) == person
    (call,) = backend.calls
    assert all(text in call.messages[1]["content"] for text in (person.name, str(person.born), "as JSON."))


def test_all_pages_are_read():
    text = text_of(str(PAPERS[1]))
    assert text.startswith("Anna Holm was born")
    assert text.endswith("a new metal.")
    assert "\n" not in text


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
        await run(extract, af.Scripted({"person": wrong}), str(PAPERS[0]))


async def test_a_truncated_record_has_no_value():
    endless = '{"name": "' + "Anna " * 200 + '", "born": 1867, "kind": "scientist"}'
    with pytest.raises(af.InvalidValue, match="was truncated after 96 tokens and is not a complete Person"):
        await run(extract, af.Scripted({"person": endless}), str(PAPERS[0]))


async def test_a_backend_without_schemas_refuses():
    with pytest.raises(af.errors.NotSupported, match="'schema'"):
        await run(extract, scripted(reader, keeps_schemas=False), str(PAPERS[0]))


async def test_the_records_are_shown():
    page = await shown(main, af.Scripted(reader))
    assert "4 records" in page
    for person in RECORDS.values():
        assert all(value in page for value in (person.name, str(person.born), person.kind))


async def test_a_resumed_run_reads_only_what_is_left(tmp_path):
    file = str(tmp_path / "people.jsonl")
    first, second, third = af.Scripted(reader), af.Scripted(reader), af.Scripted([])
    assert "3 records" in await shown(main, first, papers=PAPERS[:3], resume=file)
    assert "4 records" in await shown(main, second, resume=file)
    (prompt,) = second.prompts
    assert "Novak" in prompt
    assert "4 records" in await shown(main, third, resume=file)


def test_a_missing_pdf_is_reported():
    result = run_python(EXAMPLES / "extraction.py", "no-such-file.pdf")
    assert result.returncode == 2
    assert "no-such-file.pdf" in result.stderr
    assert "Traceback" not in result.stderr
