"""LangChain's and LlamaIndex's own models for OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from conftest import Server
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from subjects import ANSWER, LONG, MODEL, TOO_LONG, Person, weather


def openai_model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, max_retries=0, **options)


@pytest.mark.client("langchain-openai")
class TestLangchainOpenai:
    @pytest.fixture(params=["chat", "responses"])
    def model(self, request: Any) -> ChatOpenAI:
        return openai_model(use_responses_api=request.param == "responses")

    def test_chat(self, model: ChatOpenAI) -> None:
        assert model.invoke("Hello there").text == "Hello there"

    def test_stream(self, model: ChatOpenAI) -> None:
        assert "".join(chunk.text for chunk in model.stream("Hello there")) == "Hello there"

    def test_tools(self, model: ChatOpenAI) -> None:
        agent = create_react_agent(model, [tool(weather)])
        answer = agent.invoke({"messages": [("user", "Hello there")]})
        assert answer["messages"][-1].text == ANSWER

    @pytest.mark.parametrize("method", ["function_calling", "json_schema"])
    def test_typed_answers(self, model: ChatOpenAI, method: Any) -> None:
        typed = model.with_structured_output(Person, method=method, strict=False)
        assert isinstance(typed.invoke("Hello there"), Person)

    def test_errors(self, model: ChatOpenAI) -> None:
        with pytest.raises(ContextOverflowError):
            model.invoke(TOO_LONG)

    def test_aborts(self, model: ChatOpenAI, server: Server) -> None:
        with server.aborts():
            chunks: Any = model.stream(LONG)
            next(chunk for chunk in chunks if chunk.text)
            chunks.close()


@pytest.mark.client("langchain-anthropic")
class TestLangchainAnthropic:
    @pytest.fixture
    def model(self) -> Any:
        return ChatAnthropic(model=MODEL, max_retries=0, max_tokens=500)

    def test_chat(self, model: Any) -> None:
        assert model.invoke("Hello there").text == "Hello there"

    def test_stream(self, model: Any) -> None:
        assert "".join(chunk.text for chunk in model.stream("Hello there")) == "Hello there"

    def test_tools(self, model: Any) -> None:
        agent = create_react_agent(model, [tool(weather)])
        answer = agent.invoke({"messages": [("user", "Hello there")]})
        assert answer["messages"][-1].text == ANSWER

    @pytest.mark.parametrize("method", ["function_calling", "json_schema"])
    def test_typed_answers(self, model: Any, method: str) -> None:
        assert isinstance(model.with_structured_output(Person, method=method).invoke("Hello there"), Person)

    def test_errors(self, model: Any) -> None:
        with pytest.raises(ContextOverflowError):
            model.invoke(TOO_LONG)

    def test_aborts(self, model: Any, server: Server) -> None:
        model.max_tokens = 30_000
        with server.aborts():
            chunks = model.stream(LONG)
            next(chunk for chunk in chunks if chunk.text)
            chunks.close()


@pytest.mark.client("llama-index-llms-openai")
class TestLlamaIndex:
    @pytest.fixture
    def model(self, server: Server) -> OpenAILike:
        return OpenAILike(
            MODEL,
            api_base=server.v1,
            api_key="no-key",
            is_chat_model=True,
            is_function_calling_model=True,
            max_retries=0,
        )

    def test_chat(self, model: OpenAILike) -> None:
        answer = model.chat([ChatMessage("Hello there")])
        assert answer.message.content == "Hello there"

    def test_stream(self, model: OpenAILike) -> None:
        chunks = model.stream_chat([ChatMessage("Hello there")])
        assert "".join(chunk.delta or "" for chunk in chunks) == "Hello there"

    def test_tools(self, model: OpenAILike) -> None:
        answer = model.predict_and_call([FunctionTool.from_defaults(weather)], "Hello there")
        assert answer.response == "sunny"

    def test_typed_answers(self, model: OpenAILike) -> None:
        typed = model.as_structured_llm(Person)
        assert isinstance(typed.chat([ChatMessage("Hello there")]).raw, Person)

    def test_errors(self, model: OpenAILike) -> None:
        with pytest.raises(openai.BadRequestError):
            model.chat([ChatMessage(TOO_LONG)])

    def test_aborts(self, model: OpenAILike, server: Server) -> None:
        with server.aborts():
            chunks: Any = model.stream_chat([ChatMessage(LONG)])
            next(chunks)
            chunks.close()
