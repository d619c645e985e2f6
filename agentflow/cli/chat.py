"""``agentflow chat``: a conversation in the terminal, or with one turn per line of a pipe.

The session's event loop runs in its own thread. The main thread reads lines and waits, so it receives
Ctrl-C at the prompt, and during an answer, which Ctrl-C stops. Answers are written to standard output, and
everything else to standard error.

Each turn runs on a copy of the conversation's state, which replaces the original when the answer is complete.
An answer can therefore be stopped without losing earlier turns. A copy shares the token ids: no text is
encoded twice, and earlier turns are in the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unicodedata import category

from anyio.from_thread import BlockingPortal, start_blocking_portal
from rich.console import Console
from rich.text import Text

from agentflow.backends.open_session import session as open_session
from agentflow.cli.command import Command, positive_int
from agentflow.cli.server_query import API_KEY_VARIABLE
from agentflow.cli.word_wrap import WordWrap
from agentflow.errors import AgentflowError, BadArgument, Cancelled, ServerLost, no_chat_template
from agentflow.language.expressions import ImageExpression, RoleExpression, assistant, system, user
from agentflow.language.gen import gen
from agentflow.language.media import image
from agentflow.language.session import Session
from agentflow.language.states.state import RootState, State
from agentflow.protocol.events import Capabilities, Usage

DEFAULTS: Final = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 512}
"""The defaults for engines. Models behind APIs use their vendor's defaults; some accept no other values."""


def default_sampling(model: Capabilities) -> dict[str, Any]:
    """The default arguments of a ``gen``. Answers of models behind APIs are limited unless the model may
    reason, because the limit would include the reasoning."""
    if model.sampling is None:
        return dict(DEFAULTS)
    is_limited = model.accepts("max_tokens") and not model.accepts("max_reasoning_tokens")
    return {"max_tokens": DEFAULTS["max_tokens"]} if is_limited else {}


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer and its times. ``usage``: None if it was stopped. ``ttft_s``: the time to its first text;
    ``took_s``: to its end."""

    text: str
    usage: Usage | None
    finish_reason: str
    ttft_s: float
    took_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """The rate after the first token; None if there are too few tokens."""
        writing_s = self.took_s - self.ttft_s
        if self.usage is None or self.usage.output_tokens < 2 or writing_s <= 0:
            return None
        return (self.usage.output_tokens - 1) / writing_s


class TerminalConversation:
    """A conversation with a model. ``sampling``: arguments of each ``gen``. ``NotSupported`` for a model
    without a chat template.

    >>> conversation = TerminalConversation(flow, system_text="You are a guide in a zoo.", max_tokens=32)
    >>> answered = await conversation.ask("What do elephants eat?", print)
    """

    def __init__(self, flow: Session, *, system_text: str | None = None, **sampling: Any) -> None:
        if not flow.capabilities.roles:
            raise no_chat_template(flow.capabilities.model)
        self._flow = flow
        self._sampling = sampling
        self._asked: State | None = None
        self._root: RootState | None = None
        self.reset(system_text)

    @property
    def system_text(self) -> str | None:
        """The text of the system turn, if there is one."""
        return self._system_text

    def reset(self, system_text: str | None) -> None:
        """Starts a new conversation."""
        if self._root is not None:
            self._root.close()
        self._root = self._flow.state()
        self._state: State = self._root
        self._system_text = system_text
        if system_text is not None:
            self._state.add(system(system_text))

    def check_images(self) -> None:
        """``NotSupported`` if the model does not read images."""
        self._flow.capabilities.require_images()

    async def ask(
        self,
        question: str,
        show: Callable[[str], None],
        show_reasoning: Callable[[str], None] | None = None,
        images: Sequence[ImageExpression] = (),
    ) -> Answered:
        """Returns the answer. ``show`` gets its text as it arrives, ``show_reasoning`` the reasoning before
        it. ``images`` precede the question. An error, or ``stop`` before the first text, leaves the
        conversation unchanged."""
        began_s = time.monotonic()
        first_s: float | None = None
        turn = self._state.copy()
        streams = show_reasoning is not None
        asked = user(*images, question)
        turn.add(asked + assistant(gen("answer", stream_reasoning=streams, **self._sampling)))
        variable = turn["answer"]
        self._asked = turn
        try:
            if show_reasoning is not None:
                async for reasoning in variable.reasoning_deltas():
                    show_reasoning(reasoning)
            async for text in variable:
                first_s = first_s or time.monotonic()
                show(text)
            await turn
        except Cancelled:
            self._keep(asked, variable.text)
        except AgentflowError:
            turn.cancel()
            raise
        else:
            self._state = turn
        finally:
            self._asked = None
        is_whole = self._state is turn
        ended_s = time.monotonic()
        return Answered(
            text=variable.text,
            usage=variable.usage if is_whole else None,
            finish_reason=variable.finish_reason if is_whole else "stopped",
            ttft_s=(first_s or ended_s) - began_s,
            took_s=ended_s - began_s,
        )

    def check_alive(self) -> None:
        """Raises the error that ended the session, if it has ended."""
        self._flow.check_alive()

    def stop(self) -> None:
        """Stops the current answer, if there is one. The conversation keeps its text so far."""
        if self._asked is not None:
            self._asked.cancel()

    def _keep(self, asked: RoleExpression, text: str) -> None:
        if text:
            self._state = self._state.copy()
            self._state.add(asked + assistant(text))


PROMPT = "> "
KEPT: Final = "\n\t\u200c\u200d"
"""Characters of answers that are shown, although they are not printable: the last two shape letters."""
HELP = """\
/image PATH     attach an image to the next message; without PATH: remove the attached images
/reset          start a new conversation
/system TEXT    start a new conversation with this system message; without TEXT: show the current one
/exit           exit (or Ctrl-D)
/help           show this help
Ctrl-C stops an answer. To send a line that begins with a slash, begin it with two."""


def run_chat(
    session: Session,
    *,
    read: Callable[[], str],
    console: Console,
    system: str | None,
    reasoning: bool = True,
    **sampling: Any,
) -> bool:
    """Runs a conversation. Returns whether all answers were complete or stopped.

    Args:
        session: The session, which is opened and closed here.
        read: Returns the next line; raises ``EOFError`` to end the conversation.
        console: Shows everything but the answers.
        system: The system message, if any.
        reasoning: Whether to show the reasoning of a model.
        sampling: Arguments of each ``gen``; None: the default of the model.
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    with start_blocking_portal("asyncio") as portal:
        with console.status("loading the model…") if console.is_terminal else contextlib.nullcontext():
            opening = portal.wrap_async_context_manager(session)
            flow = opening.__enter__()
        with contextlib.ExitStack() as stack:
            stack.push(opening)
            chosen = {**default_sampling(flow.capabilities), **given}
            conversation = portal.call(lambda: TerminalConversation(flow, system_text=system, **chosen))
            console.print(Text(f"{flow.capabilities.model}: /help lists the commands"), style="dim")
            return _Terminal(portal, conversation, console, shows_reasoning=reasoning).talk(read)


class _Terminal:
    def __init__(
        self,
        portal: BlockingPortal,
        conversation: TerminalConversation,
        console: Console,
        *,
        shows_reasoning: bool,
    ) -> None:
        self._portal = portal
        self._conversation = conversation
        self._console = console
        self._is_terminal = sys.stdout.isatty()
        can_wrap = self._is_terminal and console.is_terminal and not console.is_dumb_terminal
        self._wrap = WordWrap(lambda: console.width) if can_wrap else None
        self._shows_reasoning = shows_reasoning
        self._attached: dict[str, ImageExpression] = {}
        self._is_reasoning = False
        self._all_answered = True

    def talk(self, read: Callable[[], str]) -> bool:
        while True:
            try:
                line = read().strip()
            except EOFError:
                if sys.stdin.isatty():  # end the line of the prompt
                    self._say("")
                return self._all_answered
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                self._say("\n(press Ctrl-D, or type /exit, to exit)")
                continue
            command, _, rest = line.partition(" ")
            match command:
                case "":
                    pass
                case "/exit" | "/quit":
                    return self._all_answered
                case "/help":
                    self._say(HELP)
                case "/image":
                    self._attach(rest.strip())
                case "/reset":
                    self._reset(self._conversation.system_text)
                case "/system":
                    self._system(rest.strip())
                case _ if line.startswith("/") and not line.startswith("//"):
                    self._say(f"unknown command {command}: /help lists the commands")
                case _:
                    self._ask(line[1:] if line.startswith("//") else line)

    def _ask(self, question: str) -> None:
        show_reasoning = self._show_reasoning if self._shows_reasoning else None
        images = tuple(self._attached.values())
        future = self._portal.start_task_soon(
            self._conversation.ask, question, self._show, show_reasoning, images
        )
        try:
            try:
                answered = future.result()
            except KeyboardInterrupt:
                self._portal.call(self._conversation.stop)
                answered = future.result()
        except AgentflowError as error:
            self._all_answered = False
            self._end_answer()
            self._say(f"agentflow: {error}", style="red")
            self._portal.call(self._conversation.check_alive)
            if isinstance(error, ServerLost):  # the session reconnects, but the server had the conversation
                self._say("(the conversation is lost: /reset starts a new one)")
            return
        if answered.text or answered.usage is not None:
            self._attached.clear()  # they are part of the conversation
        self._end_answer()
        self._say(stats_line(answered))

    def _show(self, text: str) -> None:
        self._end_reasoning()
        if self._is_terminal:
            text = without_controls(text)
        print(self._wrapped(text), end="", flush=True)

    def _end_answer(self) -> None:
        self._end_reasoning()
        print(self._wrapped("\n"), end="", flush=True)

    def _wrapped(self, text: str) -> str:
        return text if self._wrap is None else self._wrap.push(text)

    def _show_reasoning(self, text: str) -> None:
        if not self._is_reasoning:
            self._is_reasoning = True
            self._say("thinking…", style="dim italic")
        self._write_reasoning(self._wrapped(without_controls(text)))

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            self._is_reasoning = False
            self._write_reasoning(self._wrapped("\n\n"))

    def _write_reasoning(self, text: str) -> None:
        self._console.out(text, style="dim", end="", highlight=False)

    def _attach(self, path: str) -> None:
        if not path:
            self._attached.clear()
            self._say("(no image is attached)")
            return
        try:
            self._conversation.check_images()
            found = image(_written_path(path))
        except AgentflowError as error:
            self._say(f"agentflow: {error}", style="red")
            return
        self._attached[found.image.source] = found
        count = len(self._attached)
        self._say(f"({count} image{'s' * (count != 1)} attached to the next message)")

    def _system(self, text: str) -> None:
        if text:
            self._reset(text)
        else:
            self._say(self._conversation.system_text or "(no system message)")

    def _reset(self, system: str | None) -> None:
        self._attached.clear()
        self._portal.call(self._conversation.reset, system)
        self._say("(a new conversation)")

    def _say(self, text: str, style: str = "dim") -> None:
        self._console.print(Text(text), style=style, soft_wrap=not self._console.is_terminal)


def _written_path(written: str) -> str:
    """The path or URL in the input, without quotes and backslashes, which terminals add to dropped files."""
    path = os.path.expanduser(written)
    if os.path.exists(path):
        return path
    try:
        words = shlex.split(written)
    except ValueError:  # no closing quote
        return path
    return os.path.expanduser(words[0]) if len(words) == 1 else path


def without_controls(text: str) -> str:
    """The text without control characters, which must not reach the terminal."""
    return "".join([char for char in text if char.isprintable() or char in KEPT or category(char) == "Zs"])


def stats_line(answered: Answered) -> str:
    """The tokens and times of an answer in one line."""
    usage = answered.usage
    if usage is None:
        return f"(stopped after {answered.took_s:.1f} s)"
    parts = [f"{usage.output_tokens:,} token{'s' * (usage.output_tokens != 1)}"]
    if usage.reasoning_tokens:
        parts.append(f"{usage.reasoning_tokens:,} of reasoning")
    if answered.tokens_per_s is not None:
        parts.append(f"{answered.tokens_per_s:.1f} tokens/s")
    parts.append(f"first after {answered.ttft_s * 1000:,.0f} ms")
    parts.append(f"prompt of {usage.prompt_tokens:,}, {usage.hit_rate:.0%} cached")
    if usage.cost:
        parts.append(f"${usage.cost:.4g}")
    if answered.finish_reason == "length":
        parts.append("truncated at --max-tokens")
    return f"({', '.join(parts)})"


def _read_line() -> str:
    if sys.stdin.isatty():
        return input(PROMPT)
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise BadArgument(f"standard input is not UTF-8: {error}") from None
    if not line:
        raise EOFError
    return line


def _edit_lines() -> None:
    """Enables arrow keys and history if Python has readline. The history is not saved."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() uses it once it is imported)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--url",
        help="a server, such as ws://127.0.0.1:8410 (default: AGENTFLOW_URL, or none)",
    )
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model"
    )
    models.add_argument(
        "--model",
        metavar="NAME",
        help="a model's name, folder or GGUF file (default: smollm2-135m)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="a Jinja file that replaces the model's chat template, without a server",
    )
    add("--api-key", metavar="KEY", help=f"key (default: {API_KEY_VARIABLE}, or the vendor's variable)")
    add("--system", metavar="TEXT", help="the system message")
    add(
        "--temperature",
        type=float,
        metavar="N",
        help=f"0: always the most likely token ({DEFAULTS['temperature']}; an API's own)",
    )
    add(
        "--top-p",
        type=float,
        metavar="N",
        help="sample only from the most likely tokens, up to this probability "
        f"({DEFAULTS['top_p']}; an API's own)",
    )
    add(
        "--max-tokens",
        type=positive_int,
        metavar="N",
        help=f"limit of one answer ({DEFAULTS['max_tokens']}; none for models that may reason, behind APIs)",
    )
    add("--no-reasoning", action="store_true", help="do not show the reasoning of a model")
    add("--seed", type=int, metavar="N", help="with the same seed, the same lines get the same answers")


def _run(options: argparse.Namespace) -> int:
    session = open_session(
        options.url,
        model=options.model,
        chat_template=options.chat_template,
        api_key=options.api_key,  # without it, the session reads the variable of the address
        seed=options.seed,
    )
    _edit_lines()
    succeeded = run_chat(
        session,
        read=_read_line,
        console=Console(stderr=True),
        system=options.system,
        reasoning=not options.no_reasoning,
        temperature=options.temperature,
        top_p=options.top_p,
        max_tokens=options.max_tokens,
    )
    return 0 if succeeded or sys.stdin.isatty() else 1


COMMAND = Command(
    name="chat",
    summary="talk to a model in the terminal",
    description="""\
Talks to a model in this process, or to a server. Ctrl-C stops an answer,
Ctrl-D exits, and /help lists the commands. /image PATH attaches an image to
the next message, for models with vision. Without a terminal, each line of
standard input is one turn or command, and the exit status is 1 if an answer
fails.""",
    examples="""\
agentflow chat                                the default model
agentflow chat qwen3-0.6b                     another model
agentflow chat --url ws://127.0.0.1:8410      a server
agentflow chat --system "Answer in one sentence."
echo "Name three rivers." | agentflow chat 2>/dev/null
""",
    add_options=_add_options,
    run=_run,
)
