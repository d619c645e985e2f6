"""A DFA over one vocabulary: the token mask and the forced bytes of each state, computed when first needed.

``Vocabulary`` is the model's tokens as a trie of bytes. A mask is computed by walking the DFA over that trie:
level by level with whole arrays while many nodes are alive, then over the children of live nodes only.
Willard and Louf ("Efficient Guided Generation for Large Language Models", 2023) precompute the masks of all
states, but most states are never visited.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.grammar.dfa import DEAD, START, Dfa
from agentflow.engine.grammar.grammar import TokenWords, make_mask

Indices: TypeAlias = NDArray[np.intp]
Bytes: TypeAlias = NDArray[np.uint8]
ForcedBytes: TypeAlias = NDArray[np.int16]
NextStates: TypeAlias = NDArray[np.int32]

# The number of masks of tokens with a common prefix that are kept: 6 kB each for 50,000 tokens.
_MAX_PREFIX_MASKS = 512

MAX_MASK_BYTES: Final = 256 * 1024 * 1024
"""The most bytes in the masks of all grammars of one model, including grammars that only unfinished requests
use: 14,000 different masks for a vocabulary of 150,000 tokens."""

MAX_RUN_BYTES: Final = 1024 * 1024
"""The most bytes in the forced runs that one grammar keeps."""
_RUN_OVERHEAD: Final = 200
"""About the bytes of an entry of a dictionary, a tuple and its objects, without the text."""


@dataclass(frozen=True, slots=True, eq=False)
class TrieLevel:
    """The distinct token prefixes of one length, in alphabetical order."""

    parents: Indices  # [nodes]: indices into the level above
    last_bytes: Bytes  # [nodes]: the byte that each node adds to its parent
    first: int  # the index of the level's first node in the whole trie
    children: Indices  # [nodes + 1]: node i has the children [i] to [i + 1] (exclusive) of the level below


class Vocabulary:
    """The tokens of a model, as a trie.

    Args:
        token_bytes: the bytes of each token; empty for special tokens and unused ids, which no mask allows.
        vocab_size: the length of masks in tokens, at least the number of tokens.
    """

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int | None = None) -> None:
        self.token_bytes = list(token_bytes)
        self.vocab_size = max(len(self.token_bytes), vocab_size or 0)
        self.num_words = -(-self.vocab_size // 32)
        sorted_ids = [i for i, data in enumerate(self.token_bytes) if data]
        sorted_ids.sort(key=self.token_bytes.__getitem__)
        self._sorted_ids: Indices = np.array(sorted_ids, dtype=np.intp)
        self._sorted_bytes = [self.token_bytes[i] for i in sorted_ids]
        self.levels: list[TrieLevel] = []
        self.num_nodes = 0
        # For each bit of a mask, the index of its node; the index past the last node is never allowed.
        self._node_of_bit: Indices = np.zeros(self.num_words * 32, dtype=np.intp)
        self._prefix_masks: dict[bytes, TokenWords] = {}
        self._lay_out()

    def words(self, allowed: NDArray[np.bool_]) -> TokenWords:
        """Returns the mask of the tokens whose node is allowed. ``allowed`` [nodes + 1]; the last is
        False."""
        bits = allowed.take(self._node_of_bit)
        words: TokenWords = np.packbits(bits, bitorder="little").view(np.uint32)
        return words

    def only(self, token_ids: Sequence[int] | Indices) -> TokenWords:
        """Returns the mask of exactly these tokens."""
        return make_mask(token_ids, self.vocab_size)

    def beginning_with(self, prefix: bytes) -> TokenWords:
        """Returns the mask of all tokens whose bytes begin with ``prefix``."""
        found = self._prefix_masks.get(prefix)
        if found is None:
            if len(self._prefix_masks) >= _MAX_PREFIX_MASKS:
                del self._prefix_masks[next(iter(self._prefix_masks))]
            found = self._prefix_masks[prefix] = self._beginning_with(prefix)
        return found

    def exactly(self, data: bytes) -> TokenWords:
        """Returns the mask of the tokens with exactly these bytes."""
        first, end = bisect_left(self._sorted_bytes, data), bisect_right(self._sorted_bytes, data)
        return self.only(self._sorted_ids[first:end])

    def _beginning_with(self, prefix: bytes) -> TokenWords:
        first = bisect_left(self._sorted_bytes, prefix)
        # All tokens with the prefix sort before the next prefix of the same length.
        stem = prefix.rstrip(b"\xff")
        end = len(self._sorted_bytes)
        if stem:
            end = bisect_left(self._sorted_bytes, stem[:-1] + bytes([stem[-1] + 1]))
        return self.only(self._sorted_ids[first:end])

    def _lay_out(self) -> None:
        """Builds the levels. Tokens are sorted, so a node begins where the byte or the parent changes."""
        lens = np.array([len(data) for data in self._sorted_bytes], dtype=np.intp)
        flat = np.frombuffer(b"".join(self._sorted_bytes), dtype=np.uint8)
        starts = np.cumsum(lens) - lens
        node_of: Indices = np.zeros(len(lens), dtype=np.intp)  # in the level above
        end_of: Indices = np.zeros(len(lens), dtype=np.intp)  # in the whole trie
        tokens = np.arange(len(lens))
        parts: list[tuple[Indices, Bytes, int]] = []
        depth = 0
        while len(tokens):
            last = flat[starts[tokens] + depth]
            parents = node_of[tokens]
            is_new: NDArray[np.bool_] = np.ones(len(tokens), dtype=bool)
            is_new[1:] = (last[1:] != last[:-1]) | (parents[1:] != parents[:-1])
            nodes = np.cumsum(is_new) - 1
            node_of[tokens] = nodes
            depth += 1
            is_end = lens[tokens] == depth
            end_of[tokens[is_end]] = self.num_nodes + nodes[is_end]
            parts.append((parents[is_new], last[is_new], self.num_nodes))
            self.num_nodes += int(nodes[-1]) + 1
            tokens = tokens[~is_end]
        nothing: Indices = np.zeros(0, dtype=np.intp)
        for depth, (parents, last, first) in enumerate(parts):
            children = parts[depth + 1][0] if depth + 1 < len(parts) else nothing
            bounds = np.searchsorted(children, np.arange(len(parents) + 1))
            self.levels.append(TrieLevel(parents, last, first, bounds))
        self._node_of_bit[:] = self.num_nodes
        self._node_of_bit[self._sorted_ids] = end_of


class MaskMemory:
    """Bounds the bytes in the masks of all live grammars that share it.

    A grammar that has left its cache lives on in the requests that use it, so the cache cannot bound them.
    At the limit, the grammar with the most bytes drops its masks, so a text that walks through many states
    does not affect the grammars of others. Used from the engine's thread only, like masks.
    """

    def __init__(self, max_bytes: int = MAX_MASK_BYTES) -> None:
        self._max_bytes = max_bytes
        self._grammars: WeakSet[DfaGrammar] = WeakSet()  # the ones that have kept masks
        self._most = 0  # at least the bytes in use: dropped masks are subtracted only at the limit

    @property
    def nbytes(self) -> int:
        """The bytes in the masks of all grammars."""
        return sum([grammar.mask_bytes for grammar in self._grammars])

    def reserve(self, num_bytes: int, grammar: DfaGrammar) -> None:
        """Drops masks, if necessary, so that ``grammar`` may keep one more of ``num_bytes``."""
        self._grammars.add(grammar)
        self._most += num_bytes
        if self._most <= self._max_bytes:
            return
        self._most = self.nbytes + num_bytes
        while self._most > self._max_bytes:
            largest = max(self._grammars, key=lambda each: each.mask_bytes)
            if not largest.mask_bytes:  # a single mask is larger than the limit
                return
            self._most -= largest.mask_bytes
            largest.drop_masks()


Nodes: TypeAlias = NDArray[np.bool_]

# Below this fraction of live nodes in a level, the walk continues over the children of live nodes only.
_SPARSE_SHARE = 0.125


class DfaGrammar:
    """A ``Grammar`` that follows a DFA.

    Args:
        dfa: the language.
        vocabulary: the model's tokens.
        memory: bounds the bytes in the masks of all grammars that share it; None: of this grammar alone. A
            mask takes 6 kB for 50,000 tokens, and equal masks of a grammar are stored once.
        max_masks: the number of states whose masks are kept.
    """

    def __init__(
        self, dfa: Dfa, vocabulary: Vocabulary, *, memory: MaskMemory | None = None, max_masks: int = 4096
    ) -> None:
        self.vocabulary = vocabulary
        self.accepting: list[bool] = dfa.accepting.tolist()
        self.forced = ForcedRuns(dfa)
        self.open: list[bool] = (~dfa.accepting & (self.forced.forced_byte < 0)).tolist()
        self.num_classes = dfa.transitions.shape[1]
        self.class_table: bytes = dfa.class_of_byte.tobytes()
        self._classes: Indices = dfa.class_of_byte.astype(np.intp)
        # States are premultiplied by the number of classes: state + class is the index into the table.
        self._next: Indices = dfa.transitions.ravel().astype(np.intp) * self.num_classes
        self.next_states: memoryview[int] = memoryview(dfa.transitions.tobytes()).cast("i")
        self._memory = memory or MaskMemory()
        self._max_masks = max_masks
        self._masks: dict[int, TokenWords] = {}
        self._distinct: dict[bytes, TokenWords] = {}

    @property
    def nbytes(self) -> int:
        """The approximate memory in use."""
        table = self._next.nbytes + self.next_states.nbytes
        return table + len(self.accepting) * 32 + self.mask_bytes + self.forced.run_bytes

    @property
    def mask_bytes(self) -> int:
        """The bytes in the masks that are kept."""
        return len(self._distinct) * self.vocabulary.num_words * 4

    def matcher(self) -> DfaMatcher:
        return DfaMatcher(self)

    def mask(self, state: int) -> TokenWords:
        """Returns the tokens that may follow in ``state``."""
        found = self._masks.get(state)
        if found is None:
            if len(self._masks) >= self._max_masks:
                self.drop_masks()
            found = self._masks[state] = self._kept(self._walk(state))
        return found

    def drop_masks(self) -> None:
        """Forgets all masks. A mask that is needed again is computed again."""
        self._masks.clear()
        self._distinct.clear()

    def _kept(self, words: TokenWords) -> TokenWords:
        """Returns the kept mask with these words."""
        data = words.tobytes()
        found = self._distinct.get(data)
        if found is None:
            self._memory.reserve(len(data), self)
            # A view of the key: the mask is in memory once.
            found = self._distinct[data] = np.frombuffer(data, dtype=np.uint32)
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
        """Continues the walk below the live nodes of level ``depth``."""
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


class ForcedRuns:
    """The forced bytes of a DFA. ``forced_byte`` [states]: the only byte that may follow, or -1 if several
    may or the text may end. ``forced_next`` [states]: the state after it, or ``DEAD``. ``max_bytes``: in the
    runs that are kept."""

    def __init__(self, dfa: Dfa, *, max_bytes: int = MAX_RUN_BYTES) -> None:
        bytes_in_class = np.bincount(dfa.class_of_byte, minlength=dfa.transitions.shape[1])
        leads_on = (dfa.transitions != DEAD) & (bytes_in_class > 0)
        only_class = np.argmax(leads_on, axis=1)
        one_byte = np.array(bytes_in_class == 1)[only_class]
        is_forced = (np.count_nonzero(leads_on, axis=1) == 1) & one_byte & ~dfa.accepting
        byte_of_class: ForcedBytes = np.zeros(len(bytes_in_class), dtype=np.int16)
        byte_of_class[dfa.class_of_byte] = np.arange(256, dtype=np.int16)
        after = dfa.transitions[np.arange(len(dfa.transitions)), only_class]
        self.forced_byte: ForcedBytes = np.where(is_forced, byte_of_class[only_class], np.int16(-1))
        self.forced_next: NextStates = np.where(is_forced, after, np.int32(DEAD))
        self._max_bytes = max_bytes
        self._runs: dict[int, tuple[bytes, int]] = {}
        self.run_bytes = 0
        """The bytes in the runs that are kept."""

    def run(self, state: int) -> tuple[bytes, int]:
        """Returns the bytes that must follow, and the state after them: ``b""`` and the same state if there
        is a choice, including the choice between continuing and ending. The bytes may end inside a character.

        >>> ForcedRuns(build_dfa(parse_regex("(yes|yesterday)"))).run(START)
        (b'yes', 4)
        """
        known = self._runs.get(state)
        if known is None:
            known = self._follow(state)
            if known[0]:
                self._keep(state, known)
        return known

    def _keep(self, state: int, run: tuple[bytes, int]) -> None:
        """Keeps a run. Runs that begin in different states of one long run overlap, so all of them could have
        the square of its length: beyond the limit, the others are dropped."""
        num_bytes = len(run[0]) + _RUN_OVERHEAD
        if self.run_bytes + num_bytes > self._max_bytes:
            self._runs.clear()
            self.run_bytes = 0
        self.run_bytes += num_bytes
        self._runs[state] = run

    def _follow(self, state: int) -> tuple[bytes, int]:
        text = bytearray()
        byte = int(self.forced_byte[state])
        while byte >= 0:  # terminates: a trimmed DFA can reach an accepting state from every state
            text.append(byte)
            state = int(self.forced_next[state])
            byte = int(self.forced_byte[state])
        return bytes(text), state


class DfaMatcher:
    """The ``Matcher`` of a ``DfaGrammar``. Keeps the state after each token."""

    __slots__ = ("_grammar", "_states")

    def __init__(self, grammar: DfaGrammar) -> None:
        self._grammar = grammar
        self._states = [START]

    @property
    def state(self) -> int:
        """The current DFA state."""
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

    def accept(self, token_id: int) -> bool:
        grammar, state = self._grammar, self._states[-1]
        table, num_classes = grammar.next_states, grammar.num_classes
        data = grammar.vocabulary.token_bytes[token_id]
        for one in data.translate(grammar.class_table):
            state = table[state * num_classes + one]
        if state == DEAD or not data:
            raise ValueError(f"token {token_id} is not allowed here")
        self._states.append(state)
        return grammar.open[state]

    def roll_back(self, num_tokens: int) -> None:
        if num_tokens:
            del self._states[-num_tokens:]

    def forced(self) -> bytes:
        return self._grammar.forced.run(self._states[-1])[0]
