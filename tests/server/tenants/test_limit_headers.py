"""The headers with the rest of a tenant's limits, as OpenAI's and Anthropic's clients receive them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api_server import MODEL, ApiServer, api_server
from support.clocks import ClockNs
from support.faulty_servers import BEARER, KEY, tenants
from support.server.anthropic_peer import asking
from support.server.openai_peer import MESSAGES, sync_client

from agentflow.server.tenants.limit_headers import (
    anthropic_limit_headers,
    duration,
    openai_limit_headers,
)
from agentflow.server.tenants.rate_limit import BucketState, LimitState, TenantGate

REQUESTS, TOKENS = 4, 1_000
CHAT: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """A server with one tenant, whose limits do not refill: its clock stands still."""
    known = tenants(f"requests_per_minute = {REQUESTS}", f"tokens_per_minute = {TOKENS}")
    with api_server(tenants=known, gate=TenantGate(ClockNs()), constraints=False) as running:
        yield running


def seconds_of(text: str) -> float:
    """Reads a duration as Go's ``time.ParseDuration`` does."""
    total, number = 0.0, ""
    rest = text
    while rest:
        if rest[0].isdigit() or rest[0] == ".":
            number, rest = number + rest[0], rest[1:]
            continue
        unit = "ms" if rest.startswith("ms") else rest[0]
        total, number, rest = total + float(number) * SECONDS[unit], "", rest.removeprefix(unit)
    assert not number
    return total


@given(ns=st.integers(0, 10**14))
def test_a_duration_is_not_shorter_than_what_it_stands_for(ns: int) -> None:
    assert 0 <= round(seconds_of(duration(ns)) * 1e9) - ns < 1_001_000


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0s"), (1, "1ms"), (1_000, "1s"), (360_000, "6m0s"), (3_600_000, "1h0m0s")]
)
def test_durations_have_the_form_of_the_api(ms: int, text: str) -> None:
    assert duration(ms * 10**6) == text


@given(now_s=st.floats(0, 4e9), reset_ns=st.integers(0, 10**13))
def test_a_reset_in_anthropics_form_is_a_time_that_is_not_too_early(now_s: float, reset_ns: int) -> None:
    headers = anthropic_limit_headers(LimitState(requests=BucketState(1, 0, reset_ns)), now_s)
    shown = headers[b"anthropic-ratelimit-requests-reset"].decode()
    assert -1e-3 < datetime.fromisoformat(shown).timestamp() - (now_s + reset_ns / 1e9) < 1.001


def test_a_limit_that_there_is_not_has_no_headers() -> None:
    one = BucketState(5, 4, 3)
    assert openai_limit_headers(LimitState()) == anthropic_limit_headers(LimitState()) == {}
    assert all(b"-requests" in name for name in openai_limit_headers(LimitState(requests=one)))
    assert all(b"tokens-" in name for name in anthropic_limit_headers(LimitState(tokens=one)))


def test_a_limit_of_costs_is_shown_in_dollars() -> None:
    limits = LimitState(cost=BucketState(5_250_000_000, 4_999_999_999, 0))
    assert openai_limit_headers(limits) == {
        b"x-ratelimit-limit-cost": b"5.250000",
        b"x-ratelimit-remaining-cost": b"4.999999",
        b"x-ratelimit-reset-cost": b"0s",
    }
    assert anthropic_limit_headers(limits)[b"anthropic-ratelimit-cost-remaining"] == b"4.999999"


def of_openai(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("x-ratelimit-")}


def test_openais_client_sees_what_is_left(server: ApiServer) -> None:
    with sync_client(server, api_key=KEY) as client:
        whole = client.chat.completions.with_raw_response.create(**CHAT)
        usage: Any = whole.parse().usage
        left = TOKENS - usage.total_tokens + usage.prompt_tokens_details.cached_tokens
        wait_s = round(60 * (TOKENS - left) / TOKENS, 3)
        assert of_openai(whole.headers) == {
            "x-ratelimit-limit-requests": f"{REQUESTS}",
            "x-ratelimit-remaining-requests": f"{REQUESTS - 1}",
            "x-ratelimit-reset-requests": "15s",
            "x-ratelimit-limit-tokens": f"{TOKENS}",
            "x-ratelimit-remaining-tokens": f"{left}",
            "x-ratelimit-reset-tokens": whole.headers["x-ratelimit-reset-tokens"],
        }
        assert seconds_of(whole.headers["x-ratelimit-reset-tokens"]) == pytest.approx(wait_s, abs=1e-3)
        assert int(whole.headers["openai-processing-ms"]) >= 0
        assert whole.headers["x-request-id"]
        with client.chat.completions.with_streaming_response.create(**CHAT, stream=True) as streamed:
            # The state at the start of the stream: its request is counted.
            assert streamed.headers["x-ratelimit-remaining-requests"] == f"{REQUESTS - 2}"
            assert int(streamed.headers["x-ratelimit-remaining-tokens"]) < left
            streamed.read()
        # Routes that need no request of the model show the same, and cost nothing.
        for _ in range(2):
            listed = client.models.with_raw_response.list()
            assert listed.headers["x-ratelimit-remaining-requests"] == f"{REQUESTS - 2}"
        for number in range(2):
            answer = client.responses.with_raw_response.create(
                model=MODEL, input="Hello", max_output_tokens=1
            )
            assert answer.headers["x-ratelimit-remaining-requests"] == f"{1 - number}"
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**CHAT)
    refused = caught.value.response.headers
    assert refused["x-ratelimit-remaining-requests"] == "0"
    assert refused["x-ratelimit-reset-requests"] == "1m0s"
    assert refused["retry-after"] == "15"


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_sees_what_is_left(server: ApiServer, stream: bool) -> None:
    with anthropic.Anthropic(api_key=KEY, base_url=server.url, max_retries=0) as client:
        answer = client.messages.with_raw_response.create(**asking(stream=stream))
        headers = answer.headers
        shown = {name: value for name, value in headers.items() if name.startswith("anthropic-ratelimit-")}
        assert len(shown) == 12
        assert shown["anthropic-ratelimit-requests-limit"] == f"{REQUESTS}"
        assert shown["anthropic-ratelimit-requests-remaining"] == f"{REQUESTS - 1}"
        for kind in ("tokens", "input-tokens", "output-tokens"):
            assert shown[f"anthropic-ratelimit-{kind}-limit"] == f"{TOKENS}"
            assert 0 < int(shown[f"anthropic-ratelimit-{kind}-remaining"]) < TOKENS
            reset = datetime.fromisoformat(shown[f"anthropic-ratelimit-{kind}-reset"])
            assert reset.tzinfo is not None
        assert headers["request-id"]
        assert "openai-processing-ms" not in headers
        assert not of_openai(headers)
        answer.parse()


def test_requests_without_limit_or_key_have_no_limit_headers(server: ApiServer) -> None:
    wrong = httpx2.get(f"{server.url}/v1/models", headers={"authorization": "Bearer nothing"})
    assert wrong.status_code == 401
    assert not of_openai(wrong.headers)
    assert of_openai(httpx2.get(f"{server.url}/v1/models", headers=BEARER).headers)
    with api_server(constraints=False) as free:
        answer = httpx2.get(f"{free.url}/v1/models")
    assert not [name for name in answer.headers if "ratelimit" in name]
    assert answer.headers["openai-processing-ms"]
