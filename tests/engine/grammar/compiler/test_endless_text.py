"""Forced text under grammars in Lark's notation always ends. Where it did not, the library never returned, so
each test runs in a process with a limit of processor time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.llguidance import CAN_BE_ENDLESS
from agentflow.protocol.constraint import Constraint

WALKS = r"""
import random, resource
resource.setrlimit(resource.RLIMIT_CPU, (40, 40))
import numpy as np
from agentflow.engine.grammar.compiler.compile import _byte_vocabulary, compile_constraint
from agentflow.engine.grammar.llguidance import LlguidanceGrammar
from agentflow.errors import RequestRefused, BadArgument
from agentflow.protocol.constraint import Constraint

def walk(source, dice):
    try:
        payload = compile_constraint(Constraint("grammar", source)).payload
    except BadArgument:
        return 0
    text = LlguidanceGrammar(payload.decode(), _byte_vocabulary()).matcher()
    most = 0
    for _ in range(30):
        most = max(most, len(text.forced()))
        allowed = np.flatnonzero(np.unpackbits(text.mask().view(np.uint8), bitorder="little"))
        if not len(allowed):
            break
        text.accept(int(dice.choice(list(allowed))))
    return most
"""


def walked(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", WALKS + code], capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode()


def test_f37_forced_text_of_greedy_terminals_ends() -> None:
    sources = [
        'start: "a" | "b" C C\nC: /x+/',
        'start: "b" | "a" / +/ " b"',
        'start: "b" | "a" W "x"\nW: "x"+',
        'start: "b" | "a" W "xy"\nW: X{2,}\nX: "xy"',
        'start: "a" | "b" C C\nC: ~/x{5}/ & /x+/',
        'start: "a" | "b" D C\nD: /é+/\nC: "é!"',
        'start: "a" | "b" /[x]+\n?/ /x/',
        'start: "a" | "b" L C\nL: /x+/i\nC: "x"',
    ]
    code = (
        f"for source in {sources!r}:\n    print(max(walk(source, random.Random(seed)) for seed in range(4)))"
    )
    assert all(int(most) <= 10 for most in walked(code).split())


def test_f37_forced_text_of_random_grammars_ends() -> None:
    code = r"""
pieces = ['"x"', '"xy"', "/x+/", "/y*x/", "/(xy)+/", "/[xy]+/", "/x{2,}/", "/x{2,9}/", "/(x|yx)*y?/", "T"]
terminals = ['"x"+', '("x" | "y") "x"*', '/x/ "y"?', "/[^x]+/", '"y"{2,}', "/x*/ & /.{1,9}/", "~/y/ & /x+/"]
longest = []
for seed in range(60):
    dice = random.Random(seed)
    rows = [" ".join(dice.choices(pieces, k=dice.randint(1, 4))) for _ in range(2)]
    source = f'start: "a" | "b" {rows[0]} | "c" {rows[1]} "z"\nT: {dice.choice(terminals)}'
    longest.append(walk(source, dice))
print(max(longest))
"""
    assert 0 < int(walked(code)) <= 40


@pytest.mark.parametrize(
    ("terminal", "is_forced"),
    [
        ("/[0-9]+/", True),
        (r'/"(?:[^"\\\n]|\\.)*"/', True),
        (r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?/", True),
        (r"/[a-z_]\w*/", True),
        ("/[ \\t\\n]+/", True),
        ("/x{3,9}/", True),
        ("/(ab)*c/", True),
        ('"x" "y"?', True),
        ("/ +/", False),
        ("/(ab)*/", False),
        ("/é+/", False),
        ('"x"+', False),
        ("/x+/ & /.{2}/", False),
    ],
)
def test_text_is_forced_unless_a_terminal_may_go_on_with_one_byte(terminal: str, is_forced: bool) -> None:
    source = f'start: item+ "end"\nitem: T "," // +\nT: {terminal}'
    compiled = compile_constraint(Constraint("grammar", source))
    assert (CAN_BE_ENDLESS.encode() not in compiled.payload) == is_forced
