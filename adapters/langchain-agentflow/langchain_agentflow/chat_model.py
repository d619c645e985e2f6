"""``ChatAgentflow``: LangChain's chat model on agentflow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import BaseModel, ConfigDict

import agentflow as af
from agentflow.integrations import DEFAULT_MODEL, Answer, Delta, ModelCall, ModelConnection, conversation_with
from langchain_agentflow.errors import langchain_errors
from langchain_agentflow.messages import ChunkWriter, to_agentflow, to_langchain
from langchain_agentflow.programs import acomplete, astream, complete, one_batch, stream
from langchain_agentflow.settings import MAX_THREADS, ModelSettings, translated
from langchain_agentflow.structured_output import Method, constraint_of, structured
from langchain_agentflow.tools import Choice, Tool, as_openai, choice_of, specs_of

# The context of the default model, in tokens.
_KNOWN_CONTEXT = {None: 8192, DEFAULT_MODEL: 8192}


class ChatAgentflow(ModelSettings, BaseChatModel):
    """A chat model that runs in this process or on an agentflow server.

    >>> model = ChatAgentflow()  # smollm2-135m in this process
    >>> model = ChatAgentflow(base_url="ws://127.0.0.1:8410", temperature=0.7)
    >>> model.invoke("What do plants do?").content
    """

    model_config = ConfigDict(extra="forbid")  # a misspelt field is an error

    @property
    def _llm_type(self) -> str:
        return "agentflow-chat"

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        text = super()._get_llm_string(stop, **kwargs)  # of the constructor's arguments, without the backend
        return text if self._backend_key is None else f"{text}---{self._backend_key}"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "agentflow"
        name = kwargs.get("model") or self.model_name
        if name:
            params["ls_model_name"] = name
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
        )
        is_local = self.base_url is None and self.backend is None
        if is_local and self.model_name in _KNOWN_CONTEXT:
            profile["max_input_tokens"] = _KNOWN_CONTEXT[self.model_name]
        return profile

    # One call

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            call, connection = self._call(messages, stop, kwargs), self._connection_for(kwargs)
        return _result(complete(connection, call, run_manager, self._max_retries(kwargs)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            call, connection = self._call(messages, stop, kwargs), self._connection_for(kwargs)
        return _result(await acomplete(connection, call, run_manager, self._max_retries(kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with langchain_errors():
            call = self._call(messages, stop, kwargs, is_streamed=True)
            connection = self._connection_for(kwargs)
        writer = ChunkWriter()
        with closing(stream(connection, call, run_manager, self._max_retries(kwargs))) as events:
            for event in events:
                chunk = _chunk(writer, event)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with langchain_errors():
            call = self._call(messages, stop, kwargs, is_streamed=True)
            connection = self._connection_for(kwargs)
        writer = ChunkWriter()
        async with aclosing(astream(connection, call, run_manager, self._max_retries(kwargs))) as events:
            async for event in events:
                chunk = _chunk(writer, event)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _call(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        asked: dict[str, Any],
        *,
        is_streamed: bool = False,
    ) -> ModelCall:
        asked = translated(asked)
        asked |= constraint_of(asked.get("response_format"))
        for name in ("response_format", "strict"):  # every schema is enforced strictly
            asked.pop(name, None)
        tools = specs_of(asked.pop("tools", None) or ())
        names = [tool.name for tool in tools]
        choice = choice_of(
            asked.pop("tool_choice", None), names, parallel=asked.pop("parallel_tool_calls", None)
        )
        options = self.options(stop, asked)
        prompt = conversation_with(to_agentflow(messages), tools, choice)
        n = 1 if is_streamed else asked.get("n") or self.n
        salt = asked.get("cache_salt", self.cache_salt)
        return ModelCall(prompt, af.reply("answer", **options), n=n, cache_salt=salt)

    def _connection_for(self, asked: dict[str, Any]) -> ModelConnection:
        return self.connection(asked.get("model") or asked.get("model_name"))

    # Many calls

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Runs all inputs concurrently, as one program, with a thread for each that only waits."""
        configs = [_with_threads(one, len(inputs)) for one in get_config_list(config, len(inputs))]
        with one_batch([self._connection_for(kwargs)], len(inputs)):
            return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Runs all inputs concurrently, as one program."""
        with one_batch([self._connection_for(kwargs)], len(inputs)):
            return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    # Tools and structure

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: Choice = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Returns the model with tools. Calls are always valid under their schemas, whatever ``strict`` is.

        ``tool_choice``: ``"auto"``, ``"none"``, ``"any"``, ``"required"`` or True, or a tool's name, also in
        the form of OpenAI's or Anthropic's API.
        """
        with langchain_errors():
            described = as_openai(tools)
            choice_of(tool_choice, [spec.name for spec in specs_of(described)], parallel=parallel_tool_calls)
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=described, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Returns a runnable whose values conform to the schema: each ``method`` decodes under a grammar.

        ``json_schema`` and ``json_mode`` (which enforces the schema here, too): the answer is the value, or
        calls of ``tools`` if these are given. ``function_calling``: the arguments of a call are the value.
        """
        return structured(self, schema, method=method, include_raw=include_raw, **kwargs)

    # Tokens

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Tool] | None = None
    ) -> int:
        """Returns the length of the prompt, which includes its tools and the template's special tokens."""

        async def count(flow: af.Session) -> int:
            async with flow.state() as s:
                s += conversation_with(to_agentflow(messages), specs_of(as_openai(tools or ())))
                return len(await s.token_ids())

        with langchain_errors():
            return self.connection().shared.run(count)


def _result(answers: Sequence[Answer]) -> ChatResult:
    generations = []
    for answer in answers:
        message = to_langchain(answer)
        info = {"finish_reason": message.response_metadata["finish_reason"]}
        generations.append(ChatGeneration(message=message, generation_info=info))
    return ChatResult(generations=generations, llm_output={"model_name": answers[0].model})


def _with_threads(config: RunnableConfig, num_inputs: int) -> RunnableConfig:
    """Sets ``max_concurrency`` to the number of inputs, unless it is set."""
    if config.get("max_concurrency") is not None:
        return config
    return {**config, "max_concurrency": min(num_inputs, MAX_THREADS)}


def _chunk(writer: ChunkWriter, event: Delta | Answer) -> ChatGenerationChunk:
    if isinstance(event, Delta):
        return ChatGenerationChunk(message=writer.chunk(event.piece))
    return ChatGenerationChunk(message=writer.last(event))
