"""The longest time for which one request can block all others: bodies and frames of the largest size, in the
worst known shapes, block the server's event loop.

``python -m benchmarks.server.stalls PORT`` is the client. It sends one shape after the other, and prints the
name of each before sending and the status after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterator, Sequence

import anyio
import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect

from agentflow.engine.machine.resources import collect_garbage_rarely
from agentflow.protocol import ops
from agentflow.protocol.bounds.json_bounds import OBJECT_BOUNDS
from agentflow.protocol.chat import CalledTool, Conversation, Message, ToolSpec
from agentflow.protocol.text.transform import Transform
from agentflow.protocol.wire import SESSION_PATH, VERSION, Hello, Ops, encode
from benchmarks.report import Report

MODEL = b"smollm2-135m"
BODY_BYTES = 15_900_000
FRAME_BYTES = 7_900_000
PARTS = 99_000  # just within the bound
IDS = 499_000  # just within the bound
WIDE_BYTES = 7_900_000  # just within the bound
TICK_S = 0.001

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HEAD = b'{"model":"' + MODEL + b'","max_tokens":1,'
USER = b'"messages":[{"role":"user","content":"x"}'
DEEP = b"[" * 180 + b"]" * 180
CALL = b'{"id":"a","type":"function","function":{"name":"a","arguments":"{}"}}'


def repeated(part: bytes, *, num_bytes: int = BODY_BYTES) -> bytes:
    """Repeats the part as often as it fits into a body, separated by commas."""
    return b",".join([part] * (num_bytes // (len(part) + 1)))


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yields a name, a path and a body for each shape."""
    schema = b',"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":[%b]}}}}'
    tool = b',"tools":[{"type":"function","function":{"name":"a","parameters":{"enum":[%b]}}}]}'
    calls = b',{"role":"assistant","tool_calls":[%b]}]}'
    of_call = b',{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"a","arguments":'
    of_call += b'"{\\"a\\":[%b]}"}}]}]}'
    said = HEAD + b'"messages":[{"role":"user","content":"%b"}]}'
    few = b",".join([DEEP] * (OBJECT_BOUNDS.parts // len(DEEP) * 2 - 2))
    yield "schema, deep lists", CHAT, HEAD + USER + b"]" + schema % repeated(DEEP)
    yield "schema, deep lists, few", CHAT, HEAD + USER + b"]" + schema % few
    yield "tools, deep lists", CHAT, HEAD + USER + b"]" + tool % repeated(DEEP)
    yield "tools, deep lists, few", CHAT, HEAD + USER + b"]" + tool % few
    yield "tool calls", CHAT, HEAD + USER + calls % repeated(CALL)
    yield "tool calls, few", CHAT, HEAD + USER + calls % repeated(CALL, num_bytes=PARTS // 11 * len(CALL))
    yield "arguments, deep lists", CHAT, HEAD + USER + of_call % repeated(DEEP)
    yield "arguments, deep lists, few", CHAT, HEAD + USER + of_call % few
    yield "text", CHAT, said % (b"word, " * (BODY_BYTES // 6))
    yield "text of escapes", CHAT, said % (b"\\n" * (BODY_BYTES // 2))
    yield "text of 3 bytes a character", CHAT, said % ("€".encode() * (BODY_BYTES // 3))
    yield "text of 2 bytes a character, few", CHAT, said % ("д".encode() * (WIDE_BYTES // 2))
    yield "unread lists", CHAT, HEAD + USER + b'],"prediction":[' + repeated(b"[]") + b"]}"
    yield (
        "unread members, few",
        CHAT,
        (HEAD + USER + b'],"metadata":{' + b",".join([b'"%d":""' % n for n in range(PARTS // 2)]) + b"}}"),
    )
    yield "token ids", TEXT, HEAD + b'"prompt":[' + repeated(b"1") + b"]}"
    yield "token ids, few", TEXT, HEAD + b'"prompt":[' + repeated(b"1", num_bytes=2 * IDS) + b"]}"
    yield "prompts, few", TEXT, HEAD + b'"prompt":[' + repeated(b"[1]", num_bytes=4 * PARTS) + b"]}"
    yield (
        "tokenize",
        "/tokenize",
        b'{"model":"' + MODEL + b'","prompt":"' + b"word " * (BODY_BYTES // 5) + b'"}',
    )
    yield (
        "input, deep lists",
        MESSAGES,
        (
            HEAD
            + USER
            + b',{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"a","input":{"a":['
        )
        + repeated(DEEP)
        + b"]}}]}]}",
    )


def frames() -> Iterator[tuple[str, bool, bytes]]:
    """Yields a name, whether the frame is msgpack, and the frame, for each shape."""
    user = Message("user", "x")
    lists = ToolSpec("a", "", {"enum": [[]] * (FRAME_BYTES // 3)})
    few = ToolSpec("a", "", {"enum": [[]] * 49_000})
    calls = Message("assistant", "", tool_calls=(CalledTool("a", "a", "{}"),) * (FRAME_BYTES // 40))
    nested = Message(
        "assistant", "", tool_calls=(CalledTool("a", "a", '{"a":[' + "[]," * 2_500_000 + "1]}"),)
    )
    for name, conversation in (
        ("converse, lists in a tool", Conversation((user,), (lists,))),
        ("converse, lists in a tool, few", Conversation((user,), (few,))),
        ("converse, tool calls", Conversation((user, calls))),
        ("converse, lists in arguments", Conversation((user, nested))),
        (
            "converse, numbers in a tool, few",
            Conversation((user,), (ToolSpec("a", "", {"enum": [1] * IDS}),)),
        ),
    ):
        for is_binary in (True, False):
            frame = Ops(1, (ops.Open(1), ops.Converse(1, conversation), ops.Await(1, 1)))
            yield f"{name}, {'msgpack' if is_binary else 'JSON'}", is_binary, encode(frame, binary=is_binary)
    for is_binary in (True, False):
        frame = Ops(1, (ops.Open(1), ops.Text(1, ("д" * (FRAME_BYTES // 2),)), ops.Await(1, 1)))
        name = f"op of 2 bytes a character, {'msgpack' if is_binary else 'JSON'}"
        yield name, is_binary, encode(frame, binary=is_binary)


def sequences() -> Iterator[tuple[str, list[ops.Op]]]:
    """Yields a name and the ops of a session, for each shape."""
    transforms = tuple([Transform(name) for name in ("upper", "lower") * 8])
    text = "Ä word of a text. " * 20_000
    sets: list[ops.Op] = [ops.Open(1), ops.Set(1, 1, "v", (text,))]
    sets += [ops.Text(1, (ops.Ref(1, transforms),) * 20)] * 10
    yield "20 references through 16 transforms", [*sets, ops.Await(1, 1)]
    yield (
        "a value of 4,000,000 characters",
        [ops.Open(1), ops.Set(1, 1, "v", ("д" * 3_900_000,)), ops.Await(1, 1)],
    )
    branches = [ops.Fork(1, (state,)) for state in range(2, 2_500)]
    graph: tuple[ops.Op, ...] = (ops.Open(1), *branches, *[ops.Hint(1)] * (9_999 - len(branches)))
    yield "a graph of 10,000 ops", [ops.SubmitGraph(1, graph)]
    forks: list[ops.Op] = [ops.Open(1)]
    for first in range(2, 8_002, 2_000):
        forks.append(ops.Fork(1, tuple(range(first, first + 2_000))))
    yield "8,000 branches", [*forks, ops.Await(1, 1)]
    yield "8,000 branches cancelled", [*forks, ops.Cancel(1)]
    waiting = [*forks, ops.Expect(1, 1, "v"), *[ops.Text(state, (ops.Ref(1),)) for state in range(2, 8_002)]]
    waiting += [ops.Set(8_001, 2, "w", (ops.Ref(1),)), ops.Text(1, (ops.Ref(2),)), ops.Await(1, 1)]
    yield "8,000 branches that wait for one variable", [*waiting, ops.Provide(1, "a text")]
    chain: list[ops.Op] = [ops.Open(1)]
    for state in range(1, 3_000):
        chain += [ops.Fork(state, (state + 1,)), ops.TaskGroup(state, (state + 1,))]
    yield "a chain of 3,000 task groups that fails", [*chain, ops.Text(3_000, (ops.Ref(99),))]


def put_ops(port: int, sent: Sequence[ops.Op]) -> str:
    """Sends ops, and returns the number of frames until the root has reached its ticket or failed."""
    with connect(f"ws://127.0.0.1:{port}{SESSION_PATH}", max_size=None) as socket:
        socket.send(encode(Hello(VERSION), binary=True))
        socket.recv()
        for first in range(0, len(sent), 500):
            socket.send(encode(Ops(first + 1, tuple(sent[first : first + 500])), binary=True))
        for number in itertools.count(1):
            try:
                received = msgspec.msgpack.decode(bytes(socket.recv()))  # type: ignore[arg-type]
            except ConnectionClosed:
                return "closed"
            events = received.get("events", ())
            if any(event.get("state") == 1 or event.get("op") == "refused" for event in events):
                return f"{number} frames"
    return ""


def put_pongs(port: int) -> str:
    """Sends 256 KB of frames without data on each of eight websockets."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(connect(f"ws://127.0.0.1:{port}{SESSION_PATH}", max_size=None))
            for _ in range(8)
        ]
        for one in sockets:
            one.send(encode(Hello(VERSION), binary=True))
            one.recv()
        pong = Frame(Opcode.PONG, b"").serialize(mask=True)
        for one in sockets:
            one.socket.sendall(pong * (256_000 // len(pong)))
        for one in sockets:
            one.send(encode(Ops(1, (ops.Open(1), ops.Await(1, 1))), binary=True))
        for one in sockets:
            one.recv()
    return "answered"


def delete_item(port: int) -> str:
    """Deletes an item of a conversation of the largest size."""
    item = {"type": "message", "role": "user", "content": "word, " * 20_000}
    body = msgspec.json.encode({"items": [item] * 20})
    headers = {"content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)

    def asked(method: str, path: str, data: bytes | None = None) -> dict[str, str]:
        connection.request(method, path, data, headers)
        answer: dict[str, str] = msgspec.json.decode(connection.getresponse().read())
        return answer

    try:
        place = f"/v1/conversations/{asked('POST', '/v1/conversations', b'{}')['id']}/items"
        for _ in range(24):
            last = asked("POST", place, body)["last_id"]
        connection.request("DELETE", f"{place}/{last}")
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    finally:
        connection.close()


def put_body(port: int, path: str, body: bytes) -> str:
    """Sends a body, and returns the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    with contextlib.suppress(OSError):  # the server rejected the body before its end
        connection.request("POST", path, body, {"content-type": "application/json"})
    try:
        return str(connection.getresponse().status)
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


def put_frame(port: int, is_binary: bool, frame: bytes) -> str:
    """Sends a frame, and returns the kind of the answer."""
    hello = encode(Hello(VERSION), binary=is_binary)
    with connect(f"ws://127.0.0.1:{port}{SESSION_PATH}", max_size=None) as socket:
        try:
            socket.send(hello if is_binary else hello.decode())
            socket.recv()
            socket.send(frame if is_binary else frame.decode())
            received = socket.recv()
            data = (
                received
                if isinstance(received, bytes)
                else msgspec.msgpack.encode(msgspec.json.decode(received))
            )
            return str(msgspec.msgpack.decode(data).get("frame"))
        except ConnectionClosed as closed:
            return str(closed.rcvd.code if closed.rcvd else "closed")


def send_all(port: int) -> None:
    """The client's main function: sends the next shape for each line of input."""

    def report(name: str, put: Callable[[], str]) -> None:
        print(name, flush=True)
        sys.stdin.readline()
        print(put(), flush=True)
        sys.stdin.readline()

    for name, path, body in bodies():
        report(name, lambda path=path, body=body: put_body(port, path, body))  # type: ignore[misc]
    for name, is_binary, frame in frames():
        report(name, lambda b=is_binary, frame=frame: put_frame(port, b, frame))  # type: ignore[misc]
    for name, sent in sequences():
        report(name, lambda sent=sent: put_ops(port, sent))  # type: ignore[misc]
    report("frames without data, eight websockets", lambda: put_pongs(port))
    report("an item of a long conversation deleted", lambda: delete_item(port))


class LoopWatch:
    """Measures the longest time between two iterations of the event loop."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        """Measures until cancelled."""
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(TICK_S)  # noqa: TID251 - its duration is measured
            self.longest_s = max(self.longest_s, time.perf_counter() - began_s - TICK_S)


async def measure_stalls(report: Report, port: int) -> None:
    """Measures ``max_stall_ms`` of the worst shape; the note has the others."""
    collect_garbage_rarely()  # as ``agentflow serve`` does
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.server.stalls", str(port)),
        stdin=PIPE,
        stdout=PIPE,
        stderr=None,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    watch = LoopWatch()
    stalls: dict[str, tuple[float, str]] = {}
    async with anyio.create_task_group() as group:
        group.start_soon(watch.run)
        while name := (await client.stdout.readline()).decode().strip():
            watch.longest_s = 0.0
            client.stdin.write(b"\n")
            status = (await client.stdout.readline()).decode().strip()
            stalls[name] = (watch.longest_s * 1000, status)
            client.stdin.write(b"\n")
        group.cancel_scope.cancel()
    if await client.wait():
        raise RuntimeError("the client of the benchmark failed")
    worst = sorted(stalls.items(), key=lambda item: -item[1][0])
    note = "; ".join([f"{name}: {ms:.0f} ({status})" for name, (ms, status) in worst])
    report.median("server.max_stall_ms", [worst[0][1][0]], "ms", goal="<= 50", note=note)


if __name__ == "__main__":
    send_all(int(sys.argv[1]))
