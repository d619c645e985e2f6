"""The table of ops has a row for each op, and its functions find every number that an op names."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from agentflow.errors import BadArgument, NotSupported, ProtocolError
from agentflow.protocol import ops
from agentflow.protocol.bounds.sized import sized
from agentflow.protocol.chat import Conversation, Message
from agentflow.protocol.events import Capabilities
from agentflow.protocol.images import MAX_FRAMES, Image, PlacedImage
from agentflow.protocol.op_table import (
    OPS,
    check_received_op,
    declared,
    expanded,
    numbers,
    op_kind,
    opened,
    references,
    rejected,
    require,
    shift_numbers,
)
from agentflow.protocol.sampling import GenParams

GRAPH: tuple[ops.Op, ...] = (
    ops.Open(1),
    ops.Expect(1, 2, "question"),
    ops.Text(1, ("a", ops.Ref(2))),
    ops.Fork(1, (3, 4)),
    ops.Gen(3, 5, "x", GenParams()),
    ops.Seal(3),
    ops.Set(4, 6, "y", (ops.Ref(5),)),
    ops.Done(4, 7, "end"),
    ops.TaskGroup(1, (3, 4)),
)


def test_every_op_has_a_row() -> None:
    assert set(OPS) == set(get_args(ops.Op))


def test_every_field_that_may_hold_numbers_has_one_of_the_known_names() -> None:
    """A field of another name would be compared as content, and not be renumbered in a graph."""
    for op in OPS:
        for field in msgspec.structs.fields(op):
            if field.type in (int, tuple[int, ...]) and (op, field.name) not in (
                (ops.SubmitGraph, "outputs"),
                (ops.Upload, "size"),
                (ops.Upload, "at"),
                (ops.Watch, "max_nodes"),
                (ops.Peek, "node"),
            ):
                assert field.name in ("state", "var", "children", "ticket"), (op, field.name)
            if field.type == ops.Parts:
                assert field.name == "parts"


def test_the_functions_of_the_table_find_all_numbers() -> None:
    assert [numbers(op) for op in GRAPH[:4]] == [[1], [1, 2], [1, 2], [1, 3, 4]]
    assert [references(op) for op in (GRAPH[2], GRAPH[6])] == [[2], [5]]
    assert [opened(op) for op in GRAPH if opened(op)] == [(1,), (3, 4)]
    assert [declared(op)[0] for op in GRAPH if declared(op)] == [
        (2, "question"),
        (5, "x"),
        (6, "y"),
        (7, "end"),
    ]
    for op in GRAPH:
        assert numbers(shift_numbers(op, 10)) == [number + 10 for number in numbers(op)]
        assert sized(op) > 0


def test_a_graph_is_expanded_with_the_numbers_of_the_session_and_all_its_states_are_sealed() -> None:
    graph = ops.SubmitGraph(11, GRAPH, outputs=(7,))
    assert [*expanded(graph)] == [*[shift_numbers(op, 10) for op in GRAPH], ops.Seal(11), ops.Seal(14)]
    assert (opened(graph), declared(graph)) == ((11,), [(17, "end")])


@pytest.mark.parametrize("op", [op for op in OPS if not OPS[op].in_graph], ids=lambda op: op.__name__)
def test_an_op_that_may_not_stand_in_a_graph_is_rejected(op: type[ops.Op]) -> None:
    given = {ops.Await: (1, 1), ops.SubmitGraph: (1, ()), ops.Unwatch: (), ops.Peek: (1, 1)}
    given |= {ops.Upload: ("sha256:", 1, 0, b"a"), ops.Release: ("sha256:",)}
    with pytest.raises(ProtocolError):
        [*expanded(ops.SubmitGraph(1, (ops.Open(1), op(*given.get(op, (1,))))))]


def test_a_rejected_op_names_what_it_would_have_declared() -> None:
    error = ProtocolError("why")
    assert rejected(GRAPH[4], error).names == {5: "x"}
    assert rejected(GRAPH[3], error).children == (3, 4)
    assert rejected(ops.Provide(2), error).names == {2: ""}
    assert rejected(ops.SubmitGraph(11, GRAPH, outputs=(7,)), error).names == {17: "end"}
    assert {rejected(op, error).kind for op in GRAPH} == {op_kind(op) for op in GRAPH}


def shown(source: str) -> list[ops.Op]:
    """The ops that show an image."""
    message = Message("user", "", images=(PlacedImage(0, Image(source)),))
    return [ops.Image(1, source), ops.Converse(1, Conversation((message,)))]


@pytest.mark.parametrize("number", [0, 1])
def test_an_image_needs_a_model_with_vision(number: int) -> None:
    op = shown("https://example.org/x.png")[number]
    check_received_op(op)
    require(op, Capabilities("m", conversations=True, images=True))
    with pytest.raises(NotSupported):
        require(op, Capabilities("m", conversations=True))


@pytest.mark.parametrize("num_frames", [None, 4])
@pytest.mark.parametrize("number", [0, 1])
def test_a_video_needs_a_model_that_reads_videos(number: int, num_frames: int | None) -> None:
    url = "https://example.org/x.mp4"
    message = Message("user", "", images=(PlacedImage(0, Image(url), True, num_frames),))
    op = [ops.Video(1, url, num_frames), ops.Converse(1, Conversation((message,)))][number]
    check_received_op(op)
    require(op, Capabilities("m", conversations=True, videos=True))
    with pytest.raises(NotSupported):
        require(op, Capabilities("m", conversations=True, images=True))
    chooses = Capabilities("m", conversations=True, videos=True, video_frames=False)
    if num_frames is None:
        require(op, chooses)
    else:
        with pytest.raises(NotSupported):
            require(op, chooses)


@pytest.mark.parametrize("num_frames", [0, -1, MAX_FRAMES + 1])
def test_a_video_has_a_possible_number_of_frames(num_frames: int) -> None:
    op = ops.Video(1, "https://example.org/x.mp4", num_frames)
    with pytest.raises(BadArgument):
        check_received_op(op)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "source", ["http://example.org/x.png", "file:///x.png", "data:image/png;base64,", "https:" + "x" * 9_000]
)
def test_an_image_is_an_uploaded_file_or_behind_https(source: str, number: int) -> None:
    op = shown(source)[number]
    with pytest.raises(BadArgument):
        check_received_op(op)
