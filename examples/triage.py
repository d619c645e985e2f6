"""Triage: sorts messages by the probabilities of answers to questions about them.

All questions about a message are decided in one pass, without generating a token. Messages that are surely
urgent go first; those whose topic is not sure go to a person.

    python examples/triage.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import agentflow as af

SURE = 0.5
TOPICS = {
    "delivery": "a parcel is late, lost or broken",
    "payment": "an invoice, a refund or a card",
    "praise": "the customer is content",
}
MESSAGES = [
    "My parcel should have come on Monday, and nobody knows where it is.",
    "You charged my card twice for one pair of shoes. Please pay it back today!",
    "The shoes fit perfectly. Thank you so much!",
    "Is the shop in Bern open on Sunday?",
]


@dataclass(frozen=True)
class Ticket:
    """``urgency``: the probability that the message is urgent. ``anger``: from 1 to 5."""

    message: str
    topic: str | None
    urgency: float
    anger: float


@af.program
async def triage(s: af.State, message: str) -> Ticket:
    """Decides about a message. The topic is None if none is sure."""
    s += af.system("You sort the messages of a shop's customers.") + af.user(f"Message: {message}")
    decisions = await s.decide(
        {
            "urgent": af.question("Must somebody answer within the hour?", bool),
            "topic": af.question("What is the message about?", TOPICS),
            "anger": af.question("How angry is the customer, from 1 to 5?", range(1, 6)),
        }
    )
    topic = decisions["topic"]
    return Ticket(
        message,
        topic.value if topic.probability >= SURE else None,
        decisions["urgent"].probabilities[True],
        decisions["anger"].mean or 0.0,
    )


async def main(flow: af.Session, console: Console) -> None:
    """Sorts all messages, and prints them with the most urgent first."""
    tickets = await flow.map(triage, MESSAGES)
    table = Table("urgency", "anger", "topic", "message", title="The tickets")
    for ticket in sorted(tickets, key=lambda ticket: -ticket.urgency):
        topic = ticket.topic or "[bold]ask a person[/bold]"
        table.add_row(f"{ticket.urgency:.0%}", f"{ticket.anger:.1f}", topic, escape(ticket.message))
    console.print(table)


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
