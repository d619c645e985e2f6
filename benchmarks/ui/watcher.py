"""``python -m benchmarks.ui.watcher PORT INTERVAL_S``: watches a server as the page does, until it is ended.

It reads all events and draws nothing: a browser would use the cores that the server is measured on. Prints a
line when it has received the first event.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import websockets

from agentflow.protocol import ops
from agentflow.protocol.wire import SESSION_PATH


async def main(port: int, interval_s: float) -> None:
    """Watches."""
    encode = msgspec.json.Encoder().encode
    watch = ops.Watch(1, interval_s=interval_s)
    async with websockets.connect(f"ws://127.0.0.1:{port}{SESSION_PATH}", max_size=None) as socket:
        await socket.send(encode({"frame": "hello", "version": 2}).decode())
        await socket.recv()
        await socket.send(encode({"frame": "ops", "first": 1, "ops": [watch]}).decode())
        has_begun = False
        async for frame in socket:
            if not has_begun and b'"watched"' in (frame.encode() if isinstance(frame, str) else frame):
                has_begun = True
                print("watching", flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
