"""Random ops of sessions that nearly make sense: states, variables and graphs that refer to each other."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

from support.session_peer import HANG

from agentflow.protocol import ops
from agentflow.protocol.chat import CalledTool, Conversation, Message, ToolChoice, ToolSpec
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import ErrorInfo
from agentflow.protocol.ops import Op
from agentflow.protocol.sampling import GenParams
from agentflow.protocol.text.transform import Transform
from agentflow.protocol.wire import Bye, ClientFrame, Ops

T = TypeVar("T")
# The limit of a fuzzed server: texts near it are cheap.
FRAME_BYTES = 32 * 1024

WORDS = [
    *["one ", "two", " drei é", "\n", "#7", "#40", "", "{}"],
    *['{"a": [1, "b"]}', "𝄞\u0000", "<|im_end|>", "x" * 300],
]
PATTERNS = ["[a-z]+", "(a|b)*c", "(x+x+)+y", "(", "é", "a{3,5}", "\\p{L}", ".*?"]
SOURCES = ["[0-9]{2}", "(", '{"type": "object"}', '{"$ref": "#"}', "start: /a+/", "[]", "", "{"]
NAMES = ["a", "", "answer", "é" * 40, "\u0000"]
WORDED = tuple(f"two{number}" for number in range(99))
ROLES = ["system", "user", "assistant", "tool"]
KINDS = ["regex", "schema", "choices", "grammar", "tags"]
CONSTRAINTS = [Constraint(kind, source, ("yes", "no")) for kind in KINDS for source in SOURCES]
LONG_ERROR = ErrorInfo("run_failed", "why", ErrorInfo("no_such_code", "é" * 1000))

# Values of fields, right and wrong ones. Fields that are not here keep their defaults.
VALUES: dict[type[Any], dict[str, tuple[Sequence[Any], Sequence[Any]]]] = {
    ops.Open: {
        "cache_salt": (NAMES, NAMES),
        "objective": ([None, "latency", "throughput"], [None]),
        "program": (NAMES, ["p" * 300]),
        "label": (NAMES, ["l" * 300]),
    },
    ops.Hint: {
        "objective": ([None, "latency", "throughput"], [None]),
        "output_tokens": ([None, 5], [-1, 2**31, 2**63]),
        "forks": ([None, 3], [-1, 2**63]),
        "deadline_s": ([None, 0.5], [-1.0, 1e300]),
    },
    ops.Limit: {
        "deadline_s": ([None, 1e9], [0.0, 0.01, -1.0, 1e300]),
        "output_tokens": ([None, 2**60], [0, 10, -1, 2**63]),
    },
    ops.Gen: {
        "constraint": ([None], CONSTRAINTS),
        "reply": ([False, False, True], [True]),
    },
    GenParams: {
        "max_tokens": ([1, 4, 16, 16, 64], [0, -1, 100_000, 2**31]),
        "min_tokens": ([0, 0, 1], [65, -1]),
        "temperature": ([0.0, 0.0, 1.0], [-1.0, 1e300]),
        "seed": ([None, 7], [2**63, -1]),
        "stop": ([(), (), ("f",), ("a", "é")], [("",), ("x" * 2000,)]),
        "stop_regex": ([None, None, None, "[0-9]9"], PATTERNS),
        "ignore_eos": ([False, True], [True]),
    },
    ops.Select: {
        "choices": (
            [("two", "nothing", "many", "é", "drei"), WORDED],
            [(), ("",), ("a", "a"), tuple(map(str, range(1001)))],
        )
    },
    ops.Embed: {
        "texts": ([("two",), tuple(WORDS[:5])], [(), ("",), ("x",) * 257, ("x" * 10_000,) * 21]),
        "model": (["", "scripted"], ["none"]),
        "dimensions": ([None, 3], [0, -1, 65, 2**63]),
        "prompt": ([None, "query: "], ["é" * 900]),
        "prompt_name": ([None], ["query"]),
    },
    ops.Cancel: {"failure": ([None, ops.Failure("KeyError", "'a'")], [ops.Failure("KeyError" * 200)])},
    ops.Watch: {
        "steps": ([True, False], [True]),
        "tree": ([True, False], [True]),
        "interval_s": ([0.1, 1, 60.0], [0.0, -1.0, 1e300]),
        "max_nodes": ([1, 100, 5000], [0, -1, 2**63]),
    },
    ops.Peek: {"node": ([1, 2, 3], [0, -1, 2**62])},
}

# Ops by how often they are written. Ops of the first two tuples may stand in graphs.
PLAIN: tuple[type[Any], ...] = (ops.Text, ops.Begin, ops.End, ops.Hint)
DECLARING = (ops.Gen, ops.Gen, ops.Select, ops.Set, ops.Done, ops.Read, ops.Embed, ops.Expect)
TREE = (ops.Open, ops.Converse, ops.Tools, ops.Fork, ops.Fork, ops.Seal, ops.Cancel, ops.Close, ops.Provide)
ODD = (
    ops.SubmitGraph,
    ops.SubmitGraph,
    ops.Limit,
    ops.GetStats,
    ops.GetGraph,
    ops.TaskGroup,
    ops.Watch,
    ops.Unwatch,
    ops.Peek,
)


class OpsWriter:
    """Writes the ops of a session that nearly makes sense: one in twenty numbers is wrong."""

    def __init__(self, random: Random, *, has_logprobs: bool) -> None:
        self._random = random
        self._has_logprobs = has_logprobs
        self._states: list[int] = []
        self._variables: list[int] = []
        self._expected: list[int] = []
        self._next = 1
        self._num_sent = 0
        self._forks: list[tuple[int, tuple[int, ...]]] = []
        self._open_turns: list[int] = []
        self._to_write: list[Op] = []
        # One wrong op ends its state, or the session: many sessions know none.
        self.wrongness = random.choice([0.0, 0.0, 0.01, 0.05, 0.2])

    def frames(self) -> list[ClientFrame]:
        """Ops frames in order, and perhaps a bye in the end."""
        frames: list[ClientFrame] = [self._frame() for _ in range(self._random.randrange(1, 12))]
        if self._random.random() < 0.2:
            frames.append(Bye())
        return frames

    def _frame(self) -> Ops:
        written = tuple(self._op() for _ in range(self._random.choice([0, 1, 1, 2, 5, 20])))
        first, self._num_sent = self._num_sent + 1, self._num_sent + len(written)
        return Ops(first, written)

    def _op(self) -> Op:
        if self._to_write:
            return self._to_write.pop()
        if not self._states:
            return self._write(ops.Open)
        [kinds] = self._random.choices(((*PLAIN, ops.Text, ops.Await), DECLARING, TREE, ODD), (5, 5, 3, 1))
        return self._write(self._random.choice(kinds))

    # Numbers and texts

    def _new(self) -> int:
        if self._is_wrong():
            return self._random.choice([0, -1, 1, 2**53, 2**63, 2**64 - 1])
        self._next += 1
        return self._next - 1

    def _is_wrong(self) -> bool:
        return self._random.random() < self.wrongness

    def _one_of(self, right: Sequence[T], wrong: Sequence[T]) -> T:
        return self._random.choice(wrong if self._is_wrong() else right)

    def _values(self, kind: type[Any]) -> dict[str, Any]:
        """The fields of ``VALUES``."""
        return {name: self._one_of(*values) for name, values in VALUES.get(kind, {}).items()}

    def _state(self) -> int:
        return self._new() if self._is_wrong() else self._random.choice(self._states)

    def _ref(self) -> ops.Ref:
        var = self._new() if self._is_wrong() else self._random.choice(self._variables)
        num_transforms = self._one_of([0, 0, 0, 1, 2], [17])
        return ops.Ref(var, tuple(self._transform() for _ in range(num_transforms)))

    def _transform(self) -> Transform:
        right: list[Transform] = [Transform("strip"), Transform("upper"), Transform("regex", ".*")]
        right += [Transform("items", "comma.0"), Transform("yaml")]
        wrong = [
            Transform("json", "a.9"),
            Transform("date", "%Q"),
            Transform("xml", "<"),
            *(Transform("regex", pattern) for pattern in PATTERNS),
        ]
        return self._one_of(right, wrong)

    def _parts(self) -> ops.Parts:
        parts: list[str | ops.Ref] = [self._text()]
        while self._variables and self._random.random() < 0.4:
            parts += [self._ref(), self._text()]
        return tuple(parts)

    def _text(self) -> str:
        if self._random.random() < 0.005:
            return "é" * self._random.choice([FRAME_BYTES // 2 - 200, FRAME_BYTES // 8])
        return self._random.choice(WORDS)

    def _last_of(self) -> int:
        """A state of which no more is written, if nothing goes wrong."""
        state = self._state()
        if not self._is_wrong():
            self._states = [other for other in self._states if other != state]
            self._open_turns = [other for other in self._open_turns if other != state]
        return state

    def _tools(self) -> tuple[ToolSpec, ...]:
        parameters = self._one_of([{"type": "object"}], [{}, {"a": [[]] * 9}, {"$ref": "#"}])
        return (ToolSpec(self._text(), self._text(), parameters),)

    def _choice(self) -> ToolChoice:
        return ToolChoice(self._random.choice(["auto", "required", "none"]), self._one_of([None], ["two"]))

    # Ops

    def _write(self, kind: type[Any]) -> Op:
        if kind in DECLARING:
            return self._declaring(kind)
        match kind:
            case ops.Open:
                return self._open()
            case ops.Text:
                return ops.Text(self._state(), (HANG,) if self._random.random() < 0.02 else self._parts())
            case ops.Begin | ops.End:
                return self._turn(kind)
            case ops.Seal | ops.Cancel | ops.Close:
                return kind(self._last_of(), **self._values(kind))
            case ops.Converse:
                return self._converse()
            case ops.Tools:
                tools = self._tools()
                return ops.Tools(self._state(), self._one_of([tools], [(), tools * 2]), self._choice())
            case ops.Fork:
                return self._fork()
            case ops.TaskGroup:
                if self._forks and not self._is_wrong():
                    return ops.TaskGroup(*self._forks[-1])
                return ops.TaskGroup(self._state(), (self._state(), self._state()))
            case ops.Provide:
                var = self._random.choice(self._expected) if self._expected else self._new()
                if self._is_wrong():
                    return ops.Provide(var, error=LONG_ERROR)
                text = self._text()
                return ops.Provide(var, text, more=len(text) % 3 == 0)
            case ops.SubmitGraph:
                return self._submit()
            case ops.Await:
                return ops.Await(self._state(), self._new())
            case ops.Limit:
                return ops.Limit(self._random.choice([0, self._state()]), **self._values(kind))
            case ops.Hint:
                return ops.Hint(self._state(), **self._values(kind))
            case ops.Unwatch:
                return ops.Unwatch()
        return kind(self._new(), **self._values(kind))  # with a ticket

    def _declaring(self, kind: type[Any]) -> Op:
        """An op with a new variable."""
        fields = self._values(kind)
        match kind:
            case ops.Set:
                fields["parts"] = self._parts()  # before the variable is there: none may be its own source
            case ops.Read:
                fields["what"] = self._random.choice(["text", "token_ids" if self._has_logprobs else "text"])
            case ops.Gen:
                logprobs = self._random.choice([False, False, self._has_logprobs])
                top = self._one_of([0, 0, 3 * self._has_logprobs], [3, 21, -1])
                params = self._values(GenParams)
                fields["params"] = GenParams(logprobs=logprobs, top_logprobs=top, **params)
        var = self._new()
        self._variables.append(var)
        if kind is ops.Expect:
            self._expected.append(var)
        return kind(self._state(), var, self._random.choice(NAMES), **fields)

    def _open(self) -> Op:
        state = self._new()
        self._states.append(state)
        if not self._is_wrong():  # most ops make no sense on an empty state
            self._to_write.append(ops.Text(state, ("Begin ",)))
        return ops.Open(state, **self._values(ops.Open))

    def _turn(self, kind: type[Any]) -> Op:
        """The begin of a turn, or the end of one that is open; if it is wrong, either."""
        if (kind is ops.End) != bool(self._open_turns) and not self._is_wrong():
            kind = ops.End if self._open_turns else ops.Begin
        if kind is ops.End:
            return ops.End(self._open_turns.pop() if self._open_turns else self._state())
        self._open_turns.append(self._state())
        return ops.Begin(self._open_turns[-1], self._random.choice(ROLES))

    def _converse(self) -> Op:
        """A state that begins with a conversation; one in twenty is not the first item."""
        calls = (CalledTool("c", self._text(), self._one_of(["{}", '{"a": 1}'], SOURCES)),)
        role, call_id = self._one_of(ROLES, ["", "judge"]), self._random.choice([None, "c"])
        messages = [
            Message("user", self._text()),
            Message("assistant", self._text(), tool_calls=self._random.choice([(), calls])),
            Message(role, self._text(), tool_call_id=call_id),
        ]
        tools = self._tools()
        given = self._one_of([()], [tools, tools * 2])
        reported = Conversation(tuple(messages[: self._random.randrange(4)]), given, self._choice())
        if self._is_wrong():
            return ops.Converse(self._state(), reported)
        state = self._new()
        self._states.append(state)
        self._to_write.append(ops.Converse(state, reported))
        return ops.Open(state)

    def _fork(self) -> Op:
        state = self._state()
        children = tuple(self._new() for _ in range(self._one_of([1, 2, 2, 5], [0])))
        self._states += children
        if children:
            self._forks.append((state, children))
        return ops.Fork(state, children)

    def _submit(self) -> Op:
        """A graph, written by another writer, because its numbers are separate."""
        inner = OpsWriter(self._random, has_logprobs=self._has_logprobs)
        inner.wrongness = self.wrongness
        written: list[Op] = [inner._open(), *inner._to_write]
        inner._to_write.clear()
        for _ in range(self._random.randrange(12)):
            if inner._states:
                written.append(inner._write(self._random.choice((*PLAIN, *DECLARING, ops.Fork, ops.Seal))))
        base, self._next = self._next, self._next + inner._next
        places = {var: f"0.{var}" for var in inner._variables if self._random.random() < 0.5}
        outputs = tuple(var for var in inner._variables if self._random.random() < 0.5)
        inputs = {var: "given" for var in inner._expected if self._random.random() < 0.8}
        self._states.append(base)
        return ops.SubmitGraph(base, tuple(written), inputs, outputs, "seeds", places)
