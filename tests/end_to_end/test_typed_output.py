"""Typed output on the real model, as a user has it: every kind, embedded and served, and refused types."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
import pytest
from end_to_end.typed_cases import ALWAYS_END, CASES, Book

import agentflow as af
from agentflow.errors import BadArgument

NUM_TOKENS = 60


@dataclass
class Outcome:
    """``value``: None where the text was cut, and no value was made of it."""

    value: Any
    text: str
    reason: str
    logprobs: tuple[float | None, ...]
    num_tokens: int


@af.program
async def ask_all(s: af.State, **options: Any) -> dict[str, Outcome]:
    """One branch for each kind, concurrently."""
    branches = s.fork(len(CASES))
    for branch, (name, (question, asked, _)) in zip(branches, CASES.items(), strict=True):
        branch += af.user(question)
        gen = {"max_tokens": NUM_TOKENS, "logprobs": True}
        branch += af.assistant(af.gen(name, **gen, **asked, **options))
    found: dict[str, Outcome] = {}
    async with anyio.create_task_group() as group:
        for name, branch in zip(CASES, branches, strict=True):
            group.start_soon(_hear, branch[name], found)
    return found


async def _hear(variable: Any, found: dict[str, Outcome]) -> None:
    why = f"was truncated after {NUM_TOKENS} tokens … raise max_tokens"
    try:
        value = await variable
    except af.InvalidValue as error:
        value, why = None, str(error)
    assert all(words in why for words in (f"was truncated after {NUM_TOKENS} tokens", "raise max_tokens"))
    reason, logprobs = variable.finish_reason, variable.logprobs
    found[variable.name] = Outcome(
        value, await variable.whole_text(), reason, tuple(logprobs), variable.usage.output_tokens
    )


def embedded(**options: Any) -> Any:
    return af.session(backend=af.Embedded(dtype="float32", kv_tokens=6000, threads=1), **options)


async def outcomes(flow: Any, **options: Any) -> dict[str, Outcome]:
    result: dict[str, Outcome] = await flow.run(ask_all, **options)
    return result


# Without ``top_k``, the rarest tokens are as unlikely as rounding errors: a draw among them
# falls to another one whenever the batch is another.
SAMPLED = {"temperature": 1.5, "top_k": 20}
OPTIONS = {
    "greedy": (7, {}),
    "plain": (7, {"jump_forward": False}),
    "sampled": (1, SAMPLED),
    "sampled plain": (1, {**SAMPLED, "jump_forward": False}),
}
BROAD = {"sampled plain": pytest.mark.full}
HOW = [pytest.param(how, marks=BROAD.get(how, ())) for how in OPTIONS]


class OnServer:
    """The outcomes on the server, by the names of ``OPTIONS``. The ways of ``make test`` run together, which
    takes hardly longer than one; the others run when they are asked for."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._found: dict[str, dict[str, Outcome]] = {}

    def __getitem__(self, how: str) -> dict[str, Outcome]:
        if how not in self._found:
            anyio.run(self._run_all, [how] if how in BROAD else OPTIONS.keys() - BROAD.keys())
        return self._found[how]

    async def _run_all(self, ways: Iterable[str]) -> None:
        async with anyio.create_task_group() as group:
            for how in ways:
                group.start_soon(self._run, how)

    async def _run(self, how: str) -> None:
        seed, options = OPTIONS[how]
        async with af.session(self._url, seed=seed) as flow:
            self._found[how] = await outcomes(flow, **options)


@pytest.fixture(scope="module")
def on_server(model_url) -> OnServer:
    return OnServer(model_url)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", CASES)
def test_a_value_is_valid_or_there_is_none(on_server, kind, how):
    outcome: Outcome = on_server[how][kind]
    if outcome.reason == "length" and kind != "tags":
        assert kind not in ALWAYS_END
        assert outcome.value is None
        assert outcome.num_tokens == NUM_TOKENS
        return
    assert outcome.reason in ("eos", "stop", "length")
    assert CASES[kind][2](outcome.text, outcome.value), outcome


@pytest.mark.parametrize("kind", CASES)
def test_most_have_a_value_and_sampling_finds_others(on_server, kind):
    texts = {on_server[how][kind].text for how in ("greedy", "sampled")}
    assert len(texts) > 1 or kind == "bool"
    assert any(on_server[how][kind].value is not None for how in OPTIONS if how not in BROAD)


@pytest.mark.parametrize("how", HOW)
def test_every_token_has_a_log_probability(on_server, how):
    for kind, outcome in on_server[how].items():
        assert len(outcome.logprobs) in (outcome.num_tokens, outcome.num_tokens - 1), kind
        assert all(p is not None and -100 < p <= 0 for p in outcome.logprobs), kind


@pytest.mark.parametrize(
    "pair",
    [("greedy", "plain"), pytest.param(("sampled", "sampled plain"), marks=pytest.mark.full)],
)
def test_where_both_ways_write_the_same_tokens_they_are_as_likely(on_server, pair):
    num_same = 0
    for kind in CASES:
        jumped, plain = (on_server[how][kind] for how in pair)
        if (jumped.text, len(jumped.logprobs)) == (plain.text, len(plain.logprobs)):
            num_same += 1
            assert jumped.logprobs == pytest.approx(plain.logprobs, abs=1e-2), kind
    assert num_same > 1


@pytest.mark.full  # test_embedded_and_server compares both places, with fewer kinds
@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_the_embedded_engine_gives_the_same(on_server, how):
    seed, options = OPTIONS[how]

    async def main() -> dict[str, Outcome]:
        async with embedded(seed=seed) as flow:
            return await outcomes(flow, **options)

    found = anyio.run(main)
    others = [kind for kind in CASES if found[kind].text != on_server[how][kind].text]
    # Which requests share a batch depends on when their constraints are compiled, and other batches are
    # rounded otherwise: once in thousands of tokens a draw falls between.
    assert len(others) <= 1, [(found[kind].text, on_server[how][kind].text) for kind in others]
    for kind in CASES.keys() - set(others):
        assert found[kind].value == on_server[how][kind].value, kind


# Constraints that are rejected before a token is generated


def test_a_rejected_constraint_affects_no_other_request(model_url):
    rejected = {
        "schema": {"schema": {"type": "integer", "minimum": 5, "maximum": 3}},
        "regex": {"regex": r"(a|b)\1"},
    }

    async def main() -> None:
        async with af.session(model_url, seed=7) as flow, flow.state() as s:
            s += af.user("How many legs has a spider?")
            good, *wrong = s.fork(1 + len(rejected))
            good += af.assistant(af.gen("good", type=int))
            for branch, (name, asked) in zip(wrong, rejected.items(), strict=True):
                branch += af.assistant(af.gen(name, **asked))
                branch += "never reached"
                with pytest.raises(BadArgument):
                    await branch[name]
                assert branch[name].text == ""
                with pytest.raises(BadArgument):
                    await branch
            assert isinstance(await good["good"], int)

    anyio.run(main)


@pytest.mark.full  # compiling it takes so long that a busy machine refuses it
def test_a_pattern_too_large_for_a_dfa_is_enforced(model_url):
    pattern = r".*a.{20}"

    async def main() -> str:
        async with af.session(model_url, seed=7) as flow, flow.state() as s:
            s += "A sentence: " + af.gen("x", regex=pattern, max_tokens=40, stop="\n")
            s += af.gen("y", regex=pattern, max_tokens=2)
            with pytest.raises(
                af.InvalidValue, match="was truncated after 2 tokens and is not a complete text, raise"
            ):
                await s["y"]
            return await s["x"].whole_text()

    assert anyio.run(main)


# With the rest of the language


@pytest.mark.parametrize("jumps", [True, False])
def test_a_stop_string_ends_the_text_inside_a_value(model_url, jumps):
    async def main() -> None:
        async with af.session(model_url, seed=7) as flow, flow.state() as s:
            s += af.user("Name a book.")
            async with s.assistant():
                s += af.gen("book", schema=Book, stop='"year', jump_forward=jumps, logprobs=True)
                with pytest.raises(af.InvalidValue, match=r"ended \(stop\)"):
                    await s["book"]
                text = await s["book"].whole_text()
                assert re.fullmatch(r'\{"title": ".{3,16}", ', text)
                assert s["book"].finish_reason == "stop"
                s += af.gen("rest", regex=r'"year": \d{4}\}')
            assert msgspec.json.decode(text + await s["rest"], type=Book)

    anyio.run(main)
