"""The triage: the order of the tickets, and the topics that are left to a person."""

from __future__ import annotations

import pytest
import triage
from scripted_example import shown
from triage import MESSAGES, TOPICS

import agentflow as af

pytestmark = pytest.mark.anyio


def answers(call: af.ScriptedCall) -> dict[str, object]:
    """One message is urgent, and the topic of another one is in doubt."""
    topics = dict.fromkeys(TOPICS, 1 / 3) if MESSAGES[3] in call else "payment"
    urgency = 0.875 if MESSAGES[1] in call else 0.25
    return {"urgent": {"yes": urgency, "no": 1 - urgency}, "topic": topics, "anger": {"1": 0.5, "4": 0.5}}


async def test_a_ticket_has_the_probabilities_of_the_model():
    async with af.session(backend=af.Scripted({"decisions": answers})) as flow:
        urgent, unsure = [await flow.run(triage.triage, MESSAGES[number]) for number in (1, 3)]
    assert urgent == triage.Ticket(MESSAGES[1], "payment", 0.875, 2.5)
    assert unsure == triage.Ticket(MESSAGES[3], None, 0.25, 2.5)


async def test_the_most_urgent_ticket_is_shown_first():
    page = await shown(triage.main, af.Scripted({"decisions": answers}))
    assert page.index("88%") < page.index("25%")
    assert (page.count("payment"), page.count("ask a person")) == (3, 1)
