"""Each misuse of the language raises an error that names it, and sends no op."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.faults import has_param
from support.observed_backends import Observed

import agentflow as af
from agentflow.protocol import ops
from agentflow.protocol.events import Capabilities

pytestmark = pytest.mark.anyio

PNG = b"\x89PNG\r\n\x1a\n rest"
URL = "https://example.com/a.png"


async def test_an_unknown_variable_is_rejected():
    async with af.session(backend=af.Scripted(["a"])) as flow, flow.state() as s:
        with pytest.raises(
            af.errors.UnknownVariable, match=r"'x' \(it has: none yet\): append its gen first"
        ):
            s["x"]
        s += af.gen("y")
        s += af.gen("z")
        for name in ("x", 0, None, ["y"], {}, af.gen("x"), slice(1)):
            with pytest.raises(af.errors.UnknownVariable, match=r"no variable .* \(it has: 'y', 'z'\)"):
                s[name]
        with pytest.raises(KeyError):
            s["x"]


USES = {
    "text": lambda s: s.add("x"),
    "gen": lambda s: s.add(af.gen("y")),
    "turn": lambda s: s.add(af.user("x")),
    "end": lambda s: s.end(),
    "set": lambda s: s.set("y", "z"),
    "read": lambda s: s.text(),
    "fork": lambda s: s.fork(2),
    "copy": lambda s: s.copy(),
    "hint": lambda s: s.hint(forks=2),
    "limit": lambda s: s.limit(output_tokens=2),
}


@pytest.mark.parametrize("use", USES)
async def test_a_state_cannot_be_used_after_its_scope(use):
    observed = Observed(af.Scripted(["a"]))
    async with af.session(backend=observed) as flow:
        async with flow.state() as s:
            s += af.gen("x")
            await s["x"]
        num_ops = len(observed.ops)
        with pytest.raises(af.errors.StateClosed, match=r"has ended"):
            USES[use](s)
        async with flow.state() as s:
            async with s.fork(1) as branches:
                pass
            if use != "read":  # sealed branches can be read
                with pytest.raises(af.errors.StateClosed, match="sealed"):
                    USES[use](branches[0])
            s.cancel()
            with pytest.raises(af.errors.StateClosed, match="cancelled"):
                USES[use](s)
        assert len(observed.ops) == num_ops + 7  # open, fork, task group, seal, cancel, two closes
    with pytest.raises(af.errors.StateClosed, match="session has ended"):
        USES[use](s)


async def test_only_text_and_expressions_can_be_appended():
    observed = Observed(af.Scripted([]))
    async with af.session(backend=observed) as flow, flow.state() as s:
        for item in (3, 1.5, None, b"text", ["a"], {"a": 1}, True, object(), af.gen, af.State, s):
            for around in (
                lambda item: item,
                lambda item: "a" + af.gen("x") + item,
                lambda item: af.user("a", item),
                lambda item: "a" + (af.gen("x") + item),
            ):
                with pytest.raises(af.errors.BadArgument, match=f"cannot append {type(item).__name__}"):
                    s.add(around(item))
        assert observed.ops == [ops.Open(s.id)]


async def test_f37_the_error_of_an_item_says_what_to_append():
    async def ask() -> str:
        return "a"

    coroutine = ask()
    async with af.session(backend=af.Scripted([])) as flow, flow.state() as s:
        for item, advice in (
            (coroutine, "await it first"),
            (Path("leaf.png"), "as in af.image"),
            ([{"role": "user", "content": "a"}], "messages are af.conversation"),
            (["a"], "append a string"),
            ([1] * 1_000_000, "append a string"),
        ):
            with pytest.raises(af.errors.BadArgument, match=advice) as failure:
                s += af.user(item)
            assert len(str(failure.value)) < 400
    coroutine.close()


VALUE_USES = {
    "if": (bool, "tested for truth"),
    "not": (operator.not_, "tested for truth"),
    "== text": (lambda x: x == "yes", "compared"),
    "!= text": (lambda x: x != "yes", "compared"),
    "text ==": (lambda x: "yes" == x, "compared"),  # noqa: SIM300
    "in list": (lambda x: x in ["yes"], "compared"),
    "len": (len, "measured"),
    "in": (lambda x: "yes" in x, "searched"),
    "index": (lambda x: x[0], "indexed"),
    "slice": (lambda x: x[:3], "indexed"),
    "minus": (lambda x: x - 1, "used as a number"),
    "times": (lambda x: 2 * x, "used as a number"),
    "int": (int, "used as a number"),
    "round": (round, "used as a number"),
    "less": (lambda x: x < 3, "compared"),
    "more": (lambda x: 3 < x, "compared"),  # noqa: SIM300
    "iterate": (list, "iterated"),
    "for": (lambda x: [c for c in x], "iterated"),  # noqa: C416
}


@pytest.mark.parametrize("kind", ["variable", "transformed"])
async def test_a_variable_is_not_its_value(kind):
    async with af.session(backend=af.Scripted(["yes"])) as flow, flow.state() as s:
        s += af.gen("x")
        reference = s["x"] if kind == "variable" else s["x"].strip()
        for _ in range(2):  # before it is there, and after
            for function, word in VALUE_USES.values():
                with pytest.raises(af.errors.BadArgument, match=rf"'x'.* cannot be ({word}).*await it first"):
                    function(reference)
            await s
        assert reference == reference
        assert (reference != s["x"]) is (kind == "transformed")
        assert hash(reference) == hash(reference)


async def test_a_variable_has_no_attributes_of_its_value():
    async with af.session(backend=af.Scripted(["yes"])) as flow, flow.state() as s:
        s += af.gen("x")
        for reference in (s["x"], s["x"].strip()):
            with pytest.raises(AttributeError, match=r"'x'.*'score'.*await"):
                _ = reference.score
            assert not hasattr(reference, "split")
            assert not hasattr(reference, "__array__")


async def test_a_state_cannot_be_added_to_text():
    async with af.session(backend=af.Scripted([])) as flow, flow.state() as s:
        with pytest.raises(af.errors.BadArgument, match=r"s \+= x"):
            s + "text"


async def test_a_select_finds_its_variable():
    async with af.session(backend=af.Scripted(["yes"])) as flow, flow.state() as s:
        verdict = af.select("verdict", ["yes", "no"])
        with pytest.raises(af.errors.UnknownVariable):
            s[verdict]
        s += verdict
        assert await s[verdict] == "yes"


async def test_a_variable_cannot_be_formatted_as_text():
    async with af.session(backend=af.Scripted(["yes"])) as flow, flow.state() as s:
        s += af.gen("x")
        for _ in range(2):  # before it has a value, and after
            for use in (str, "{0!s}".format, "%s".__mod__, print):
                with pytest.raises(af.errors.BadArgument, match=r"str\(\) of variable 'x'"):
                    use(s["x"])
            for spec in (">10", "s", "\n"):
                with pytest.raises(af.errors.BadArgument, match="cannot be formatted"):
                    format(s["x"], spec)
            await s


async def test_a_damaged_marker_is_rejected():
    observed = Observed(af.Scripted(["yes"]))
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += af.gen("x")
        for use in (s.add, lambda text: s.set("q", text), lambda text: s.add(af.user(text))):
            with pytest.raises(af.errors.BadArgument, match="marker"):
                use(f"{s['x'].strip()}"[:-3])
        assert len(observed.of(ops.Text) + observed.of(ops.Set) + observed.of(ops.Begin)) == 0


def closed(reason: str | None) -> Any:
    return pytest.raises(af.errors.StateClosed, check=lambda error: error.reason == reason)


async def test_f37_the_error_of_a_closed_state_has_the_reason():
    flow = af.session(backend=af.Scripted(["yes"]))
    with closed(None):
        flow.state()
    async with flow:
        async with flow.state() as ended:
            ended += af.gen("x")
            value = await ended["x"]
            marker = f"{ended['x']}"
            branches = ended.fork(1)
        assert value == "yes"
        with closed("ended"):
            ended += "more"
        with closed("ended"):
            ended["x"].map(str)
        with closed("ended"):
            await branches.__aenter__()
        async with flow.state() as s:
            async with s.fork(1) as (sealed,):
                pass
            with closed("sealed"):
                sealed += "more"
            sealed.cancel()  # the first reason stays
            with closed("sealed"):
                sealed += "more"
            s.cancel()
            with closed("cancelled"):
                s += "more"
        with closed("cancelled"):
            s += "more"
    for use in (flow.state, flow.check_alive, lambda: ended.add(marker)):
        with closed("ended"):
            use()


async def test_f37_the_error_of_an_unknown_variable_has_the_names():
    async with af.session(backend=af.Scripted(["yes", "no"])) as flow, flow.state() as s:
        answer = af.gen("answer", type=bool)
        s += af.gen("answer")
        (branch,) = s.fork(1)
        branch += af.gen("idea")
        for name, variable in (("anwser", "anwser"), ("idea", "idea"), (answer, "answer"), (3, None)):
            with pytest.raises(af.errors.UnknownVariable) as failure:
                s[name]
            assert (failure.value.variable, failure.value.known) == (variable, ("answer",))
        with pytest.raises(af.errors.UnknownVariable) as failure:
            branch["x"]
        assert (failure.value.variable, failure.value.known) == ("x", ("answer", "idea"))


HINTS = [
    {"objective": "speed"},
    {"objective": ["latency"]},
    *[{"output_tokens": bad} for bad in (0, 1.5, "1", True)],
    *[{"forks": bad} for bad in (False, 0.0, -1, [2], True)],
]


@pytest.mark.parametrize("hint", HINTS)
async def test_an_invalid_hint_is_rejected(hint):
    observed = Observed(af.Scripted([]))
    async with af.session(backend=observed) as flow, flow.state() as s:
        with pytest.raises(af.errors.BadArgument, check=has_param(next(iter(hint)))):
            s.hint(**hint)
        assert observed.ops == [ops.Open(s.id)]


async def test_hints_are_sent_and_change_no_result(server):
    observed = Observed(af.Remote(server.url))
    async with af.session(backend=observed) as flow, flow.state() as s:
        s.hint(objective="throughput", output_tokens=3, forks=2)
        s += "say this" + af.gen("x")
        assert await s["x"] == "this"
        assert observed.of(ops.Hint) == [ops.Hint(s.id, "throughput", 3, 2)]


IMAGES = [
    (3, "image: give a file's path or bytes, a picture of Pillow or numpy, or a URL, not 3"),
    (None, "give a file"),
    (b"", "begins no known image"),
    (b"no image at all", "b'no image at .*begins no known image"),
    (b"RIFF0000WAVE", "begins no known image"),
    ("no such file.png", "image: 'no such file.png' cannot be read: No such file"),
    ("a\0b", "cannot be read: embedded null"),
    ("x" * 100_000, "cannot be read: File name too long"),
    ("/", "cannot be read: Is a directory"),
    (
        "http://example.com/a.png",
        "a URL must begin with https:, or with data:image/…;base64, unlike 'http://ex",
    ),
    ("data:text/plain,a", "a URL must begin with https:"),
    ("data:image/png;base64,%%", "no valid base64"),
    (PNG + bytes(20_000_000), "more than 20,000,000"),
]


@pytest.mark.parametrize(("source", "message"), IMAGES)
def test_invalid_images_are_rejected(source, message):
    with pytest.raises(af.errors.BadArgument, match=message) as failure:
        af.image(source)
    assert len(str(failure.value)) < 400


def test_images_are_read_from_bytes_files_and_urls(tmp_path):
    for data, kind in (
        (PNG, "png"),
        (b"\xff\xd8\xff0", "jpeg"),
        (b"GIF89a", "gif"),
        (b"RIFF0000WEBP", "webp"),
    ):
        path = tmp_path / kind
        path.write_bytes(data)
        image = af.image(data).image
        assert image.url.startswith(f"data:image/{kind};base64,")
        assert (image.media_type, image.data) == (f"image/{kind}", data)
        others = [path, str(path), image.url, bytearray(data), memoryview(data)]
        assert all(af.image(other).image is image for other in others)


async def test_an_image_is_rejected_before_it_is_sent_to_a_backend_without_vision():
    observed = Observed(FakeEngine())
    async with af.session(backend=observed) as flow, flow.state() as s:
        with pytest.raises(af.errors.NotSupported, match="does not accept images"):
            s += af.user("look", af.image(PNG))
        assert observed.ops == [ops.Open(s.id)]


async def test_a_server_without_vision_rejects_an_image(server):
    able = server.generator.capabilities
    async with af.session(server.url) as flow, flow.state() as s:
        s += af.image(URL)
        assert await s.text() == "<image>"
        server.call(lambda: setattr(server.generator, "capabilities", Capabilities("blind")))
        try:
            s += af.image(URL) + af.gen("x")
            with pytest.raises(af.errors.NotSupported, match="blind does not accept images"):
                await s
        finally:
            server.call(lambda: setattr(server.generator, "capabilities", able))


# Arguments of the public functions that make no sense: one error, before anything is opened or sent.

NO_PROGRAM = [None, 3, "judge", ["a"], {}]


@pytest.mark.parametrize("wrong", NO_PROGRAM)
def test_an_invalid_program_is_rejected_before_a_session_opens(wrong):
    with pytest.raises(af.errors.BadArgument, check=has_param("function")):
        af.program(wrong)
    for use in (lambda: af.run(wrong, "essay"), lambda: af.map(wrong, ["essay"])):
        with pytest.raises(af.errors.BadArgument, check=has_param("program")):
            use()


@pytest.mark.parametrize("wrong", NO_PROGRAM)
async def test_an_invalid_program_is_rejected_before_an_op_is_sent(wrong):
    observed = Observed(af.Scripted([]))
    async with af.session(backend=observed) as flow:
        with pytest.raises(af.errors.BadArgument, check=has_param("program")):
            await flow.run(wrong, "essay")
        with pytest.raises(af.errors.BadArgument, check=has_param("program")):
            flow.stream(wrong, "essay")
    assert observed.ops == []


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"url": 3}, "url"),
        ({"url": b"ws://127.0.0.1"}, "url"),
        ({"model": 3}, "model"),
        ({"api_key": 3, "url": "ws://127.0.0.1:1"}, "api_key"),
        ({"backend": "scripted"}, "backend"),
        ({"backend": 3}, "backend"),
        ({"backend": af.Scripted([]), "record": 3}, "record"),
    ],
)
def test_invalid_arguments_of_a_session_are_rejected(arguments, param):
    with pytest.raises(af.errors.BadArgument, check=has_param(param)):
        af.session(**arguments)


@pytest.mark.parametrize("backend", [af.Scripted([]), af.Remote("ws://127.0.0.1:1")])
async def test_f47e_a_backend_in_place_of_the_url_is_rejected_with_its_keyword(backend):
    with pytest.raises(af.errors.BadArgument, match="backend=") as caught:
        af.session(backend)
    assert caught.value.param == "url"
    with pytest.raises(af.errors.BadArgument, match="backend="):
        await af.open_session(backend)


def test_invalid_paths_and_addresses_are_rejected():
    for wrong in (None, 3, b"a", ["a"]):
        with pytest.raises(af.errors.BadArgument, check=has_param("path")):
            af.Replay(wrong)
        with pytest.raises(af.errors.BadArgument, check=has_param("url")):
            af.Remote(wrong)
    with pytest.raises(af.errors.BadArgument, check=has_param("api_key")):
        af.Remote("ws://127.0.0.1:1", api_key=3)
    for path in ("no\0file", "\ud83d"):
        with pytest.raises(af.errors.BadRecording, match="cannot read"):
            af.Replay(path)


async def test_an_invalid_path_cannot_be_recorded_to():
    with pytest.raises(af.errors.BadArgument, check=has_param("record")):
        async with af.session(backend=af.Scripted([]), record="no\0file"):
            pass


def look_up(city: str) -> str:
    return city


@pytest.mark.parametrize(
    ("options", "param", "shown"),
    [
        ({"tools": 3}, "tools", None),
        ({"tools": look_up}, "tools", None),
        ({"tools": [look_up, look_up]}, "tools", "'look_up'"),
        ({"tools": [look_up], "choice": "look_down"}, "choice", "'look_down'.*'look_up'"),
        ({"choice": "look_up"}, "choice", None),
        ({"choice": "required"}, "choice", None),
    ],
)
def test_invalid_tools_and_choices_are_rejected(options, param, shown):
    with pytest.raises(af.errors.BadArgument, match=shown, check=has_param(param)):
        af.reply("answer", **options)


@pytest.mark.parametrize("inputs", [3, ["essay"], object()])
async def test_inputs_of_a_graph_must_be_texts_or_a_dict(inputs):
    @af.program
    async def ask(s: af.State, essay: str) -> str:
        s += essay + af.gen("x")
        return await s["x"]

    async with af.session(backend=af.Scripted([])) as flow:
        with pytest.raises(af.errors.BadArgument, check=has_param("essay")):
            await flow.submit(ask.trace(), inputs)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: af.select("y", ["no", f"not {x}"]),
        lambda x: af.gen("y", stop=f"{x}"),
        lambda x: af.gen("y", regex=f"{x}"),
        lambda x: af.gen("y", tags=[af.Tag(f"<{x}>", end=">", regex="a")]),
        lambda x: af.image(f"https://example.com/{x}.png"),
        lambda x: x.regex(f"{x}: (.*)"),
        lambda x: x.json(f"{x}"),
        lambda x: af.conversation([{"role": "user", "content": f"And {x}?"}]),
        lambda x: af.conversation(
            [af.Message("assistant", "", tool_calls=(af.ToolCall("f", {}, text=f"{x}"),))]
        ),
    ],
)
async def test_a_variable_in_a_text_that_is_sent_literally_is_rejected(use):
    """The variable's marker would reach the model as text."""
    observed = Observed(af.Scripted(lambda _: "a"))
    async with af.session(backend=observed) as flow, flow.state() as s, flow.state() as t:
        s += af.gen("x")
        num_ops = len(observed.ops)
        with pytest.raises(af.errors.BadArgument, match="await it and use its value"):
            t += use(s["x"])
        assert len(observed.ops) == num_ops
        assert await s["x"] == "a"


async def test_a_variable_in_a_text_that_the_client_provides_is_rejected():
    @af.program
    async def ask(s: af.State, essay: str) -> str:
        s += essay + af.gen("x")
        return await s["x"]

    async with af.session(backend=af.Scripted(lambda _: "a")) as flow, flow.state() as s:
        s += af.gen("x")
        with pytest.raises(af.errors.BadArgument, check=has_param("function")):
            await s["x"].map(lambda text: f"{text} and {s['x']}")
        with pytest.raises(af.errors.BadArgument, match="an argument of graph 'ask'"):
            await flow.submit(ask.trace(), {"essay": f"{s['x']}"})
        assert await flow.run(ask, f"{s['x']}") == "a"  # appended, and so resolved
