"""In fp32, a request's greedy tokens do not depend on anything around it: not on the batch, the cache, a
fork, an eviction, or where prefill was cut. The first test ties them to transformers; the others compare to a
lone request on an engine without a cache. test_same_answers.py has the like on the default model."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.engine.random_model import VOCAB, write_random_model

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.client import EngineClient, running_engine
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.request import Origin
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.decisions import Option, Question
from agentflow.protocol.sampling import SamplingParams

NUM_SLOTS = 3000
NUM_TOKENS = 16
TEXTS = [
    "The oldest tree in the valley",
    "def reverse(words):\n    ",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "Ingredients: two eggs, a cup of flour, and",
    "The capital of Italy is Rome. The capital of Spain is",
    "A short history of glass. Glass was first made in Mesopotamia some four thousand years ago. " * 3,
    "x = 1\ny = 2\nprint(",
    "Dear diary, today I",
    "Why is the sky blue? Sunlight is scattered by",
    "Zwei Brüder wohnten in einem Haus, und",
    "The recipe says: first,",
    "1 2 4 8 16 32",
    "In the beginning of the second act, the king enters and says to his daughter that " * 2,
    "To be or not to be,",
    "[package]\nname = ",
    "Rain fell on",
]


class Kept:
    """A runner that outlives the engines that use it one after the other."""

    def __init__(self, runner: TorchRunner) -> None:
        self.info = runner.info
        self._runner = runner

    def launch(self, batch: Batch) -> Any:
        return self._runner.launch(batch)

    def collect(self, handle: Any) -> BatchOutput:
        return self._runner.collect(handle)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large random weights: its texts go on changing, and each token depends on all before it. It writes
    ASCII only, as half a character at the end of a text would be dropped."""
    folder = write_random_model(
        tmp_path_factory.mktemp("varied"),
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=192,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    tokenizer = Tokenizer.from_folder(folder)
    weights = load_file(folder / "model.safetensors")
    for token in range(VOCAB):
        if not tokenizer.token_bytes(token).isascii():
            weights["lm_head.weight"][token] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


@pytest.fixture(scope="module")
def runner(model_folder: Path) -> Iterator[Kept]:
    real = TorchRunner(model_folder, num_slots=NUM_SLOTS, device="cpu", dtype="float32", num_threads=2)
    yield Kept(real)
    real.close()


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in TEXTS]


def on_engine(runner: Kept, tokenizer: Tokenizer, use, **config):
    """Runs ``use(client)`` on an engine with this configuration, and checks that it ends idle."""

    async def main():
        async with running_engine(lambda: (runner, tokenizer, SchedulerConfig(**config))) as client:
            result = await use(client)
            await client.stats()
            client.engine.scheduler.check_idle()
            return result

    return anyio.run(main)


async def generate(client: EngineClient, prompt: list[int], count: int = NUM_TOKENS, **options) -> list[int]:
    params = SamplingParams(**({"max_tokens": count, "ignore_eos": True} | options))
    end = await client.generate(prompt, params, seed=0, on_text=lambda _: None)
    return end.token_ids


async def generate_all(
    client: EngineClient, prompts: list[list[int]], count: int = NUM_TOKENS
) -> list[list[int]]:
    results: list[list[int]] = [[] for _ in prompts]

    async def one(index: int) -> None:
        results[index] = await generate(client, prompts[index], count)

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return results


@pytest.fixture(scope="module")
def alone(runner, tokenizer, prompts) -> list[list[int]]:
    """Each prompt's tokens, one request at a time, nothing shared."""

    async def use(client):
        return [await generate(client, prompt) for prompt in prompts]

    return on_engine(runner, tokenizer, use, use_cache=False)


@pytest.fixture(scope="module")
def of_transformers(model_folder):
    return transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


def test_alone_is_what_transformers_generates(of_transformers, prompts, alone):
    for prompt, ours in zip(prompts[:3], alone[:3], strict=True):
        ids = torch.tensor([prompt])
        theirs = of_transformers.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
        assert ours == theirs[0, len(prompt) :].tolist()


END = 1  # the model's own end token
COMMA = 15
EDITS = ("repetition_penalty", "logit_bias", "min_tokens")


def edits(name: str, first_tokens: list[int]) -> tuple[dict, dict]:
    """The parameters for a request and for transformers; by default both forbid the end for all tokens. The
    biases rule out ``first_tokens``, so that each text must change."""
    if name == "repetition_penalty":
        return {name: 1.3}, {name: 1.3}
    biases = {COMMA: 4.0} | dict.fromkeys(first_tokens, -100.0) if name == "logit_bias" else {END: 100.0}
    ours = {"logit_bias": tuple(biases.items())}
    theirs = {"sequence_bias": {(token,): bias for token, bias in biases.items()}}
    if name == "min_tokens":
        ours["min_tokens"] = theirs["min_new_tokens"] = 10
    return ours, theirs


@pytest.mark.parametrize("name", EDITS)
def test_edits_of_logits_are_those_of_transformers(of_transformers, runner, tokenizer, prompts, alone, name):
    """In one batch with a request that has none of it."""
    chosen = prompts[:3]
    ours, theirs = edits(name, [tokens[0] for tokens in alone[: len(chosen)]])
    ours = {"min_tokens": NUM_TOKENS, "ignore_eos": False} | ours
    got: dict[int, list[int]] = {}

    async def use(client):
        async def one(index: int, **options) -> None:
            got[index] = await generate(client, prompts[index], **options)

        async with anyio.create_task_group() as group:
            group.start_soon(one, 4)
            for index in range(len(chosen)):
                group.start_soon(lambda index=index: one(index, **ours))

    on_engine(runner, tokenizer, use)
    assert got[4] == alone[4]
    for index, prompt in enumerate(chosen):
        ids = torch.tensor([prompt])
        out = of_transformers.generate(
            ids,
            **({"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS} | theirs),
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            eos_token_id=END,
        )
        expected = [token for token in out[0, len(prompt) :].tolist() if token != END]
        assert got[index] == expected
        assert got[index] != alone[index]


def test_in_a_batch_of_sixteen_of_mixed_lengths(runner, tokenizer, prompts, alone):
    got = on_engine(runner, tokenizer, lambda client: generate_all(client, prompts), max_running=16)
    assert got == alone


@pytest.mark.parametrize("token_budget", [1, 2, 5, 17, 64, 1000])
def test_with_prefill_cut_into_chunks_of_any_size(runner, tokenizer, prompts, alone, token_budget):
    chosen = [5, 12, 9]
    got = on_engine(
        runner,
        tokenizer,
        lambda client: generate_all(client, [prompts[i] for i in chosen], 8),
        token_budget=token_budget,
    )
    assert got == [alone[i][:8] for i in chosen]


def test_after_a_cache_hit_at_any_split_point(runner, tokenizer, prompts, alone):
    rng = random.Random(3)

    async def use(client: EngineClient) -> None:
        for index in (5, 12):
            prompt = prompts[index]
            for split in sorted(rng.sample(range(1, len(prompt)), 4)):
                salt = f"{index}/{split}"
                await client.compute(prompt[:split], origin=Origin(cache_salt=salt))
                params = SamplingParams(max_tokens=8, ignore_eos=True)
                end = await client.generate(
                    prompt, params, seed=0, origin=Origin(cache_salt=salt), on_text=lambda _: None
                )
                assert end.cached_tokens == split
                assert end.token_ids == alone[index][:8]

    on_engine(runner, tokenizer, use)


def test_after_its_own_continuation_was_cached(runner, tokenizer, prompts, alone):
    async def use(client: EngineClient) -> None:
        for index in (0, 2, 5):
            first = await generate(client, prompts[index], 8)
            assert first == alone[index][:8]
            assert await generate(client, prompts[index] + first, 8) == alone[index][8:]

    on_engine(runner, tokenizer, use)


def test_after_an_eviction_and_recomputation(runner, tokenizer, prompts, alone):
    rng = random.Random(4)

    async def use(client: EngineClient) -> int:
        assert await generate(client, prompts[5]) == alone[5]
        for _ in range(4):
            await client.compute([rng.randrange(10, VOCAB) for _ in range(NUM_SLOTS // 3)])
        assert await generate(client, prompts[5]) == alone[5]
        return (await client.stats()).evicted_tokens

    assert on_engine(runner, tokenizer, use) > len(TEXTS[5])


def test_when_the_pool_is_too_small_for_all_at_once(model_folder, tokenizer, prompts, alone):
    small = TorchRunner(model_folder, num_slots=160, device="cpu", dtype="float32", num_threads=2)

    async def use(client: EngineClient):
        got = await generate_all(client, prompts[:5] + prompts[6:11])
        return got, (await client.stats()).preemptions

    got, preemptions = on_engine(small, tokenizer, use)
    assert got == alone[:5] + alone[6:11]
    assert preemptions > 0


def test_after_a_fork(model_folder, runner, tokenizer, prompts, alone):
    async def use(client: EngineClient) -> None:
        generator = EngineGenerator(client, ChatTemplate.from_folder(model_folder))

        class Backend:
            def connect(self, deliver, lost):
                return interpreted(generator, deliver)

        async with af.session(backend=Backend()) as flow, flow.state() as root:
            root += TEXTS[5]
            branches = root.fork(3)
            root += af.gen("own", max_tokens=NUM_TOKENS, ignore_eos=True)
            for branch in branches:
                branch += af.gen("own", max_tokens=NUM_TOKENS, ignore_eos=True)
            expected = tokenizer.decode(alone[5])
            assert [await state["own"] for state in (root, *branches)] == [expected] * 4
            shared = [branch["own"].usage.cached_tokens for branch in branches]
            assert (
                sum(tokens >= len(prompts[5]) - 1 for tokens in [*shared, root["own"].usage.cached_tokens])
                >= 3
            )

    on_engine(runner, tokenizer, use)


@pytest.mark.parametrize("token_budget", [7, 512])
def test_answers_to_questions_asked_together_are_those_of_each_alone(runner, tokenizer, token_budget):
    """In a step of a long question, no token is scored. Another order of the sums changes the last digits."""
    questions = [
        Question("long", "predicate", "The clock strikes " + "again and " * 20),
        Question("tone", "choice", "How?", (Option("slowly"), Option("very slowly"), Option("fast"))),
        Question("stars", "score", "How many?", tuple([Option(str(number)) for number in range(1, 6)])),
    ]

    async def decide(client: EngineClient) -> list[tuple[float, ...] | None]:
        generator = EngineGenerator(client, ChatTemplate(None))
        found = []
        for asked in (questions, *[[question] for question in questions]):
            context = generator.open(f"{len(found)}")
            generator.fill(context, TEXTS[2])
            found += (await generator.decide(context, asked)).probabilities
            generator.free(context)
        return found

    found = on_engine(runner, tokenizer, decide, token_budget=token_budget)
    for together, alone in zip(found[:3], found[3:], strict=True):
        assert together == pytest.approx(alone, abs=1e-4)
        assert min(together) > 0
        assert sum(together) == pytest.approx(1)
