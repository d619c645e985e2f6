"""A short run of ``make fuzz``: the HTTP APIs answer as their OpenAPI document specifies."""

from __future__ import annotations

from collections import Counter

import pytest


# Warnings about the code of schemathesis and its libraries do not concern the server.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("limits_of", "num_answers"),
    [("/detokenize", 100), pytest.param("/v1/completions", 500, marks=pytest.mark.full)],
)
def test_the_server_answers_as_its_document_says(limits_of, num_answers):
    from support.server.openapi_fuzz import fuzz  # not in each process that collects the tests

    outcome = fuzz(24, limits_of=limits_of, derandomize=True)
    assert outcome.faults == []
    statuses = Counter()
    for name, count in outcome.answers.items():
        statuses[name.rpartition(" ")[2]] += count
    assert {"200", "400", "401", "404", "405", "415"} <= set(statuses)
    assert statuses.total() > num_answers
