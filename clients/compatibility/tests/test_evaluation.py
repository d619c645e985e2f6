"""Evaluation harnesses."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import inspect_ai
import inspect_ai.dataset
import inspect_ai.model
import inspect_ai.scorer
import inspect_ai.solver
import inspect_ai.tool
import inspect_ai.util
import lm_eval
import lm_eval.api.instance
import lm_eval.api.registry
import lm_eval.tasks
import openai
import pytest
import requests
from conftest import HERE, PYTHON, Server
from subjects import ANSWER, LONG, MODEL, TOO_LONG, Person, weather


@inspect_ai.tool.tool(name="weather")
def weather_tool() -> inspect_ai.tool.Tool:
    async def execute(city: str) -> str:
        """Returns the weather.

        Args:
            city: The name of the city.
        """
        return weather(city)

    return execute


@pytest.mark.client("inspect-ai")
class TestInspect:
    @pytest.fixture(params=["responses", "chat"])
    def model(self, request: Any, server: Server) -> inspect_ai.model.Model:
        is_responses = request.param == "responses"
        return inspect_ai.model.get_model(
            f"openai/{MODEL}", base_url=server.v1, api_key="no-key", responses_api=is_responses, memoize=False
        )

    def test_chat(self, model: inspect_ai.model.Model) -> None:
        assert asyncio.run(model.generate("Hello there")).completion == "Hello there"

    def test_stream(self, model: inspect_ai.model.Model) -> None:
        events: list[inspect_ai.model.StreamEvent] = []

        async def note(event: inspect_ai.model.StreamEvent) -> None:
            events.append(event)

        asyncio.run(model.generate("Hello there", on_stream=note))
        assert "".join(event.text for event in events if event.type == "text") == "Hello there"

    def test_tools(self, model: inspect_ai.model.Model, tmp_path: Path) -> None:
        task = inspect_ai.Task(
            dataset=[inspect_ai.dataset.Sample("Hello there", target=ANSWER)],
            solver=[inspect_ai.solver.use_tools(weather_tool()), inspect_ai.solver.generate()],
            scorer=inspect_ai.scorer.match(location="exact"),
        )
        [log] = inspect_ai.eval(task, model, log_dir=str(tmp_path), display="none")
        assert log.status == "success", log.error
        assert log.results is not None
        assert log.results.scores[0].metrics["accuracy"].value == 1

    def test_typed_answers(self, model: inspect_ai.model.Model) -> None:
        schema = inspect_ai.model.ResponseSchema(
            name="person", json_schema=inspect_ai.util.json_schema(Person)
        )
        config = inspect_ai.model.GenerateConfig(response_schema=schema)
        Person.model_validate_json(asyncio.run(model.generate("Hello there", config=config)).completion)

    def test_errors(self, model: inspect_ai.model.Model, server: Server) -> None:
        """A prompt that is too long ends an answer: the harness knows the error by its code."""
        assert asyncio.run(model.generate(TOO_LONG)).stop_reason == "model_length"
        unknown = inspect_ai.model.get_model("openai/nothing", base_url=server.v1, api_key="no-key")
        with pytest.raises(openai.NotFoundError):
            asyncio.run(unknown.generate("Hello there"))

    def test_aborts(self, model: inspect_ai.model.Model, server: Server) -> None:
        async def run() -> None:
            with anyio.CancelScope() as scope:

                async def stop(_: object) -> None:
                    scope.cancel()

                await model.generate(LONG, on_stream=stop)
            assert scope.cancelled_caught

        with server.aborts():
            asyncio.run(run())


CHOICES = [" jumps over", " is the answer", " \N{SNOWMAN}"]
QUESTIONS = ["The quick brown fox", "A question", "Let me think about this." * 20]


@pytest.mark.client(
    "lm-eval",
    stream="it reads whole answers",
    tools="it has none",
    typed_answers="it has none",
    aborts="it waits for every answer",
)
class TestLmEval:
    @pytest.fixture(scope="class")
    def scored(self) -> Iterator[tuple[str, Callable[[str, str], tuple[float, bool]]]]:
        """The address of a server with a model, and transformers' score of a continuation."""
        command = [PYTHON, str(HERE / "scored_model.py")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            sent, received = process.stdin, process.stdout

            def score(context: str, continuation: str) -> tuple[float, bool]:
                print(json.dumps([context, continuation]), file=sent, flush=True)
                value, is_greedy = json.loads(received.readline())
                return value, is_greedy

            try:
                yield received.readline().strip(), score
            finally:
                sent.close()
                process.wait(60)

    def test_chat(self, server: Server) -> None:
        arguments = f"model={MODEL},base_url={server.v1}/chat/completions"
        model: Any = lm_eval.api.registry.get_model("local-chat-completions").create_from_arg_string(
            arguments
        )
        prompt = model.apply_chat_template([{"role": "user", "content": "Hello there"}])
        request = lm_eval.api.instance.Instance("generate_until", {}, (prompt, {"until": ["\n"]}), 0)
        assert model.generate_until([request], disable_tqdm=True) == ["Hello there"]

    def test_errors(self, server: Server) -> None:
        arguments = f"model=nothing,base_url={server.v1}/chat/completions,max_retries=1"
        model: Any = lm_eval.api.registry.get_model("local-chat-completions").create_from_arg_string(
            arguments
        )
        prompt = model.apply_chat_template([{"role": "user", "content": "Hello there"}])
        request = lm_eval.api.instance.Instance("generate_until", {}, (prompt, {}), 0)
        with pytest.raises(requests.HTTPError):
            model.generate_until([request], disable_tqdm=True)

    @pytest.mark.parametrize("at_once", [1, 4])
    def test_loglikelihoods(self, scored: Any, tmp_path: Path, at_once: int) -> None:
        """A task of choices has transformers' numbers."""
        url, score = scored
        data = tmp_path / "questions.jsonl"
        data.write_text("".join(json.dumps({"question": text}) + "\n" for text in QUESTIONS))
        task = {
            "task": "choices",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path)},
            "test_split": "test",
            "output_type": "multiple_choice",
            "target_delimiter": "",
            "doc_to_text": "{{question}}",
            "doc_to_choice": CHOICES,
            "doc_to_target": 0,
        }
        arguments = f"model=scored,base_url={url}/v1/completions,tokenizer_backend=remote"
        found: Any = lm_eval.simple_evaluate(
            "local-completions",
            model_args=f"{arguments},num_concurrent={at_once},batch_size=2",
            tasks=[task],
            task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
            bootstrap_iters=0,
        )
        samples = sorted(found["samples"]["choices"], key=lambda sample: sample["doc_id"])
        for question, sample in zip(QUESTIONS, samples, strict=True):
            for choice, [(value, is_greedy)] in zip(CHOICES, sample["resps"], strict=True):
                expected, is_likeliest = score(question, choice)
                assert value == pytest.approx(expected, abs=1e-3)
                assert is_greedy == is_likeliest

    def test_rolling_loglikelihoods(self, scored: Any) -> None:
        """And a whole text, as perplexities need it."""
        url, score = scored
        arguments = f"model=scored,base_url={url}/v1/completions,tokenizer_backend=remote"
        model: Any = lm_eval.api.registry.get_model("local-completions").create_from_arg_string(arguments)
        request = lm_eval.api.instance.Instance("loglikelihood_rolling", {}, (QUESTIONS[-1],), 0)
        [value] = model.loglikelihood_rolling([request], disable_tqdm=True)
        expected, _ = score("</s>", QUESTIONS[-1])
        assert value == pytest.approx(expected, abs=1e-3)
