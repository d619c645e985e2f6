"""ReAct: the model thinks, calls a tool, reads the result, and repeats this until it can answer.

After Yao et al., 2023, in plain text after some solved questions, as in the paper. The tools are a calculator
and a small encyclopedia. The loop is plain Python around one append-only state, so the prompt of each round
is in the cache when the next round begins. The loop always ends: a tool answers invalid input with a hint,
and after the last round or a repeated call, "finish" is the only action that the model can choose.

    python examples/react.py [--url ws://127.0.0.1:8410]
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from example_session import example_parser, run_example
from rich.console import Console
from rich.markup import escape

import agentflow as af

QUESTIONS = [
    "How high is Mont Blanc?",
    "What is 37 * 12?",
    "What is 7 * (3 + 5)?",
    "How high is Kilimanjaro?",
]
FACTS = {
    "everest": "Mount Everest is 8849 metres high.",
    "mont blanc": "Mont Blanc is 4806 metres high.",
    "kilimanjaro": "Kilimanjaro is 5895 metres high.",
    "rhine": "The Rhine is 1233 kilometres long.",
}
SOLVED = """\
Question: How high is Everest?
Thought: I need to look up Everest.
look_up[Everest]
Observation: Mount Everest is 8849 metres high.
Thought: I know the answer.
finish[Mount Everest is 8849 metres high.]

Question: What is 12 * 11?
Thought: I need to calculate 12 * 11.
calculate[12 * 11]
Observation: 132
Thought: I know the answer.
finish[132]

Question: How long is the Rhine?
Thought: I need to look up the Rhine.
look_up[Rhine]
Observation: The Rhine is 1233 kilometres long.
Thought: I know the answer.
finish[The Rhine is 1233 kilometres long.]

Question: What is 90 - 4?
Thought: I need to calculate 90 - 4.
calculate[90 - 4]
Observation: 86
Thought: I know the answer.
finish[86]

"""
OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """Returns the value of an expression of numbers, + - * / and brackets. Evaluates nothing else."""
    try:
        if not re.fullmatch(r"[\d .()+*/-]{1,200}", expression):
            raise ValueError("not arithmetic")
        return f"{_value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "calculate understands numbers, + - * / and brackets only"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError("not arithmetic")


def look_up(topic: str) -> str:
    """Returns the fact about the first known topic in ``topic``."""
    found = [fact for name, fact in FACTS.items() if name in topic.lower()]
    return found[0] if found else f"nothing is known; there are entries on {', '.join(FACTS)}"


TOOLS: dict[str, Callable[[str], str]] = {"calculate": calculate, "look_up": look_up}


@dataclass
class Step:
    """One round: the thought, the call, and its result."""

    thought: str
    action: str
    input: str
    observation: str


@dataclass
class Trace:
    """All rounds and the answer."""

    steps: list[Step] = field(default_factory=list)
    answer: str = ""

    @property
    def repeats_itself(self) -> bool:
        """Whether a call was repeated; the model would repeat it forever."""
        calls = [(step.action, step.input) for step in self.steps]
        return len(set(calls)) < len(calls)


@af.program
async def react(s: af.State, question: str, max_steps: int = 4) -> Trace:
    """Answers a question with the tools, in at most ``max_steps`` rounds."""
    s += SOLVED
    s += f"Question: {question}\n"
    trace = Trace()
    while True:
        may_call = len(trace.steps) < max_steps and not trace.repeats_itself
        s += "Thought:" + af.gen("thought", max_tokens=24, stop="\n") + "\n"
        s += af.select("action", [*TOOLS, "finish"] if may_call else ["finish"])
        s += "[" + af.gen("input", max_tokens=24, stop=["]", "\n"]) + "]\n"
        action, text = await s["action"], await s["input"].strip()
        if action == "finish":
            trace.answer = text
            return trace
        step = Step(await s["thought"].strip(), action, text, observation=TOOLS[action](text))
        s += f"Observation: {step.observation}\n"
        trace.steps.append(step)


async def main(flow: af.Session, console: Console) -> None:
    """Prints each round for some questions."""
    for question in QUESTIONS:
        trace = await flow.run(react, question)
        console.print(f"[bold]{escape(question)}")
        for step in trace.steps:
            call = f"{step.action}({step.input!r})"
            console.print(
                f"  [dim]{escape(step.thought)}[/]\n  {escape(call)} → [cyan]{escape(step.observation)}"
            )
        console.print(f"  [green]{escape(trace.answer)}\n")


if __name__ == "__main__":
    sys.exit(run_example(main, example_parser(__doc__).parse_args()))
