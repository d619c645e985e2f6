"""The APIs accept exactly the context length that they advertise."""

from __future__ import annotations

import httpx2
import pytest
from support.api_server import MODEL, api_server
from support.fake_engine import TOKENIZER, FakeEngine

from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.server.config.limits import HttpLimits


@pytest.mark.parametrize(
    ("num_slots", "max_prompt_tokens", "expected"),
    [
        (2048, None, 2048),
        (2048, 1500, 1500),
        (100_000, None, 8192),
        (100_000, 1500, 1500),
        (2048, 4000, 2048),
    ],
)
def test_f35a_the_advertised_context_is_the_limit(
    num_slots: int, max_prompt_tokens: int | None, expected: int
) -> None:
    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, num_slots=num_slots, max_context=8192)
    limits = HttpLimits(max_prompt_tokens=max_prompt_tokens)
    with (
        api_server(FakeEngine(runner=runner), limits=limits, constraints=False) as server,
        httpx2.Client(base_url=server.url) as client,
    ):
        [card] = client.get("/v1/models").json()["data"]
        headers = {"anthropic-version": "2023-06-01"}
        [shown] = client.get("/v1/models", headers=headers).json()["data"]
        tokens = client.post("/tokenize", json={"model": MODEL, "prompt": "x"}).json()
        [running] = client.get("/api/ps").json()["models"]
        facts = client.post("/api/show", json={"model": MODEL}).json()["model_info"]
        sglang = client.get("/get_server_info").json()
        assert card["max_model_len"] == tokens["max_model_len"] == expected
        assert shown["max_input_tokens"] == expected
        assert running["context_length"] == sglang["context_length"] == expected
        assert [value for key, value in facts.items() if key.endswith("context_length")] == [expected]
        for num_tokens, status in ((expected - 1, 200), (expected + 1, 400)):
            fields = {"model": MODEL, "prompt": [40] * num_tokens, "max_tokens": 1}
            assert client.post("/v1/completions", json=fields).status_code == status
