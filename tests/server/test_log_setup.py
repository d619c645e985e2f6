"""The server's log: each record is one line, for any content."""

import io
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.server.log import LOGGER, JsonFormatter, TextFormatter, logged_path, set_up_logs


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger(f"{LOGGER}.requests")


def test_json_has_what_was_given(logger):
    stream = io.StringIO()
    set_up_logs("info", "json", stream)
    logger.debug("too fine")
    logger.info(
        "%s took %d s", "x", 3, extra={"request": {"tenant": "ann", "status": 200}, "_of_a_package": 1}
    )
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "agentflow.requests",
        "message": "x took 3 s",
        "request": {"tenant": "ann", "status": 200},
    }
    assert second["level"] == "error"
    assert "ValueError: bad\nthing" in second["exception"]


def test_text_is_for_people_and_a_second_set_up_takes_the_place_of_the_first(logger):
    first, second = io.StringIO(), io.StringIO()
    set_up_logs("debug", "text", first)
    set_up_logs("warning", "text", second)
    logger.info("too fine")
    logger.warning("slow %s", "a\nb\x1b[2J")
    assert first.getvalue() == ""
    assert second.getvalue().endswith(" WARNING slow a\\nb\\x1b[2J\n")


@given(st.text())
def test_a_message_is_one_line(message):
    record = logging.makeLogRecord({"msg": "%s", "args": (message,)})
    assert len(JsonFormatter().format(record).splitlines()) == 1
    assert json.loads(JsonFormatter().format(record))["message"] == message
    assert len(TextFormatter().format(record).splitlines()) == 1


def test_a_path_is_logged_quoted_and_short() -> None:
    assert logged_path("/v1/chat/completions") == "/v1/chat/completions"
    assert logged_path("/a b\nc\u2028é") == "/a%20b%0Ac%E2%80%A8%C3%A9"
    assert logged_path("/" + "\x00" * 1_000_000).endswith("… (1,000,001 characters in all)")
    assert len(logged_path("/" + "é" * 1_000_000)) < 1_300
    assert len(logged_path("/" + "a" * 1_000_000)) < 250
    assert logged_path("/\udcff") == "/%3F"
