"""Sends what the OpenAPI document allows, and what it does not, to a server on the deterministic engine, and
holds each answer against the document: no fault of the server, no status, type or body that is not in it.

``make fuzz`` runs this file: 5,000 cases and more, others each time (``ARGS="--cases 20000"``).
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import Counter
from typing import Any

import httpx2
import schemathesis
from api_server import MODEL, api_server
from fake_engine import FakeEngine
from hypothesis import HealthCheck, Phase, given, settings
from logit_runner import logit_runner
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.openapi import checks as openapi_checks  # noqa: F401  (registers them)
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
# Of ten cases so many are as the document says.
_POSITIVE_TENTHS = 7
_PHASES = (Phase.explicit, Phase.generate, Phase.shrink)


def fuzz(num_cases: int, *, derandomize: bool) -> Counter[str]:
    """Raises at the first answer that is not as the document says. Tells how many answers there were of
    each operation and status."""
    load_all_checks()
    seen: Counter[str] = Counter()
    # Short texts, so that a case is short; with logits, so that all parameters can be had.
    engine = FakeEngine(runner=logit_runner(max_context=192))
    with api_server(engine) as server:
        document = httpx2.get(f"{server.url}/openapi.json").json()
        schema = schemathesis.openapi.from_dict(_with_known_models(document))
        schema.config.update(base_url=server.url)
        operations = [result.ok() for result in schema.get_all_operations()]
        with_body = [operation for operation in operations if operation.body]
        for operation in operations:
            share = num_cases // len(with_body) if operation.body else max(5, num_cases // 100)
            _fuzz_one(operation, share + 1, derandomize, seen)
        server.assert_idle()
    return seen


def _fuzz_one(operation: APIOperation, num_cases: int, derandomize: bool, seen: Counter[str]) -> None:
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
            phases=_PHASES,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            response = case.call()
            seen[f"{operation.label} {response.status_code}"] += 1
            case.validate_response(response, checks=CHECKS)

        send()


def _with_known_models(document: dict[str, Any]) -> dict[str, Any]:
    """Nearly all names of models are unknown to the server; here half of them are the one that it has."""
    document = copy.deepcopy(document)
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request") and "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [MODEL, "unknown"], "type": "string"}
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5_000)
    num_cases = parser.parse_args().cases
    began_s = time.perf_counter()
    seen = fuzz(num_cases, derandomize=False)
    for name, count in sorted(seen.items()):
        print(f"{count:7,} {name}")
    print(f"{seen.total():7,} cases in {time.perf_counter() - began_s:.0f} s, all as documented")


if __name__ == "__main__":
    main()
