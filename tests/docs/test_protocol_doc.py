"""docs/reference/protocol.md matches the code: every frame, op, event and part with every field and default;
examples that decode, close codes, error codes and limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from agentflow.errors import MAX_CAUSES, AgentflowError, from_code
from agentflow.protocol import constraint, decisions, events, ops, sampling
from agentflow.protocol import events as token_logprob
from agentflow.protocol import wire as protocol
from agentflow.protocol.chat import (
    CalledTool,
    Conversation,
    Message,
    ReplyReader,
    ReplyWriter,
    ToolChoice,
    ToolSpec,
    read_reply,
)
from agentflow.protocol.events import ErrorInfo, Event
from agentflow.protocol.images import Image, PlacedImage
from agentflow.protocol.op_table import OPS as TABLE
from agentflow.protocol.text import transform
from agentflow.protocol.wire import ClientFrame, ServerFrame
from agentflow.runtime import generator
from agentflow.runtime.interpreter import interpreter, state_tree, variables
from agentflow.server.config.limits import ServerLimits
from agentflow.server.websocket import connection as ws_session

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
FRAMES: tuple[type[msgspec.Struct], ...] = (*get_args(ClientFrame), *get_args(ServerFrame))
OPS: tuple[type[msgspec.Struct], ...] = get_args(ops.Op)
EVENTS: tuple[type[msgspec.Struct], ...] = get_args(Event)
PARTS: tuple[type[msgspec.Struct], ...] = (
    protocol.Resume,
    protocol.Limits,
    generator.Capabilities,
    ops.Ref,
    transform.Transform,
    decisions.Question,
    decisions.Option,
    constraint.Constraint,
    Conversation,
    Message,
    PlacedImage,
    Image,
    CalledTool,
    ToolSpec,
    ToolChoice,
    sampling.GenParams,
    token_logprob.TokenLogprob,
    ErrorInfo,
    ops.Failure,
    generator.Usage,
    generator.Stats,
    events.EndpointStats,
    events.PassedOver,
    events.LiveGraph,
    events.LiveState,
    events.LiveMedium,
    events.LiveNode,
    events.StepRecord,
    events.WatchedRequest,
    events.GraphDelta,
    events.GraphsDelta,
    events.TreeDelta,
    events.TreeNode,
)


def _chapters() -> dict[str, dict[str, str]]:
    """The page's chapters (``##``) with their sections (``###``)."""
    chapters = {}
    for chapter in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        head, *sections = re.split(r"^### ", chapter, flags=re.MULTILINE)
        chapters[head.splitlines()[0]] = {
            section.splitlines()[0]: section.partition("\n")[2] for section in sections
        }
    return chapters


def _tag(struct: type[msgspec.Struct]) -> str:
    return struct.__name__ if struct in PARTS else str(struct.__struct_config__.tag)


def _section(struct: type[msgspec.Struct]) -> str:
    groups = {"Frames": FRAMES, "Ops": OPS, "Events": EVENTS, "Parts": PARTS}
    chapter = next(name for name, structs in groups.items() if struct in structs)
    return _chapters()[chapter][_tag(struct)]


def _shown_default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{msgspec.json.encode(field.default_factory()).decode()}`"
    if field.default is msgspec.NODEFAULT:
        return ""
    return f"`{msgspec.json.encode(field.default).decode()}`"


@pytest.mark.parametrize("struct", [*FRAMES, *OPS, *EVENTS, *PARTS], ids=lambda struct: struct.__name__)
def test_every_field_is_documented_with_its_default(struct: type[msgspec.Struct]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|(?: (`.*?`) | )\|.*\|$", _section(struct), flags=re.MULTILINE)
    documented = [(name, default) for name, _, default in rows]
    assert documented == [(field.name, _shown_default(field)) for field in msgspec.structs.fields(struct)]


@pytest.mark.parametrize("struct", [*FRAMES, *OPS, *EVENTS, *PARTS], ids=lambda struct: struct.__name__)
def test_every_example_is_what_it_shows(struct: type[msgspec.Struct]) -> None:
    examples = re.findall(r"^```json\n(.*?)\n```$", _section(struct), flags=re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        decoded = msgspec.json.decode(example, type=struct)
        # Nothing in the example is dropped in silence.
        given: dict[str, Any] | list[Any] = msgspec.json.decode(example)
        if struct.__struct_config__.array_like:
            assert len(given) <= len(struct.__struct_fields__)
        else:
            assert given.keys() - {"frame", "op", "event"} <= set(struct.__struct_fields__)
        assert isinstance(decoded, struct)


def test_f37_the_parts_that_are_sent_complete_are_named() -> None:
    complete = re.search(
        r"omit fields that have their default value, except in (.*?), which", PAGE, re.DOTALL
    )
    assert complete is not None
    assert re.findall(r"\[(\w+)\]", complete[1]) == [
        struct.__name__
        for struct in (*FRAMES, *OPS, *EVENTS, *PARTS)
        if not (struct.__struct_config__.omit_defaults or struct.__struct_config__.array_like)
        and any(not field.required for field in msgspec.structs.fields(struct))
    ]


def test_nothing_is_documented_that_does_not_exist() -> None:
    chapters = _chapters()
    for chapter, structs in (("Frames", FRAMES), ("Ops", OPS), ("Events", EVENTS), ("Parts", PARTS)):
        assert set(chapters[chapter]) == {_tag(struct) for struct in structs}


def test_the_example_of_a_reply_is_one() -> None:
    (example,) = re.findall(r"^## Replies\n.*?^```json\n(.*?)\n```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    said = read_reply(example)
    assert (said.text, [call.name for call in said.tool_calls]) == ("I look it up.", ["weather"])
    writer = ReplyWriter()
    assert writer.push(ReplyReader().push(example)) + writer.finish() == example


def test_f37_the_lists_of_ops_are_those_of_the_table() -> None:
    listed = _section(ops.SubmitGraph).partition("The graph may contain ")[2].partition("at most")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == {_tag(op) for op, spec in TABLE.items() if spec.in_graph}
    [uncounted] = re.findall(r"not counting (.*?) \|$", _section(ErrorInfo), flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", uncounted)) == {
        _tag(op) for op, spec in TABLE.items() if "state" in op.__struct_fields__ and not spec.is_numbered
    }


def test_the_version_and_the_address_are_those_of_the_code() -> None:
    assert PAGE.startswith(f"# The session protocol, version {protocol.VERSION}\n")
    assert f"ws://HOST:PORT{protocol.SESSION_PATH}" in PAGE
    assert f"127.0.0.1:{protocol.DEFAULT_PORT}" in PAGE


def test_the_close_codes_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| (\d{4}) \| (.*?) \|", PAGE, flags=re.MULTILINE))
    for error, code in ws_session.CLOSE_CODES.items():
        assert f"`{error.code}`" in rows[str(code)]
    for code in (
        ws_session.NORMAL,
        ws_session.SHUTS_DOWN,
        ws_session.OTHER_ERROR,
        protocol.TAKEN_OVER,
        *ws_session.PROTOCOL_VIOLATIONS,
    ):
        assert str(code) in rows


def test_f37_the_defaults_in_brackets_are_those_of_an_engine() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.* \[(.*?)\] \|$", _section(sampling.GenParams), flags=re.MULTILINE)
    engine, unset = sampling.SamplingParams(), sampling.GenParams()
    chosen = [name for name in sampling.GenParams.__struct_fields__ if getattr(unset, name) is None]
    defaults = [(name, getattr(engine, name)) for name in chosen if getattr(engine, name) is not None]
    assert rows == [(name, str(default)) for name, default in defaults]


def test_every_error_code_in_the_page_exists() -> None:
    codes = set(re.findall(r'"code": "(\w+)"', PAGE))
    for refusals in re.findall(r"^\| \d{4} \| (.*?) \|", PAGE, flags=re.MULTILINE):
        codes |= set(re.findall(r"`(\w+)`", refusals))
    assert {"protocol_error", "server_lost", "overloaded"} <= codes
    for code in codes:
        assert type(from_code(code, "")) is not AgentflowError, code


def test_the_limits_are_those_of_the_code() -> None:
    shown = {
        field: value
        for value, field in re.findall(r"^\| .* \| (.*?) \| `ServerLimits\.(\w+)`", PAGE, flags=re.MULTILINE)
    }
    limits = ServerLimits()
    assert shown == {
        "frame_bytes": f"{limits.frame_bytes // 2**20} MiB",
        "resume_grace_s": f"{limits.resume_grace_s:g} s",
        "max_sessions": f"{limits.max_sessions:,}",
        "max_connections": f"{limits.max_connections:,}",
        "max_connections_per_address": f"{limits.max_connections_per_address:,}",
        "idle_timeout_s": f"{limits.idle_timeout_s:g} s",
        "header_timeout_s": f"{limits.header_timeout_s:g} s",
        "hello_timeout_s": f"{limits.hello_timeout_s:g} s",
        "ping_interval_s": f"{limits.ping_interval_s:g} s",
        "session_bytes": f"{limits.session_bytes / 1e6:g} MB",
        "sessions_bytes": f"{limits.sessions_bytes / 1e9:g} GB",
    }
    assert shown.keys() == set(ServerLimits.__struct_fields__)
    assert f"| {state_tree.MAX_STATES:,} |" in PAGE
    assert f"apply | {state_tree.MAX_LIMITS:,} |" in PAGE
    assert f"| {interpreter.MAX_PENDING_OPS:,} |" in PAGE
    assert variables.MAX_NUMBER == 2**53 - 1
    assert f"nested causes of an error | {MAX_CAUSES};" in PAGE
    assert f"{ws_session.ACK_OPS} ops or {ws_session.ACK_BYTES // 1024} KiB" in PAGE


def test_events_module_has_no_struct_that_the_page_leaves_out() -> None:
    for module in (ops, events, protocol):
        structs = {
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, msgspec.Struct)
            and value.__module__ == module.__name__
            and not value.__name__.startswith("_")
        }
        structs -= {protocol.UnreadOps}  # the server's view of an ops frame
        assert structs <= {*FRAMES, *OPS, *EVENTS, *PARTS}


def test_every_link_within_the_page_has_a_target() -> None:
    targets: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", PAGE, flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        # mkdocs numbers a second heading of the same words.
        targets.append(f"{slug}_1" if slug in targets else slug)
    links = re.findall(r"\]\(#(.*?)\)", PAGE)
    assert links
    assert set(links) <= set(targets)
