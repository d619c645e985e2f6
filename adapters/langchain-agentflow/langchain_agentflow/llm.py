"""``Agentflow``: a text model of LangChain on agentflow, for prompts that are no conversations."""

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
from agentflow.integrations.client import Ended, ModelCall, ModelConnection, Said
from agentflow.protocol.chat import TextPiece
from agentflow.runtime.task_group import open_task_group
from langchain_agentflow.calls import Retries, aask, ask
from langchain_agentflow.errors import langchain_errors
from langchain_agentflow.messages import finish_reason_of, logprobs_of
from langchain_agentflow.programs import one_batch
from langchain_agentflow.settings import MOST_THREADS, ModelSettings


class Agentflow(ModelSettings, BaseLLM):
    """A model that goes on with a text.

    >>> Agentflow(max_tokens=16).invoke("The capital of Norway is")
    """

    model_config = ConfigDict(extra="forbid")  # a field that is spelt wrongly is told

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
        num_threads = max(1, min(len(calls), MOST_THREADS))
        with one_batch(connection, len(calls)), ThreadPoolExecutor(num_threads) as threads:
            contexts = [copy_context() for _ in calls]  # of each thread its own: it knows the batch
            asked = [
                threads.submit(context.run, self._ends, connection, call, run_manager, self._retries(kwargs))
                for context, call in zip(contexts, calls, strict=True)
            ]
            return self._result([one.result() for one in asked])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        connection, calls = self._calls(prompts, stop, kwargs)
        found: list[list[Ended]] = [[] for _ in calls]

        async def collect(call: ModelCall, into: list[Ended]) -> None:
            async with aclosing(aask(connection, call, run_manager, self._retries(kwargs))) as events:
                into += [event async for event in events if isinstance(event, Ended)]

        with one_batch(connection, len(calls)):
            async with open_task_group() as group:
                for call, into in zip(calls, found, strict=True):
                    group.start_soon(collect, call, into)
        return self._result(found)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        connection, [call] = self._calls([prompt], stop, {**kwargs, "n": 1})
        retries = self._retries(kwargs, is_streamed=True)
        with closing(ask(connection, call, run_manager, retries)) as events:
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
        async with aclosing(
            aask(connection, call, run_manager, self._retries(kwargs, is_streamed=True))
        ) as events:
            async for event in events:
                chunk = _chunk(event)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    @staticmethod
    def _ends(
        connection: ModelConnection,
        call: ModelCall,
        run_manager: CallbackManagerForLLMRun | None,
        retries: Retries,
    ) -> list[Ended]:
        with closing(ask(connection, call, run_manager, retries)) as events:
            return [event for event in events if isinstance(event, Ended)]

    def _calls(
        self, prompts: list[str], stop: list[str] | None, asked: dict[str, Any]
    ) -> tuple[ModelConnection, list[ModelCall]]:
        n, salt = asked.get("n") or self.n, asked.get("cache_salt", self.cache_salt)
        with langchain_errors():
            options = self.options(stop, asked)
            says = [af.gen("answer", **options) for _ in prompts]
        calls = [
            ModelCall(prompt, one, n=n, cache_salt=salt) for prompt, one in zip(prompts, says, strict=True)
        ]
        return self.connection(asked.get("model") or asked.get("model_name")), calls

    def _result(self, found: list[list[Ended]]) -> LLMResult:
        usages = [ends[0].usage for ends in found]
        outputs = sum(end.usage.output_tokens for ends in found for end in ends)
        prompts = sum(usage.prompt_tokens for usage in usages)
        told = {
            "prompt_tokens": prompts,
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "completion_tokens": outputs,
            "total_tokens": prompts + outputs,
        }
        generations = [
            [
                Generation(text=end.text, generation_info=_info(end))
                for end in sorted(ends, key=lambda end: end.index)
            ]
            for ends in found
        ]
        name = next((ends[0].model for ends in found), "")
        return LLMResult(generations=generations, llm_output={"token_usage": told, "model_name": name})


def _info(end: Ended) -> dict[str, Any]:
    told: dict[str, Any] = {"finish_reason": finish_reason_of(end, has_calls=False)}
    return told if end.logprobs is None else {**told, "logprobs": {"content": logprobs_of(end)}}


def _chunk(event: Said | Ended) -> GenerationChunk:
    if isinstance(event, Ended):
        return GenerationChunk(text="", generation_info=_info(event))
    assert isinstance(event.piece, TextPiece)
    return GenerationChunk(text=event.piece.text)
