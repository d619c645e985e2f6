"""A machine over one vocabulary: the token mask of each state, made when it is first needed.

The machine is walked over the vocabulary's trie, level by level with whole arrays, for as long as many
nodes are alive, and over the children of what is alive once few are (Willard and Louf, "Efficient Guided
Generation for Large Language Models", 2023, make the index of all states ahead; most are never visited).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.grammar.compressed_fsm import ForcedRuns
from agentflow.engine.grammar.dfa import DEAD, START, Fsm
from agentflow.engine.grammar.grammar import TokenWords
from agentflow.engine.grammar.vocabulary import Indices, Vocabulary

Nodes: TypeAlias = NDArray[np.bool_]

# A level of which less than this share is alive is walked node by node from there on.
_SPARSE_SHARE = 0.125


class FsmGrammar:
    """``max_masks``: so many states' masks are kept, the latest ones (6 kB each for 50,000 tokens; equal
    masks are kept once). The same for all requests that use the constraint."""

    def __init__(self, fsm: Fsm, vocabulary: Vocabulary, *, max_masks: int = 4096) -> None:
        self.vocabulary = vocabulary
        self.accepting: list[bool] = fsm.accepting.tolist()
        self.forced = ForcedRuns(fsm)
        self.num_classes = fsm.transitions.shape[1]
        self.class_table: bytes = fsm.class_of_byte.tobytes()
        self._classes: Indices = fsm.class_of_byte.astype(np.intp)
        # The number of a state times the number of classes: what is looked up is the sum of both.
        self._next: Indices = fsm.transitions.ravel().astype(np.intp) * self.num_classes
        self.next_states: memoryview[int] = memoryview(fsm.transitions.tobytes()).cast("i")
        self._max_masks = max_masks
        self._masks: dict[int, TokenWords] = {}
        self._distinct: dict[bytes, TokenWords] = {}

    @property
    def nbytes(self) -> int:
        """Memory that it holds now, roughly."""
        mask_bytes = self.vocabulary.num_words * 4
        return self._next.nbytes + len(self.accepting) * 24 + len(self._distinct) * 2 * mask_bytes

    def matcher(self) -> FsmMatcher:
        return FsmMatcher(self)

    def mask(self, state: int) -> TokenWords:
        """The tokens that the text can go on with in ``state``."""
        found = self._masks.get(state)
        if found is None:
            if len(self._masks) >= self._max_masks:
                self._masks.clear()
                self._distinct.clear()
            words = self._walk(state)
            found = self._masks[state] = self._distinct.setdefault(words.tobytes(), words)
        return found

    def _walk(self, state: int) -> TokenWords:
        vocabulary, classes = self.vocabulary, self._classes
        alive: Nodes = np.zeros(vocabulary.num_nodes + 1, dtype=np.bool_)
        states: Indices = np.full(1, state * self.num_classes, dtype=np.intp)
        for depth, level in enumerate(vocabulary.levels):
            size = len(level.parents)
            states = self._next.take(states.take(level.parents) + classes.take(level.last_bytes))
            here = alive[level.first : level.first + size]
            np.not_equal(states, DEAD, out=here)
            if np.count_nonzero(here) < _SPARSE_SHARE * size:
                self._walk_sparse(depth, np.flatnonzero(here), states, alive)
                break
        return vocabulary.words(alive)

    def _walk_sparse(self, depth: int, nodes: Indices, states: Indices, alive: Nodes) -> None:
        """The rest of the walk, below the nodes of level ``depth`` that are alive."""
        levels = self.vocabulary.levels
        states = states.take(nodes)
        while len(nodes) and depth + 1 < len(levels):
            bounds = levels[depth].children
            firsts = bounds.take(nodes)
            counts = bounds.take(nodes + 1) - firsts
            ends = counts.cumsum()
            num_below = int(ends[-1])
            if not num_below:
                return
            depth += 1
            level = levels[depth]
            below: Indices = np.arange(num_below) + np.repeat(firsts - (ends - counts), counts)
            read = self._next.take(
                np.repeat(states, counts) + self._classes.take(level.last_bytes.take(below))
            )
            kept = np.flatnonzero(read)
            nodes, states = below.take(kept), read.take(kept)
            alive[level.first + nodes] = True


class FsmMatcher:
    """The ``Matcher`` of an ``FsmGrammar``: the states after each token."""

    __slots__ = ("_grammar", "_states")

    def __init__(self, grammar: FsmGrammar) -> None:
        self._grammar = grammar
        self._states = [START]

    @property
    def state(self) -> int:
        """The machine's, now."""
        return self._states[-1]

    def mask(self) -> TokenWords:
        return self._grammar.mask(self._states[-1])

    def may_end(self) -> bool:
        return self._grammar.accepting[self._states[-1]]

    def must_end(self) -> bool:
        grammar, state = self._grammar, self._states[-1]
        if not grammar.accepting[state]:
            return False
        row = grammar.next_states[state * grammar.num_classes : (state + 1) * grammar.num_classes]
        return not any(row)

    def take(self, token_id: int) -> None:
        grammar, state = self._grammar, self._states[-1]
        table, num_classes = grammar.next_states, grammar.num_classes
        data = grammar.vocabulary.token_bytes[token_id]
        for one in data.translate(grammar.class_table):
            state = table[state * num_classes + one]
        if state == DEAD or not data:
            raise ValueError(f"token {token_id} is not allowed here")
        self._states.append(state)

    def take_back(self, num_tokens: int) -> None:
        if num_tokens:
            del self._states[-num_tokens:]

    def forced(self) -> bytes:
        return self._grammar.forced.run(self._states[-1])[0]
