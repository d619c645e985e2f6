"""Well-behaved clients of a soak run: the server must answer each, or reject it as documented."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import anthropic
import openai
from websockets.asyncio.client import connect as connect_websocket

import agentflow as af
from agentflow.errors import EngineFailed, Overloaded
from agentflow.protocol import ops
from agentflow.protocol.events import Event, Value, VarFailed
from agentflow.protocol.sampling import GenParams
from agentflow.protocol.wire import (
    SESSION_PATH,
    VERSION,
    Bye,
    ClientFrame,
    Events,
    Hello,
    Ops,
    Resume,
    Welcome,
    encode,
    server_frames,
)
from benchmarks.soak.raw_http import Answer, Request, exchange
from benchmarks.soak.server import MODEL, SoakServer

ANSWER_S = 180.0
ANSWERED = "answered"
# The errors of a server that is busy or has lost its engine.
_BUSY = {429, 503, 529}
_SUBJECTS = [
    "the sea",
    "old bridges",
    "bread",
    "a comet",
    "chess",
    "rain",
    "the violin",
    "salt",
    "owls",
    "maps",
]


class WrongAnswer(Exception):
    """A well-behaved client was not answered as it should have been."""


@dataclass(frozen=True)
class Target:
    """A server, and the random numbers of one client."""

    server: SoakServer
    random: Random

    @property
    def base_url(self) -> str:
        """The address of the HTTP APIs."""
        return f"http://127.0.0.1:{self.server.port}"

    def prompt(self) -> str:
        """Returns a prompt that is long and varied enough to keep the cache full, often with an earlier
        prefix."""
        family = self.random.randrange(12)
        beginning = f"Notes {family}. " + " ".join(f"{word} {family}" for word in _SUBJECTS * 8)
        return f"{beginning}\nTell me about {self.random.choice(_SUBJECTS)} ({self.random.randrange(10**6)})."

    def chat(self, *, stream: bool = False, max_tokens: int | None = None) -> dict[str, Any]:
        """Returns a request for a chat completion."""
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.prompt()}],
            "max_tokens": max_tokens or self.random.choice([4, 8, 16, 32]),
            "temperature": self.random.choice([0.0, 1.0]),
            "stream": stream,
        }


Scenario = Callable[[Target], Awaitable[str]]


def _outcome(answer: Answer, check: Callable[[Any], bool]) -> str:
    if answer.status in _BUSY:
        if not answer.json()["error"]["message"]:
            raise WrongAnswer(f"{answer.status} without a reason")
        return f"refused {answer.status}"
    if answer.status != 200 or not check(answer.json()):
        raise WrongAnswer(f"{answer.status} {answer.body[:200]!r}")
    return ANSWERED


async def raw_chat(target: Target) -> str:
    """A chat completion over a socket."""
    answer = await exchange(
        target.server.port, Request("POST", "/v1/chat/completions", target.chat()), timeout_s=ANSWER_S
    )
    return _outcome(answer, lambda body: body["choices"][0]["finish_reason"] in ("stop", "length"))


async def raw_chat_stream(target: Target) -> str:
    """A streamed chat completion, read to its end."""
    request = Request("POST", "/v1/chat/completions", target.chat(stream=True))
    answer = await exchange(target.server.port, request, timeout_s=ANSWER_S)
    if answer.status != 200:
        return _outcome(answer, lambda _: False)
    blocks = answer.body.decode().split("\n\n")
    # The server sends comments while there is nothing else to send.
    events = [block.removeprefix("data: ") for block in blocks if block and not block.startswith(":")]
    if '"error"' in events[-1] or (len(events) > 1 and '"error"' in events[-2]):
        return "refused in the stream"
    if events[-1] != "[DONE]" or not any(
        choice.get("finish_reason") for event in events[:-1] for choice in json.loads(event)["choices"]
    ):
        raise WrongAnswer(f"a stream ended with {events[-2:]}")
    return ANSWERED


async def models_and_tokens(target: Target) -> str:
    """Sends requests that need no engine."""
    port = target.server.port
    listing = await exchange(port, Request("GET", "/v1/models"), timeout_s=ANSWER_S)
    text = target.prompt()
    tokens = await exchange(
        port, Request("POST", "/tokenize", {"model": MODEL, "prompt": text}), timeout_s=ANSWER_S
    )
    _outcome(listing, lambda body: body["data"][0]["id"] == MODEL)
    return _outcome(tokens, lambda body: body["count"] > 100)


async def openai_client(target: Target) -> str:
    """OpenAI's client, streaming or not, with or without a schema."""
    async with openai.AsyncOpenAI(
        api_key="none", base_url=f"{target.base_url}/v1", timeout=ANSWER_S, max_retries=0
    ) as client:
        request = target.chat()
        del request["stream"]
        try:
            if target.random.random() < 0.5:
                stream = await client.chat.completions.create(**request, stream=True)
                reasons = [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]
                is_right = reasons[-1] in ("stop", "length")
            else:
                schema = {
                    "type": "object",
                    "properties": {"n": {"type": "integer", "maximum": 99}},
                    "required": ["n"],
                    "additionalProperties": False,
                }
                request["response_format"] = {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": schema, "strict": True},
                }
                request["max_tokens"] = 24
                done = await client.chat.completions.create(**request)
                choice = done.choices[0]
                is_right = choice.finish_reason == "length" or "n" in json.loads(choice.message.content or "")
        except openai.APIStatusError as error:
            return _refused(error.status_code, error)
        except openai.APIError as error:
            return _refused_in_stream(error)
    if not is_right:
        raise WrongAnswer("OpenAI's client received no valid answer")
    return ANSWERED


async def anthropic_client(target: Target) -> str:
    """Anthropic's client, streaming or not."""
    async with anthropic.AsyncAnthropic(
        api_key="none", base_url=target.base_url, timeout=ANSWER_S, max_retries=0
    ) as client:
        request = target.chat()
        del request["stream"], request["temperature"]
        try:
            if target.random.random() < 0.5:
                async with client.messages.stream(**request) as stream:
                    async for _ in stream.text_stream:
                        pass
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**request)
        except anthropic.APIStatusError as error:
            return _refused(error.status_code, error)
        except anthropic.APIError as error:
            return _refused_in_stream(error)
    if message.stop_reason not in ("end_turn", "max_tokens"):
        raise WrongAnswer(f"a message stopped for {message.stop_reason}")
    return ANSWERED


def _refused(status: int, error: Exception) -> str:
    # A stream that has begun has status 200, and its error in an event.
    if status not in _BUSY and status != 200:
        raise WrongAnswer(f"{status}: {error}")
    return f"refused {status}" if status != 200 else "refused in the stream"


def _refused_in_stream(error: Exception) -> str:
    if isinstance(error, openai.APIConnectionError | anthropic.APIConnectionError):
        raise WrongAnswer(f"the connection broke: {error!r}")
    return "refused in the stream"


@af.program
async def _weigh(s: af.State, subject: str, prompt: str) -> int:
    """Branches whose judgments flow into the verdict inside the engine."""
    s += af.system("You weigh things.")
    s += af.user(prompt)
    s += af.assistant(af.select("known", ["yes", "no"]))
    async with s.fork(3) as branches:
        for branch, side in zip(branches, ("use", "beauty", "age"), strict=True):
            branch += af.user(f"The {side} of {subject}?")
            branch += af.assistant(af.gen("judgment", max_tokens=8, temperature=0.7))
    s += af.user("Judgments:")
    for branch in branches:
        s += branch["judgment"]
    verdict = af.gen("verdict", regex="good|bad")
    s += af.assistant(verdict)
    await s["known"]
    return len(await s["verdict"])


async def program(target: Target) -> str:
    """A program in a session, which sometimes cancels one of its states or requests statistics."""
    try:
        async with af.session(target.server.url) as flow:
            if await flow.run(_weigh, target.random.choice(_SUBJECTS), target.prompt()) not in (3, 4):
                raise WrongAnswer("the result is none of the choices")
            async with flow.state() as s:
                s += target.prompt()
                s += af.gen("long", max_tokens=500)
                async for _ in s["long"]:
                    s.cancel()
                    break
    except (EngineFailed, Overloaded) as error:
        return f"refused {error.code}"
    except af.Cancelled:
        pass
    return ANSWERED


async def resume(target: Target) -> str:
    """A client that loses its connection and resumes: no text is lost or repeated."""
    url = f"{target.server.url}{SESSION_PATH}"
    decoder = server_frames()
    prompt, var = target.prompt(), 2
    text = ""
    async with connect_websocket(url, compression=None, max_size=None) as socket:
        await socket.send(_frame(Hello(VERSION)))
        welcome = decoder.decode(await socket.recv())
        if not isinstance(welcome, Welcome):
            return f"refused {welcome.error.code}" if hasattr(welcome, "error") else "refused"
        gen = ops.Gen(1, var, "tale", GenParams(max_tokens=24, ignore_eos=True))
        await socket.send(_frame(Ops(1, (ops.Open(1), ops.Text(1, (prompt,)), gen))))
        while not text:
            for event in _events(decoder.decode(await socket.recv())):
                if isinstance(event, VarFailed):
                    return f"refused {event.error.code}"
                text += getattr(event, "text", "")
        socket.transport.abort()
    async with connect_websocket(url, compression=None, max_size=None) as socket:
        back = Resume(welcome.session, welcome.secret, {var: len(text)})
        await socket.send(_frame(Hello(VERSION, back)))
        while True:
            frame = decoder.decode(await socket.recv())
            for event in _events(frame):
                if isinstance(event, VarFailed):
                    return f"refused {event.error.code}"
                if getattr(event, "at", len(text)) != len(text):
                    raise WrongAnswer("text was lost or repeated")
                text += getattr(event, "text", "")
                if isinstance(event, Value):
                    await socket.send(_frame(Bye()))
                    return ANSWERED


def _frame(frame: ClientFrame) -> bytes:
    return encode(frame, binary=True)


def _events(frame: object) -> tuple[Event, ...]:
    if isinstance(frame, Events):
        return frame.events
    if isinstance(frame, Welcome):
        return ()
    raise WrongAnswer(f"{frame!r} came")


SCENARIOS: dict[Scenario, int] = {
    raw_chat: 4,
    raw_chat_stream: 4,
    models_and_tokens: 2,
    openai_client: 4,
    anthropic_client: 4,
    program: 5,
    resume: 4,
}
"""The scenarios, with their weights."""
