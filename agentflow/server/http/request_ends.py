"""Finds where requests end, so that the parser can stop there."""

from __future__ import annotations

from typing import Final

_MAX_LINE_BYTES: Final = 64
"""The beginning of a line that is kept. The size of a chunk is shorter."""


class RequestEnds:
    """Finds the ends of headers and of requests in a connection's bytes. httptools parses all that it is
    given, and does not report where a request has ended.

    A false end does no harm, so errors are left to the parser. Headers and trailers end with an empty line.
    """

    def __init__(self) -> None:
        self._line = b""  # the beginning of the current line
        self._has_line = False  # of headers or trailers, which end with the next empty line
        self._num_left = 0  # bytes of the body, or of a chunk and its line break
        self._is_chunked = False

    def begin_body(self, num_bytes: int | None) -> None:
        """The headers have ended.

        Args:
            num_bytes: The size of the body. None: it comes in chunks.
        """
        self._is_chunked = num_bytes is None
        self._num_left = num_bytes or 0

    def end_body(self) -> None:
        """The request has ended."""
        self._is_chunked = self._has_line = False
        self._num_left = 0

    def find(self, data: bytes, start: int, end: int) -> int:
        """Returns the end of the headers or of the request in ``data[start:end]``, or ``end``. The next call
        searches the bytes after it."""
        at = start
        while at < end:
            if self._num_left:
                num = min(self._num_left, end - at)
                self._num_left -= num
                at += num
                if not self._num_left and not self._is_chunked:
                    break
                continue
            stop = data.find(b"\n", at, end)
            last = end if stop < 0 else stop
            line = (self._line + data[at : min(last, at + _MAX_LINE_BYTES)])[:_MAX_LINE_BYTES]
            if stop < 0:
                self._line = line
                return end
            self._line = b""
            at = stop + 1
            if self._is_chunked:
                self._begin_chunk(line)
            elif line.rstrip(b"\r"):
                self._has_line = True
            elif self._has_line:
                self._has_line = False
                break
        return at

    def _begin_chunk(self, line: bytes) -> None:
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:  # the parser rejects it
            size = 0
        if size > 0:
            self._num_left = size + len(b"\r\n")
        else:  # trailers follow
            self._is_chunked, self._has_line = False, True
