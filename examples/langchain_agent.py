"""A LangGraph agent on agentflow: it calls a tool, reads the result and answers, with a prefix cache.

The graph is plain LangGraph; only the model object is agentflow's. Calls are decoded under the schemas of the
tools, so even a small model makes valid calls, and each turn computes only its new tokens.

    pip install ./adapters/langchain-agentflow langgraph
    python examples/langchain_agent.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from langchain_agentflow import ChatAgentflow
from langchain_core.exceptions import ModelError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from rich.console import Console

WEATHER = {"Oslo": "3 degrees and rain", "Rome": "24 degrees and sun", "Cairo": "35 degrees and dust"}
SENTENCE = r"(It|The|There|Yes|No)[ ,][^<>\n.]{9,120}\."
QUESTIONS = ["What is the weather in Rome?", "Is it raining in Oslo?"]


@tool
def weather(city: str) -> str:
    """Tells the weather in a city."""
    return f"{WEATHER.get(city, 'Nobody knows the weather')} in {city}"


def agent(model: ChatAgentflow) -> Any:
    """Returns the graph: call the tool, run it, answer."""
    looking = model.bind_tools([weather], tool_choice="any")
    # Very small models repeat a tool's result with its markup: the regex allows only a sentence.
    answering = model.bind_tools([weather], tool_choice="none", regex=SENTENCE)

    def look(state: MessagesState) -> dict[str, Any]:
        return {"messages": [looking.invoke(state["messages"])]}

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [answering.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("look", look)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_node("answer", answer)
    for before, after in ((START, "look"), ("look", "tools"), ("tools", "answer"), ("answer", END)):
        graph.add_edge(before, after)
    return graph.compile()


def show(console: Console, message: Any) -> None:
    """Prints one line per message, and the cached tokens of the model's messages."""
    if isinstance(message, ToolMessage):
        console.print(f"  [dim]the tool says[/]  {message.content}")
    if not isinstance(message, AIMessage):
        return
    for call in message.tool_calls:
        console.print(f"  [dim]the model calls[/] {call['name']}({call['args']})")
    if message.content:
        console.print(f"  [dim]the model says[/]  {message.text.strip()}")
    usage = message.usage_metadata
    assert usage is not None
    cached = usage["input_token_details"]["cache_read"]
    console.print(f"  [dim]{usage['input_tokens']} prompt tokens, {cached} of them from the cache[/]")


def main() -> int:
    """Runs the agent and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", help="a server's url (default: the model runs in this process)")
    options = parser.parse_args()
    console = Console()
    model = ChatAgentflow(base_url=options.url, max_tokens=48, stop=["\n\n"])
    graph = agent(model)
    messages: list[Any] = [SystemMessage("Answer in one short sentence.")]
    try:
        for question in QUESTIONS:
            console.print(f"\n[bold]{question}[/]")
            before = len(messages) + 1
            messages = graph.invoke({"messages": [*messages, HumanMessage(question)]})["messages"]
            for message in messages[before:]:
                show(console, message)
    except ModelError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
