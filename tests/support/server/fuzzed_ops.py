"""Random ops of sessions that nearly make sense: states, variables and graphs that refer to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from support.session_peer import HANG

from agentflow.protocol import ops
from agentflow.protocol.chat import CalledTool, Conversation, Message, ToolChoice, ToolSpec
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import ErrorInfo
from agentflow.protocol.ops import Op
from agentflow.protocol.sampling import SamplingParams
from agentflow.protocol.transform import Transform
from agentflow.protocol.wire import Bye, ClientFrame, Ops

T = TypeVar("T")
# The limit of a fuzzed server: texts near it are cheap.
FRAME_BYTES = 32 * 1024

WORDS = [
    "one ",
    "two",
    " drei é",
    "\n",
    "#7",
    "#40",
    "",
    "{}",
    '{"a": [1, "b"]}',
    "𝄞\u0000",
    "<|im_end|>",
    "x" * 300,
]
PATTERNS = ["[a-z]+", "(a|b)*c", "(x+x+)+y", "(", "é", "a{3,5}", "\\p{L}", ".*?"]
SOURCES = ["[0-9]{2}", "(", '{"type": "object"}', '{"$ref": "#"}', "start: /a+/", "[]", "", "{"]
NAMES = ["a", "", "answer", "é" * 40, "\u0000"]


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
            return self._open()
        writers = (_PLAIN_WRITERS, _DECLARING_WRITERS, _TREE_WRITERS, _ODD_WRITERS)
        [kind] = self._random.choices(writers, (5, 5, 3, 1))
        return self._random.choice(kind)(self)

    # Numbers and texts.

    def _new(self) -> int:
        if self._is_wrong():
            return self._random.choice([0, -1, 1, 2**53, 2**63, 2**64 - 1])
        self._next += 1
        return self._next - 1

    def _is_wrong(self) -> bool:
        return self._random.random() < self.wrongness

    def _one_of(self, right: Sequence[T], wrong: Sequence[T]) -> T:
        return self._random.choice(wrong if self._is_wrong() else right)

    def _state(self) -> int:
        return self._new() if self._is_wrong() else self._random.choice(self._states)

    def _ref(self) -> ops.Ref:
        var = self._new() if self._is_wrong() else self._random.choice(self._variables)
        num_transforms = self._one_of([0, 0, 0, 1, 2], [17])
        return ops.Ref(var, tuple(self._transform() for _ in range(num_transforms)))

    def _transform(self) -> Transform:
        right: list[Transform] = [Transform("strip"), Transform("upper"), Transform("regex", ".*")]
        wrong = [Transform("json", "a.9"), *(Transform("regex", pattern) for pattern in PATTERNS)]
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

    def _declared(self) -> tuple[int, int, str]:
        """A state, a new variable of it and its name."""
        var = self._new()
        self._variables.append(var)
        return self._state(), var, self._random.choice(NAMES)

    # Ops.

    def _open(self) -> Op:
        state = self._new()
        self._states.append(state)
        if not self._is_wrong():  # most ops make no sense on an empty state
            self._to_write.append(ops.Text(state, ("Begin ",)))
        return ops.Open(
            state,
            self._random.choice(NAMES),
            self._random.choice([None, "latency", "throughput"]),
            self._one_of(NAMES, ["p" * 300]),
            self._one_of(NAMES, ["l" * 300]),
        )

    def _plain_text(self) -> Op:
        if self._random.random() < 0.02:
            return ops.Text(self._state(), (HANG,))
        return ops.Text(self._state(), self._parts())

    def _tools(self) -> Op:
        parameters = self._one_of([{"type": "object"}], [{}, {"a": [[]] * 9}, {"$ref": "#"}])
        tools = (ToolSpec(self._text(), self._text(), parameters),)
        choice = ToolChoice(self._random.choice(["auto", "required", "none"]), self._one_of([None], ["two"]))
        return ops.Tools(self._state(), self._one_of([tools], [(), tools * 2]), choice)

    def _begin(self) -> Op:
        if self._open_turns and not self._is_wrong():
            return self._end()
        self._open_turns.append(self._state())
        return ops.Begin(self._open_turns[-1], self._random.choice(["system", "user", "assistant", "tool"]))

    def _end(self) -> Op:
        if self._open_turns:
            return ops.End(self._open_turns.pop())
        return ops.End(self._state()) if self._is_wrong() else self._begin()

    def _await(self) -> Op:
        return ops.Await(self._state(), self._new())

    def _hint(self) -> Op:
        return ops.Hint(
            self._state(),
            self._random.choice([None, "latency", "throughput"]),
            self._one_of([None, 5], [-1, 2**31, 2**63]),
            self._one_of([None, 3], [-1, 2**63]),
            self._one_of([None, 0.5], [-1.0, 1e300]),
        )

    def _converse(self) -> Op:
        """A state that begins with a conversation; one in twenty is not the first item."""
        roles = self._one_of(["system", "user", "assistant", "tool"], ["", "judge"])
        calls = (CalledTool("c", self._text(), self._one_of(["{}", '{"a": 1}'], SOURCES)),)
        messages = [
            Message("user", self._text()),
            Message("assistant", self._text(), tool_calls=self._random.choice([(), calls])),
            Message(roles, self._text(), tool_call_id=self._random.choice([None, "c"])),
        ]
        parameters = self._one_of([{"type": "object"}], [{}, {"a": [[]] * 9}, {"$ref": "#"}])
        tools = (ToolSpec(self._text(), self._text(), parameters),)
        choice = ToolChoice(self._random.choice(["auto", "required", "none"]), self._one_of([None], ["two"]))
        reported = Conversation(
            tuple(messages[: self._random.randrange(4)]), self._one_of([()], [tools, tools * 2]), choice
        )
        if self._is_wrong():
            return ops.Converse(self._state(), reported)
        state = self._new()
        self._states.append(state)
        self._to_write.append(ops.Converse(state, reported))
        return ops.Open(state)

    def _gen(self) -> Op:
        state, var, name = self._declared()
        constraint = None
        if self._is_wrong():
            kind = self._random.choice(["regex", "schema", "choices", "grammar", "tags"])
            constraint = Constraint(kind, self._random.choice(SOURCES), ("yes", "no"))
        is_reply = self._one_of([False, False, True], [True])
        return ops.Gen(state, var, name, self._params(), constraint, is_reply)

    def _params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self._one_of([1, 4, 16, 16, 64], [0, -1, 100_000, 2**31]),
            min_tokens=self._one_of([0, 0, 1], [65, -1]),
            temperature=self._one_of([0.0, 0.0, 1.0], [-1.0, 1e300]),
            seed=self._one_of([None, 7], [2**63, -1]),
            stop=self._one_of([(), (), ("f",), ("a", "é")], [("",), ("x" * 2000,)]),
            stop_regex=self._one_of([None, None, None, "[0-9]9"], PATTERNS),
            logprobs=self._random.choice([False, False, self._has_logprobs]),
            top_logprobs=self._one_of([0, 0, 3 * self._has_logprobs], [3, 21, -1]),
            ignore_eos=self._random.choice([False, True]),
        )

    def _select(self) -> Op:
        state, var, name = self._declared()
        right = [("two", "nothing", "many", "é", "drei"), tuple(f"two{n}" for n in range(99))]
        choices = self._one_of(right, [(), ("",), ("a", "a"), tuple(map(str, range(1001)))])
        return ops.Select(state, var, name, choices)

    def _set(self) -> Op:
        parts = self._parts()  # before the variable is there: none may be its own source
        return ops.Set(*self._declared(), parts)

    def _done(self) -> Op:
        return ops.Done(*self._declared())

    def _read(self) -> Op:
        return ops.Read(
            *self._declared(), self._random.choice(["text", "token_ids" if self._has_logprobs else "text"])
        )

    def _embed(self) -> Op:
        return ops.Embed(
            *self._declared(),
            self._one_of([("two",), tuple(WORDS[:5])], [(), ("",), ("x",) * 257, ("x" * 10_000,) * 21]),
            self._one_of(["", "scripted"], ["none"]),
            self._one_of([None, 3], [0, -1, 65, 2**63]),
            self._one_of([None, "query: "], ["é" * 900]),
            self._one_of([None], ["query"]),
        )

    def _expect(self) -> Op:
        state, var, name = self._declared()
        self._expected.append(var)
        return ops.Expect(state, var, name)

    def _provide(self) -> Op:
        var = self._random.choice(self._expected) if self._expected else self._new()
        if self._is_wrong():
            error = ErrorInfo("run_failed", "why", ErrorInfo("no_such_code", "é" * 1000))
            return ops.Provide(var, error=error)
        return ops.Provide(var, self._text())

    def _fork(self) -> Op:
        state = self._state()
        children = tuple(self._new() for _ in range(self._one_of([1, 2, 2, 5], [0])))
        self._states += children
        if children:
            self._forks.append((state, children))
        return ops.Fork(state, children)

    def _couple(self) -> Op:
        if self._forks and not self._is_wrong():
            return ops.TaskGroup(*self._forks[-1])
        return ops.TaskGroup(self._state(), (self._state(), self._state()))

    def _seal(self) -> Op:
        return ops.Seal(self._last_of())

    def _cancel(self) -> Op:
        return ops.Cancel(self._last_of())

    def _close(self) -> Op:
        return ops.Close(self._last_of())

    def _last_of(self) -> int:
        """A state of which no more is written, if nothing goes wrong."""
        state = self._state()
        if not self._is_wrong():
            self._states = [other for other in self._states if other != state]
            self._open_turns = [other for other in self._open_turns if other != state]
        return state

    def _limit(self) -> Op:
        state = self._random.choice([0, self._state()])
        deadline_s = self._one_of([None, 1e9], [0.0, 0.01, -1.0, 1e300])
        return ops.Limit(state, deadline_s, self._one_of([None, 2**60], [0, 10, -1, 2**63]))

    def _stats(self) -> Op:
        return ops.GetStats(self._new())

    def _watch(self) -> Op:
        return self._random.choice(
            [
                ops.Watch(
                    self._new(),
                    steps=self._random.random() < 0.5,
                    tree=self._random.random() < 0.5,
                    interval_s=self._one_of([0.1, 1, 60.0], [0.0, -1.0, 1e300]),
                    max_nodes=self._one_of([1, 100, 5000], [0, -1, 2**63]),
                ),
                ops.Unwatch(),
                ops.Peek(self._new(), self._one_of([1, 2, 3], [0, -1, 2**62])),
            ]
        )

    def _submit(self) -> Op:
        """A graph, written by another writer, for it has numbers of its own."""
        inner = OpsWriter(self._random, has_logprobs=self._has_logprobs)
        inner.wrongness = self.wrongness
        written: list[Op] = [inner._open()]
        allowed = (*_PLAIN_WRITERS[:4], *_DECLARING_WRITERS, OpsWriter._fork, OpsWriter._seal)
        written += inner._to_write
        inner._to_write.clear()
        for _ in range(self._random.randrange(12)):
            if inner._states:
                written.append(self._random.choice(allowed)(inner))
        base, self._next = self._next, self._next + inner._next
        places = {var: f"0.{var}" for var in inner._variables if self._random.random() < 0.5}
        outputs = tuple(var for var in inner._variables if self._random.random() < 0.5)
        inputs = {var: "given" for var in inner._expected if self._random.random() < 0.8}
        self._states.append(base)
        return ops.SubmitGraph(base, tuple(written), inputs, outputs, "seeds", places)


_Writer = Callable[[OpsWriter], Op]
_PLAIN_WRITERS: tuple[_Writer, ...] = (
    OpsWriter._plain_text,
    OpsWriter._begin,
    OpsWriter._end,
    OpsWriter._hint,
    OpsWriter._plain_text,
    OpsWriter._await,
)
_DECLARING_WRITERS: tuple[_Writer, ...] = (
    OpsWriter._gen,
    OpsWriter._gen,
    OpsWriter._select,
    OpsWriter._set,
    OpsWriter._done,
    OpsWriter._read,
    OpsWriter._embed,
    OpsWriter._expect,
)
_TREE_WRITERS: tuple[_Writer, ...] = (
    OpsWriter._open,
    OpsWriter._converse,
    OpsWriter._tools,
    OpsWriter._fork,
    OpsWriter._fork,
    OpsWriter._seal,
    OpsWriter._cancel,
    OpsWriter._close,
    OpsWriter._provide,
)
_ODD_WRITERS: tuple[_Writer, ...] = (
    OpsWriter._submit,
    OpsWriter._submit,
    OpsWriter._limit,
    OpsWriter._stats,
    OpsWriter._watch,
    OpsWriter._couple,
)
