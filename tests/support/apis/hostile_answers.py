"""Answers that no server should give, for the streams of both APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from support.apis.fake_server import Answer, AnyAnswer, Close, Forever, Hold, RawAnswer, Reset, Step

HEAD = b"HTTP/1.1 200 Fake\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT_STREAM = "text/event-stream"


def written(events: Iterable[bytes], size: int) -> Answer:
    """The events in pieces of ``size`` bytes, which cut events and characters anywhere."""
    text = b"".join(events)
    return Answer([text[at : at + size] for at in range(0, len(text), size)], content_type=EVENT_STREAM)


def slow(events: Iterable[bytes], hold: Hold, after: int = 1) -> Answer:
    """A stream that falls silent after ``after`` events until the test lets it go on."""
    listed = list(events)
    return Answer([*listed[:after], hold, *listed[after:]], content_type=EVENT_STREAM)


def hostile(events: list[bytes]) -> dict[str, Callable[[], AnyAnswer]]:
    """The ways to spoil an answer, by name; each yields a new answer.

    Args:
        events: A complete, valid stream of at least three events.
    """
    begun = events[:-2]

    def streamed(*steps: Step) -> Answer:
        return Answer(list(steps), content_type=EVENT_STREAM)

    return {
        "truncated": lambda: streamed(*begun),
        "closed": lambda: streamed(*begun, Close()),
        "reset": lambda: streamed(*begun, Reset()),
        "reset at once": lambda: RawAnswer([Reset()]),
        "closed at once": lambda: RawAnswer([]),
        "empty": lambda: streamed(),
        "half an event": lambda: streamed(*begun, events[-2][: len(events[-2]) // 2], Close()),
        "half a character": lambda: streamed(*begun, 'data: {"text": "é'.encode()[:-1], Close()),
        "not UTF-8": lambda: streamed(events[0], b"data: \xff\xfe\xfa\n\n", *events[1:]),
        "not JSON": lambda: streamed(events[0], b"data: {not json\n\n", *events[1:]),
        "not an object": lambda: streamed(events[0], b"data: [1, 2]\n\n", *events[1:]),
        "a deep value": lambda: streamed(events[0], b"data: " + b"[" * 100_000 + b"\n\n", *events[1:]),
        "a huge line": lambda: streamed(events[0], Forever(b"x" * 65_536)),
        "a huge event": lambda: streamed(events[0], Forever(b"data: " + b"x" * 65_536 + b"\n")),
        "a wrong content type": lambda: Answer(b"<html>It works!</html>", content_type="text/html"),
        "no content type": lambda: Answer(b"It works!", content_type=None),
        "an empty body": lambda: Answer(b""),
        "an HTML error": lambda: Answer(b"<html>Bad Gateway</html>", 502, content_type="text/html"),
        "a JSON list as an error": lambda: Answer(b"[1, 2]", 400),
        "an error without a message": lambda: Answer(b'{"error": null}', 400),
        "an error of the wrong type": lambda: Answer(b'{"error": {"message": 7, "param": []}}', 400),
        "a huge error": lambda: Answer([Forever(b"x" * 65_536)], 400),
        "not HTTP": lambda: RawAnswer([b"SSH-2.0-OpenSSH_9.9\r\n"]),
        "half a header": lambda: RawAnswer([HEAD[:30]]),
        "a bad chunk": lambda: RawAnswer([HEAD, b"zz\r\nnothing\r\n"]),
        "a redirect": lambda: Answer(b"", 302, {"location": "http://127.0.0.1:1/"}),
    }
