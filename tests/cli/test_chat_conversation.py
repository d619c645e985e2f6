"""A conversation: turns on one state, and an answer that is stopped."""

import io
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from rich.console import Console

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.cli.chat import Answered, TerminalConversation, default_sampling, run_chat, without_controls
from agentflow.language.expressions import ImageExpression
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.protocol.events import Capabilities, Usage
from agentflow.runtime.generator import Generated
from agentflow.runtime.task_group import open_task_group

pytestmark = pytest.mark.anyio


class Talkative:
    """Answers with the prompt's text; begins and never ends where the user says ``hang``, and does not even
    begin at ``silence``. ``refuse`` is refused."""

    def __init__(self) -> None:
        self.has_hung = anyio.Event()
        self.goes_on = anyio.Event()
        outer = self

        class Generator(ScriptedGenerator):
            async def generate(
                self, context: ScriptedContext, params, on_text, constraint=None, on_reasoning=None
            ):
                question = context.text.rpartition("<user>")[2].partition("</user>")[0]
                question = question.replace("<image>", "")
                if question.startswith("think"):
                    return await self._think(context, question, on_text, on_reasoning)
                if question in ("hang", "silence"):
                    if question == "hang":
                        on_text("begun ")
                    outer.has_hung.set()
                    await anyio.sleep_forever()
                return await super().generate(context, params, on_text, constraint)

            async def _think(self, context: ScriptedContext, question, on_text, on_reasoning):
                if on_reasoning is not None:
                    for piece in ("It is\x1b[2J ", "hard."):
                        on_reasoning(piece)
                        if question == "think and wait":
                            await outer.goes_on.wait()
                context.text += "Yes."
                on_text("Yes.")
                return Generated(
                    "Yes.", "eos", Usage(4, 0, 7, reasoning_tokens=3), reasoning="It is\x1b[2J hard."
                )

        def answer(prompt: str) -> str | Exception:
            if prompt.endswith("lost</user><assistant>"):
                return af.ServerLost("the server was shut down")
            return af.PromptTooLong("too long") if prompt.endswith("refuse</user><assistant>") else prompt

        self.generator = Generator(answer)

    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        return self._connect(deliver)

    @asynccontextmanager
    async def _connect(self, deliver: Deliver) -> AsyncIterator[Connection]:
        async with interpreted(self.generator, deliver) as connection:
            yield connection


async def test_turns_follow_each_other_on_one_state():
    async with af.session(backend=Talkative()) as flow:
        conversation = TerminalConversation(flow, system_text="Be kind.")
        shown: list[str] = []
        first = await conversation.ask("Who are you?", shown.append)
        prompt = "<system>Be kind.</system><user>Who are you?</user><assistant>"
        assert first.text == "".join(shown) == prompt
        assert (first.finish_reason, first.usage) == ("eos", Usage(4, 0, 4))
        assert 0 <= first.ttft_s <= first.took_s
        second = await conversation.ask("And?", shown.append)
        assert second.text == f"{prompt}{first.text}</assistant><user>And?</user><assistant>"


async def test_reasoning_is_shown_as_it_comes_and_is_no_part_of_the_answer():
    backend = Talkative()
    shown: list[str] = []

    def show_reasoning(text: str) -> None:
        shown.append(text)
        backend.goes_on.set()  # not before

    async with af.session(backend=backend) as flow:
        conversation = TerminalConversation(flow)
        answered = await conversation.ask("think and wait", shown.append, show_reasoning)
        assert shown == ["It is\x1b[2J ", "hard.", "Yes."]
        assert answered.text == "Yes."
        assert (await conversation.ask("And?", print)).text.count("hard") == 0


@pytest.mark.parametrize("reasoning", [True, False])
def test_the_terminal_shows_reasoning_before_the_answer(capsys: pytest.CaptureFixture[str], reasoning: bool):
    lines = iter(["think", "/exit"])
    console = Console(file=io.StringIO(), width=200)
    run_chat(
        af.session(backend=Talkative()),
        read=lambda: next(lines),
        console=console,
        system=None,
        reasoning=reasoning,
    )
    assert capsys.readouterr().out == "Yes.\n"  # answers alone are on standard output
    said = console.file.getvalue()
    assert ("thinking…\nIt is[2J hard.\n" in said) == reasoning
    assert ("hard" in said) == reasoning
    assert "\x1b" not in said
    assert "3 of reasoning" in said


def test_f37_terminals_show_all_characters_but_controls():
    spaces = "10\u00a0000\u202fkm\u3000a\u200cb\u200dc\n\t"
    assert without_controls(spaces) == spaces
    assert without_controls("a\x1b\a\r\x9b\u202eb") == "ab"


@pytest.mark.parametrize(("lines", "succeeded"), [(["think"], True), (["refuse", "think"], False)])
def test_f37_a_failed_answer_is_a_failure_of_the_command(lines: list[str], succeeded: bool):
    given = iter([*lines, "/exit"])
    console = Console(file=io.StringIO())
    session = af.session(backend=Talkative())
    assert run_chat(session, read=lambda: next(given), console=console, system=None) == succeeded


PNG = b"\x89PNG\r\n\x1a\n a chart"


def talk(backend: Talkative, *lines: str) -> str:
    """Everything that the command says to these lines, but the answers."""
    given = iter([*lines, "/exit"])
    console = Console(file=io.StringIO(), width=200)
    run_chat(af.session(backend=backend), read=lambda: next(given), console=console, system=None)
    return console.file.getvalue()


def test_f37_a_lost_conversation_has_a_remedy():
    said = talk(Talkative(), "refuse", "lost")
    assert said.count("/reset starts a new one") == 1
    assert said.index("the server was shut down") < said.index("/reset starts")


def test_images_are_attached_to_the_next_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a chart.png").write_bytes(PNG)
    (tmp_path / "b.png").write_bytes(PNG + b"2")
    said = talk(
        Talkative(),
        f"/image {tmp_path}/a chart.png",
        f"/image '{tmp_path}/a chart.png'",  # the same
        f"/image {tmp_path}/a\\ chart.png",
        f"/image {tmp_path}/b.png",
        "refuse",
        "Which one?",
        "And now?",
    )
    assert said.count("(1 image attached") == 3
    assert said.count("(2 images attached") == 1
    refused, first, second = capsys.readouterr().out.splitlines()
    assert refused == ""  # the images are still attached then
    asked = "<user><image><image>Which one?</user><assistant>"
    assert first == asked
    assert second.startswith(asked)
    assert second.endswith("<user>And now?</user><assistant>")


def test_attached_images_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "b.png").write_bytes(PNG)
    for removing in ("/image", "/reset"):
        talk(Talkative(), f"/image {tmp_path}/b.png", removing, "What?")
        assert capsys.readouterr().out == "<user>What?</user><assistant>\n"


def test_an_image_that_cannot_be_attached_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "notes.txt").write_text("no image")
    said = talk(
        Talkative(), f"/image {tmp_path}/notes.txt", "/image 'missing.png", "/image http://a/b.png", "What?"
    )
    assert [line.partition(":")[0] for line in said.splitlines()[1:4]] == ["agentflow"] * 3
    blind = Talkative()
    blind.generator.capabilities = msgspec.structs.replace(blind.generator.capabilities, images=False)
    (tmp_path / "b.png").write_bytes(PNG)
    assert "does not accept images" in talk(blind, f"/image {tmp_path}/b.png", "What?")
    assert capsys.readouterr().out == "<user>What?</user><assistant>\n" * 2


async def test_a_stopped_turn_keeps_its_images():
    backend = Talkative()
    async with af.session(backend=backend) as flow:
        conversation = TerminalConversation(flow)
        await ask_and_stop(conversation, backend, "hang", speaks=True, images=[af.image(PNG)])
        following = await conversation.ask("And?", print)
    assert following.text.startswith("<user><image>hang</user><assistant>begun </assistant>")


async def test_after_a_stop_what_was_said_stays():
    backend = Talkative()
    async with af.session(backend=backend) as flow:
        conversation = TerminalConversation(flow)
        assert (await ask_and_stop(conversation, backend, "hang", speaks=True)).text == "begun "
        following = await conversation.ask("And?", print)
    assert following.text == ("<user>hang</user><assistant>begun </assistant><user>And?</user><assistant>")
    assert backend.generator.num_open == 0


async def test_an_answer_that_had_not_begun_leaves_nothing():
    backend = Talkative()
    async with af.session(backend=backend) as flow:
        conversation = TerminalConversation(flow)
        assert (await ask_and_stop(conversation, backend, "silence", speaks=False)).text == ""
        assert (await conversation.ask("And?", print)).text == "<user>And?</user><assistant>"


async def ask_and_stop(
    conversation: TerminalConversation,
    backend: Talkative,
    question: str,
    *,
    speaks: bool,
    images: Sequence[ImageExpression] = (),
) -> Answered:
    """``speaks``: stops the answer after some of it was shown, instead of as soon as it begins."""
    found: list[Answered] = []
    is_shown = anyio.Event()

    async def ask() -> None:
        found.append(await conversation.ask(question, lambda text: is_shown.set(), images=images))

    async with open_task_group() as group:
        group.start_soon(ask)
        await backend.has_hung.wait()
        if speaks:
            await is_shown.wait()
        conversation.stop()
    assert (found[0].usage, found[0].finish_reason) == (None, "stopped")
    return found[0]


async def test_a_refused_turn_leaves_the_conversation_where_it_was():
    async with af.session(backend=Talkative()) as flow:
        conversation = TerminalConversation(flow)
        with pytest.raises(af.PromptTooLong):
            await conversation.ask("refuse", print)
        conversation.stop()  # nothing runs
        assert (await conversation.ask("And?", print)).text == "<user>And?</user><assistant>"


async def test_a_reset_begins_anew_and_frees_what_was():
    backend = Talkative()
    async with af.session(backend=backend) as flow:
        conversation = TerminalConversation(flow, system_text="Be kind.")
        await conversation.ask("One?", print)
        conversation.reset("Be brief.")
        answered = await conversation.ask("Two?", print)
        assert answered.text == "<system>Be brief.</system><user>Two?</user><assistant>"
        assert conversation.system_text == "Be brief."
        assert backend.generator.num_open == 2  # the root and its turn


async def test_a_model_without_turns_is_refused():
    backend = Talkative()
    backend.generator.capabilities = Capabilities(model="base", roles=False)
    async with af.session(backend=backend) as flow:
        with pytest.raises(af.errors.NotSupported, match="base has no chat template"):
            TerminalConversation(flow)


def test_the_rate_is_of_the_tokens_after_the_first():
    answered = Answered("…", Usage(10, 5, 11), "eos", ttft_s=1.0, took_s=3.0)
    assert answered.tokens_per_s == 5
    assert Answered("…", Usage(10, 5, 1), "eos", ttft_s=1.0, took_s=3.0).tokens_per_s is None
    assert Answered("…", None, "stopped", ttft_s=1.0, took_s=3.0).tokens_per_s is None


@pytest.mark.parametrize(
    ("sampling", "chosen"),
    [
        (None, {"temperature": 0.7, "top_p": 0.95, "max_tokens": 512}),
        (("max_tokens", "temperature"), {"max_tokens": 512}),
        (("max_tokens", "max_reasoning_tokens"), {}),
        ((), {}),
    ],
)
def test_only_engines_get_the_sampling_of_the_command(
    sampling: tuple[str, ...] | None, chosen: dict[str, float]
):
    """Some models behind APIs refuse any temperature, and count their reasoning as output."""
    assert default_sampling(Capabilities("m", sampling=sampling)) == chosen


def test_options_replace_the_defaults_of_the_command(capsys: pytest.CaptureFixture[str]):
    backend = af.Scripted(str)
    lines = iter(["Hi", "/exit"])
    run_chat(
        af.session(backend=backend),
        read=lambda: next(lines),
        console=Console(file=io.StringIO()),
        system=None,
        temperature=0.0,
        top_p=None,
    )
    assert capsys.readouterr().out
    assert [(call.params.temperature, call.params.top_p) for call in backend.calls] == [(0.0, 0.95)]
