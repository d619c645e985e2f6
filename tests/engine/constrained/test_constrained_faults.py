"""Generations under a constraint when the engine's process is killed in the middle of them, when other
parameters apply too, and when a stop_regex takes too long on forced text."""

from __future__ import annotations

import random
import re
from weakref import WeakSet

import anyio
import pytest
from engine.constrained.test_constrained_engine import DFAS, PATTERNS, Asked, ask, check_end, constraint
from hypothesis import given
from hypothesis import strategies as st
from support.engine.plain_constrained import PlainConstrained
from support.examples import examples
from support.fake_engine import TOKENIZER, FakeEngine
from support.faults import has_param
from support.holds import Hold
from support.logit_runner import alone_by_logits, logit_engine
from support.plain_model import END_ID, PLAIN_IDS, plain_model_engine
from support.process_engine import kill, process_engine

from agentflow.engine.batch import Batch
from agentflow.engine.client import EngineClient
from agentflow.engine.constrained import grammar_cache
from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.grammar import Grammar
from agentflow.engine.grammar.regex import parse_regex
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.errors import RequestRefused
from agentflow.protocol.sampling import SamplingParams

ALL_ASKED = [
    Asked((7, 8, number), pattern, 60, jumps=jumps, logprobs=logprobs)
    for number, (pattern, jumps, logprobs) in enumerate(
        (pattern, jumps, logprobs)
        for pattern in PATTERNS
        for jumps in (True, False)
        for logprobs in (True, False)
    )
]


@pytest.mark.anyio
@pytest.mark.parametrize("max_running", [64, 3], ids=["all run", "most wait"])
@pytest.mark.parametrize("step", [1, 2, *[pytest.param(n, marks=pytest.mark.full) for n in (3, 7)]])
async def test_constrained_requests_survive_a_kill_unchanged(tmp_path, step: int, max_running: int) -> None:
    hold = Hold(tmp_path / "hold")
    num_ended = 0

    async def run(client: EngineClient, asked: Asked) -> None:
        nonlocal num_ended
        await ask(client, asked)
        num_ended += 1

    config = {"max_running": max_running, "token_budget": 64}
    async with process_engine(config=config, hold_at={str(step): hold.path}) as client:
        async with anyio.create_task_group() as group:
            for asked in ALL_ASKED:
                group.start_soon(run, client, asked)
            await hold.reached()
            assert num_ended < len(ALL_ASKED)
            kill(client, hold)
        assert (await client.stats()).restarts == 1
    assert num_ended == len(ALL_ASKED)


penalties = st.sampled_from([0.0, 0.0, 0.5, 2.0, -1.5])
all_params = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([5, 40, 60]),
    min_tokens=st.sampled_from([0, 3, 12, 60]),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.5]),
    frequency_penalty=penalties,
    presence_penalty=penalties,
    repetition_penalty=st.sampled_from([1.0, 1.3, 5.0]),
    logit_bias=st.dictionaries(
        st.sampled_from([*PLAIN_IDS[:40], END_ID]), st.sampled_from([-100.0, 4.0, 100.0]), max_size=4
    ).map(lambda biases: tuple(biases.items())),
    logprobs=st.booleans(),
)


@examples(50)  # the reference tries every token at every place
@given(
    st.lists(
        st.tuples(all_params, st.sampled_from(PATTERNS), st.booleans(), st.integers(0, 2**64 - 1)),
        min_size=1,
        max_size=5,
    )
)
def test_constraints_combine_with_all_other_parameters(cases) -> None:
    prompt = [5, 6, 7]

    async def ask_and_check(
        client: EngineClient, params: SamplingParams, pattern: str, jumps: bool, seed: int
    ) -> None:
        text = PlainConstrained(DFAS[pattern], TOKENIZER, jumps)
        expected = alone_by_logits(prompt, params, seed, matcher=text)
        end = await client.generate(
            prompt,
            params,
            seed=seed,
            on_text=lambda text: None,
            constraint=constraint(pattern),
            jump_forward=jumps,
        )
        assert (end.text, end.finish_reason) == (expected.text, expected.reason)
        assert end.finish_reason == "length" or DFAS[pattern].matches(end.text.encode())

    async def main() -> None:
        config = SchedulerConfig(token_budget=16)
        async with logit_engine(config) as client, anyio.create_task_group() as group:
            for case in cases:
                group.start_soon(ask_and_check, client, *case)

    anyio.run(main)


@pytest.mark.anyio
async def test_a_hostile_stop_in_forced_text_fails_its_own_request_only() -> None:
    forced = CompiledConstraint("forced", "dfa", build_dfa(parse_regex("a{400}")).to_bytes())
    async with plain_model_engine() as client:
        params = SamplingParams(max_tokens=450, stop_regex="(a|aa)+[éx]")
        with pytest.raises(RequestRefused, check=has_param("stop_regex")):
            await client.generate([5, 6], params, seed=0, on_text=lambda text: None, constraint=forced)
        asked = ALL_ASKED[0]
        end = await client.generate(
            [*asked.prompt],
            asked.params,
            seed=0,
            on_text=lambda text: None,
            constraint=constraint(asked.pattern),
            jump_forward=asked.jumps,
        )
        check_end(asked, end, "")


@pytest.mark.anyio
async def test_f37_masks_of_running_grammars_fit_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the cache has dropped the grammars, and each text walks through states with different masks."""
    limit, vocab_size, num_tokens = 4_000_000, 150_000, 120
    monkeypatch.setattr(grammar_cache, "MAX_MASK_BYTES", limit, raising=False)
    monkeypatch.setattr(grammar_cache, "MAX_GRAMMARS", 1)
    live: WeakSet[Grammar] = WeakSet()
    make = GrammarCache.make

    def make_and_watch(cache: GrammarCache, constraint: CompiledConstraint) -> Grammar:
        made = make(cache, constraint)
        live.add(made)
        return made

    monkeypatch.setattr(GrammarCache, "make", make_and_watch)
    used: list[int] = []

    def measure(batch: Batch) -> None:
        if len(live) == len(batch.sampled.rows) == 8:
            used.append(sum([grammar.nbytes for grammar in live]))

    dice = random.Random(0)
    patterns = [
        "".join(f"[{''.join(dice.sample('abcdefghijklmnop', 8))}]" for _ in range(num_tokens))
        for _ in range(8)
    ]
    params = SamplingParams(max_tokens=num_tokens)
    runner = FakeRunner(
        vocab_size=vocab_size,
        num_slots=4096,
        max_context=200,
        next_token=lambda seen: 0,  # the first token that the mask allows
        on_step=measure,
    )

    async def generate(client: EngineClient, pattern: str) -> None:
        dfa = build_dfa(parse_regex(pattern))
        tables.append(dfa.transitions.size * 12 + len(dfa.transitions) * 32)
        built = CompiledConstraint(pattern, "dfa", dfa.to_bytes())
        end = await client.generate([5, 6], params, seed=0, on_text=lambda text: None, constraint=built)
        assert re.fullmatch(pattern, end.text)

    tables: list[int] = []
    async with FakeEngine(runner=runner).open_client() as client, anyio.create_task_group() as group:
        for pattern in patterns:
            group.start_soon(generate, client, pattern)
    assert len(used) > num_tokens // 2
    assert max(used) <= limit + sum(tables)
