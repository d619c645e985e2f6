"""docs/reference/errors.md: each row is caused on a real server, and the answer compared with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.docs import health_refusals, http_refusals, op_refusals, session_refusals
from support.docs.page_blocks import ROOT
from support.server.apis import CHAT, MESSAGES
from support.server.module_servers import module_server

PAGES = Path(__file__).parents[2] / "docs" / "reference"
PAGE = (PAGES / "errors.md").read_text(encoding="utf-8")
ANTHROPICS_PAGE = (PAGES / "anthropic-api.md").read_text(encoding="utf-8")


def table(chapter: str) -> dict[str, list[str]]:
    """The rows under a heading by their ids, without the text of the cause."""
    text = PAGE.partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", text, flags=re.MULTILINE)[2:]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    found = {row.strip("`"): cells for row, _, *cells in rows}
    assert len(found) == len(rows) > 0
    return found


HTTP = table("The HTTP APIs")
HANDSHAKES = table("Before a session")
SESSION_ENDS = table("Ends of a session")
FAILURES = table("Errors of single ops")
HEALTH = table("Health and metrics")


server = module_server()
"""For what needs no other settings."""


@pytest.mark.parametrize(
    ("rows", "causes", "num_cells"),
    [
        (HTTP, http_refusals.REFUSED, 4),
        (HANDSHAKES, session_refusals.HANDSHAKES, 3),
        (SESSION_ENDS, session_refusals.SESSION_ENDS, 3),
        (FAILURES, op_refusals.FAILURES, 2),
        (HEALTH, health_refusals.REFUSED, 3),
    ],
)
def test_each_row_is_tested_and_says_what_to_do(rows, causes, num_cells):
    assert list(rows) == list(causes)
    for cells in rows.values():
        assert len(cells) == num_cells
        assert cells[-1].endswith(".")


def test_f37_each_code_that_the_server_sends_is_listed() -> None:
    folder = ROOT / "agentflow" / "server"
    sent: set[tuple[int, str]] = set()
    of_gateway: set[tuple[int, str]] = set()
    for file in folder.rglob("*.py"):
        found = of_gateway if folder / "gateway" in file.parents else sent
        text = file.read_text(encoding="utf-8")
        found |= {(int(status), code) for status, code in re.findall(r'ApiError\(\s*(\d+),\s*"(\w+)"', text)}
    listed = {
        (int(status), code)
        for cell, *_ in HTTP.values()
        for status, code in re.findall(r"^(\d+) `\w+` `(\w+)`$", cell)
    }
    gateway = {(int(cells[0][:3]), code) for code, cells in table("A gateway").items()}
    assert len(sent) > 20
    assert sent - listed == set()
    assert gateway <= of_gateway <= gateway | listed


@pytest.mark.parametrize("cause", HTTP)
def test_over_http(server, cause):
    answers = [http_refusals.REFUSED[cause](server, api) for api in (CHAT, MESSAGES)]
    sent = [one for one in answers if one is not None]
    assert ["–" if one is None else one.cell for one in answers] == HTTP[cause][:2]
    assert {one.headers for one in sent} == {HTTP[cause][2]}
    [code] = {one.code for one in sent}  # the cause has one name in both APIs
    if HTTP[cause][0] == "–":  # the page has it elsewhere
        assert f"`{code}`" in HTTP[cause][3]


def test_anthropics_page_has_each_status() -> None:
    rows = re.findall(r"^\| ([0-9].*?) \| (.*?) \|", ANTHROPICS_PAGE, flags=re.MULTILINE)
    sent = {cells[1] for cells in HTTP.values()} - {"–", "closed", "200 `api_error`"}
    sent = {cell for cell in sent if not cell.endswith(" as text") or cell == "503 as text"}
    assert {f"{status} {kind}" for status, kind in rows} == sent


@pytest.mark.parametrize("cause", HANDSHAKES)
def test_before_a_session(server, cause):
    assert session_refusals.HANDSHAKES[cause](server) == tuple(HANDSHAKES[cause][:2])


@pytest.mark.parametrize("cause", SESSION_ENDS)
def test_in_a_session(server, cause):
    assert session_refusals.SESSION_ENDS[cause](server) == tuple(SESSION_ENDS[cause][:2])


@pytest.mark.parametrize("cause", FAILURES)
def test_of_an_op(server, cause):
    assert op_refusals.FAILURES[cause](server) == FAILURES[cause][0]


@pytest.mark.parametrize("cause", HEALTH)
def test_of_health_and_metrics(server, cause):
    assert health_refusals.REFUSED[cause](server) == tuple(HEALTH[cause][:2])
