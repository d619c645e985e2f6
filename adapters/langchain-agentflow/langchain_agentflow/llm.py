"""``Agentflow``: LangChain's text model on agentflow, which continues a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from contextvars import copy_context
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict

import agentflow as af
from agentflow.integrations import Answer, Delta, ModelCall, ModelConnection, TextPiece, open_task_group
from langchain_agentflow.errors import langchain_errors
from langchain_agentflow.messages import finish_reason_of, logprobs_of
from langchain_agentflow.programs import acomplete, astream, complete, one_batch, stream
from langchain_agentflow.settings import MAX_THREADS, ModelSettings, translated


class Agentflow(ModelSettings, BaseLLM):
    """A text model that runs in this process or on an agentflow server.

    >>> Agentflow(max_tokens=16).invoke("The capital of Norway is")
    """

    model_config = ConfigDict(extra="forbid")  # a misspelt field is an error

    @property
    def _llm_type(self) -> str:
        return "agentflow"

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        connection, calls = self._calls(prompts, stop, kwargs)
        num_threads = max(1, min(len(calls), MAX_THREADS))
        with one_batch([connection], len(calls)), ThreadPoolExecutor(num_threads) as threads:
            # The batch is a context variable, so each thread needs a copy of the context.
            futures = [
                threads.submit(
                    copy_context().run, complete, connection, call, run_manager, self._max_retries(kwargs)
                )
                for call in calls
            ]
            return _result([future.result() for future in futures])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        connection, calls = self._calls(prompts, stop, kwargs)
        found: list[list[Answer]] = [[] for _ in calls]

        async def collect(call: ModelCall, into: list[Answer]) -> None:
            into += await acomplete(connection, call, run_manager, self._max_retries(kwargs))

        with one_batch([connection], len(calls)):
            async with open_task_group() as group:
                for call, into in zip(calls, found, strict=True):
                    group.start_soon(collect, call, into)
        return _result(found)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        connection, [call] = self._calls([prompt], stop, {**kwargs, "n": 1})
        with closing(stream(connection, call, run_manager, self._max_retries(kwargs))) as events:
            for event in events:
                chunk = _chunk(event)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        connection, [call] = self._calls([prompt], stop, {**kwargs, "n": 1})
        async with aclosing(astream(connection, call, run_manager, self._max_retries(kwargs))) as events:
            async for event in events:
                chunk = _chunk(event)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _calls(
        self, prompts: list[str], stop: list[str] | None, asked: dict[str, Any]
    ) -> tuple[ModelConnection, list[ModelCall]]:
        with langchain_errors():
            asked = translated(asked)
            n, salt = asked.get("n") or self.n, asked.get("cache_salt", self.cache_salt)
            options = self.options(stop, asked)
            says = [af.gen("answer", **options) for _ in prompts]
        calls = [
            ModelCall(prompt, one, n=n, cache_salt=salt) for prompt, one in zip(prompts, says, strict=True)
        ]
        return self.connection(asked.get("model") or asked.get("model_name")), calls


def _result(found: list[list[Answer]]) -> LLMResult:
    usages = [answers[0].usage for answers in found]
    num_output = sum(answer.usage.output_tokens for answers in found for answer in answers)
    num_prompt = sum(usage.prompt_tokens for usage in usages)
    usage = {
        "prompt_tokens": num_prompt,
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
    generations = [
        [Generation(text=answer.text, generation_info=_info(answer)) for answer in answers]
        for answers in found
    ]
    name = next((answers[0].model for answers in found), "")
    return LLMResult(generations=generations, llm_output={"token_usage": usage, "model_name": name})


def _info(answer: Answer) -> dict[str, Any]:
    info: dict[str, Any] = {"finish_reason": finish_reason_of(answer, has_calls=False)}
    return info if answer.logprobs is None else {**info, "logprobs": {"content": logprobs_of(answer)}}


def _chunk(event: Delta | Answer) -> GenerationChunk:
    if isinstance(event, Answer):
        return GenerationChunk(text="", generation_info=_info(event))
    assert isinstance(event.piece, TextPiece)
    return GenerationChunk(text=event.piece.text)
