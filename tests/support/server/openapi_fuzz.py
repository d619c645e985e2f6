"""Sends allowed and forbidden requests of the OpenAPI document to a server on the deterministic engine, and
holds each answer against the document: no fault of the server, nothing taken that the document forbids, no
status, type, header or body that is not in it.

``make fuzz`` runs this file: some 4,000 cases at the limits of each field, always the same, and 5,000 by
chance, others each time (``ARGS="--cases 20000"``).
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import sampled_from
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.failures import FailureGroup
from schemathesis.engine import Status, events, from_schema
from schemathesis.schemas import APIOperation, BaseSchema
from support.api_server import MODEL, api_server
from support.fake_engine import FakeEngine
from support.logit_runner import logit_runner

from agentflow.server.tenants.keys import Tenants

# Left out: that all is taken that the document allows (a conversation may be too long, fields exclude each
# other). But refusals have to name the field: see ``names_the_field``.
_LEFT_OUT = ["positive_data_acceptance"]
_KEY = "af-key"
_WITH_KEY = {"Authorization": f"Bearer {_KEY}"}
# How many of ten random cases the document allows.
_POSITIVE_TENTHS = 7
# The encodings that the headers of a few bodies name.
_ENCODINGS = sampled_from(["identity"] * 9 + ["gzip"])


@schemathesis.check
def names_the_field(ctx: Any, response: Any, case: Any) -> None:
    """A request that the document allows is refused, if at all, with the field that does not suit the others:
    any other refusal has a bound that the document could say."""
    if response.status_code == 400 and case.meta is not None and case.meta.generation.mode.is_positive:
        body = response.json()
        error = body if isinstance(body["error"], str) else body["error"]
        assert error.get("details", error)["param"], body


@schemathesis.deserializer("application/x-ndjson")
def read_lines(ctx: Any, response: Any) -> Any:
    """The values of a stream of lines."""
    return [msgspec.json.decode(line) for line in response.content.splitlines()]


@dataclass
class Outcome:
    """``answers``: the number for each operation and status. ``faults``: undocumented answers."""

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def fuzz(num_random: int, *, limits_of: str | None = None, derandomize: bool = False) -> Outcome:
    """Sends the limits of each field (``limits_of``: in this path only), and ``num_random`` random cases."""
    outcome = Outcome()
    # Short texts, so that a case is short; with logits, so that all parameters can be had.
    engine = FakeEngine(runner=logit_runner(max_context=192))
    with api_server(engine, tenants=Tenants([_KEY])) as server:
        document = _of_this_server(httpx2.get(f"{server.url}/openapi.json").json())
        _try_limits(_schema(document, server.url, path=limits_of), outcome)
        operations = [result.ok() for result in _schema(document, server.url).get_all_operations()]
        share = num_random // sum(1 for operation in operations if operation.body) + 1
        for operation in operations:
            _try_at_random(
                operation, share if operation.body else min(share, 5), outcome, derandomize=derandomize
            )
        server.assert_idle()
    return outcome


def _schema(document: dict[str, Any], url: str, *, path: str | None = None) -> BaseSchema:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.cache.enabled = False  # nothing is left behind in the folder that it runs in
    schema.config.update(base_url=url, headers=_WITH_KEY, continue_on_failure=True)
    schema.config.checks.update(included_check_names=["all"], excluded_check_names=_LEFT_OUT)
    # A text that is too long for its field may be too long for a body, too.
    schema.config.checks.negative_data_rejection.expected_statuses += ["413"]
    schema.config.phases.update(phases=["coverage"])
    return schema if path is None else schema.include(path=path)


def _try_limits(schema: BaseSchema, outcome: Outcome) -> None:
    for event in from_schema(schema).execute():
        match event:
            case events.ScenarioFinished(recorder=recorder, status=status, label=label):
                for interaction in recorder.interactions.values():
                    answer = interaction.response
                    reported = "no answer" if answer is None else answer.status_code
                    outcome.answers[f"{label} {reported}"] += 1
                if status is Status.FAILURE:
                    outcome.faults += _faults(recorder)
            case events.NonFatalError(value=error) | events.FatalError(exception=error):
                outcome.faults.append(f"schemathesis: {error}")


def _faults(recorder: Any) -> list[str]:
    return [
        f"{check.name} of {recorder.cases[case_id].value.as_curl_command()}\n{check.failure_info.failure}"
        for case_id, checks in recorder.checks.items()
        for check in checks
        if check.failure_info is not None
    ]


def _try_at_random(operation: APIOperation, num_cases: int, outcome: Outcome, *, derandomize: bool) -> None:
    load_all_checks()
    # Whether a key is asked for is tried at the limits: here all come with the right one.
    left_out = [*_LEFT_OUT, "ignored_auth"]
    checks = CHECKS.get_by_names([name for name in CHECKS.get_all_names() if name not in left_out])
    num_positive = num_cases * _POSITIVE_TENTHS // 10 if operation.body else num_cases
    parts = ((GenerationMode.POSITIVE, num_positive), (GenerationMode.NEGATIVE, num_cases - num_positive))
    for mode, count in parts:
        if not count:
            continue

        @settings(
            max_examples=count,
            derandomize=derandomize,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), encoding=_ENCODINGS)
        def send(case: Any, encoding: str) -> None:
            response = case.call(headers={**_WITH_KEY, "Content-Encoding": encoding})
            outcome.answers[f"{operation.label} {response.status_code}"] += 1
            case.validate_response(response, checks=checks)

        try:
            send()
        except (Exception, FailureGroup) as error:  # a wrong answer, or none
            outcome.faults.append(f"{operation.label}: {error}")


def _of_this_server(document: dict[str, Any]) -> dict[str, Any]:
    """Nearly all names of models are unknown to the server; here half of them are its model's. The server
    would check nothing else of an empty prompt, nor of a text with token ids, which exclude each other. A
    server that has keys asks for them."""
    document = copy.deepcopy(document)
    document["security"].remove({})
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        if name.endswith("Request") and "model" in schema["properties"]:
            kinds: list[Any] = [{"enum": [MODEL, "unknown"], "type": "string"}]
            if "model" not in schema.get("required", ()):
                kinds.append({"type": "null"})
            schema["properties"]["model"] = {"anyOf": kinds}
    [prompt] = [
        kind for kind in schemas["TextRequest"]["properties"]["prompt"]["anyOf"] if "minItems" not in kind
    ]
    prompt["minLength"] = 1
    native = schemas["SglangRequest"]
    native["required"] = ["text"]
    native["properties"] |= {"text": {"type": "string", "minLength": 1}, "input_ids": {"type": "null"}}
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5_000, help="cases by chance")
    num_cases = parser.parse_args().cases
    began_s = time.perf_counter()
    outcome = fuzz(num_cases)
    for name, count in sorted(outcome.answers.items()):
        print(f"{count:7,} {name}")
    for fault in outcome.faults:
        print(f"\n{fault}")
    took_s = time.perf_counter() - began_s
    print(f"{outcome.answers.total():,} cases in {took_s:.0f} s, {len(outcome.faults)} faults")
    raise SystemExit(1 if outcome.faults else 0)


if __name__ == "__main__":
    main()
