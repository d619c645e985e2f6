"""JSON schema's own test suite: values generated under each accepted schema are valid, each
rejection says why, and the results are the table in the documentation."""

import pytest
from support.examples import times

from benchmarks.constrained.schema_suite import DRAFTS, MARKS, PAGE, run_suite, table_lines

INSTANCES = times(18)


@pytest.fixture(scope="module")
def rows():
    return {draft: run_suite(draft, INSTANCES) for draft in DRAFTS}


def test_generated_instances_are_valid(rows):
    for of_draft in rows.values():
        assert [text for row in of_draft for text in row.invalid] == []
        accepted = sum(row.machines + row.grammars for row in of_draft)
        finished = sum(row.instances for row in of_draft)
        assert finished > 0.95 * INSTANCES * accepted


def test_each_rejection_names_its_reason(rows):
    for of_draft in rows.values():
        reasons = [reason for row in of_draft for reason in row.reasons.values()]
        assert len(reasons) > 50
        for reason in reasons:
            assert reason.startswith("schema: ")
            assert not any(word in reason for word in ("llguidance", "failed", "x-guidance", "InternalError"))


def test_the_documentations_table_is_up_to_date(rows):
    written = PAGE.read_text(encoding="utf-8").partition(MARKS[0])[2].partition(MARKS[1])[0]
    assert written.strip().splitlines() == "\n".join(table_lines(rows)).strip().splitlines()
