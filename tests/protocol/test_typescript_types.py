"""The generated sources of the TypeScript client are current, and describe every op and event."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from agentflow.errors import AgentflowError
from agentflow.protocol import events, ops

SCRIPT = Path(__file__).parents[2] / "clients" / "typescript" / "scripts" / "protocol_types.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("protocol_types", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["protocol", "errors"])
def test_the_generated_file_is_current(script: ModuleType, name: str) -> None:
    text = getattr(script, f"{name}_ts")()
    committed = (script.SOURCES / f"{name}.ts").read_text(encoding="utf-8")
    assert committed == text, f"run python {SCRIPT.relative_to(SCRIPT.parents[3])}"


def test_each_op_event_and_error_has_a_type(script: ModuleType) -> None:
    protocol, errors = script.protocol_ts(), script.errors_ts()
    for op in get_args(ops.Op):
        assert f'export interface {op.__name__}Op {{\n  op: "{op.__struct_config__.tag}";' in protocol
    for event in get_args(events.Event):
        assert f"export interface {event.__name__}Event {{" in protocol
    for error in AgentflowError.__subclasses__():
        assert f"export class {error.__name__} extends AgentflowError" in errors
