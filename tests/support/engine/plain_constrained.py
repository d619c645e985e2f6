"""The reference model of constrained decoding: sets of tokens, and texts that are read from their start."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from agentflow.engine.grammar.dfa import DEAD, START, Dfa
from agentflow.engine.text.tokenizer import Tokenizer


@dataclass
class PlainConstrained:
    """A text that grows under a DFA. ``ids``: its tokens; ``held``: the start of the next token's text;
    ``shown``: the longest text so far. ``sampled``: for each byte, whether a sampled token brought it.
    ``num_redrawn``: how often a jump replaced tokens."""

    dfa: Dfa
    tokenizer: Tokenizer
    jumps: bool = True
    ids: list[int] = field(default_factory=list)
    held: bytes = b""
    shown: bytes = b""
    sampled: list[bool] = field(default_factory=list)
    num_redrawn: int = 0

    @property
    def data(self) -> bytes:
        return b"".join([self.tokenizer.token_bytes(i) for i in self.ids])

    def state(self, data: bytes) -> int:
        return self.dfa.read(START, data)

    def next_bytes(self, data: bytes) -> list[int]:
        after = self.dfa.transitions[self.state(data)][self.dfa.class_of_byte]
        return np.flatnonzero(after != DEAD).tolist()

    def may_end(self) -> bool:
        return not self.held and bool(self.dfa.accepting[self.state(self.data)])

    def must_end(self) -> bool:
        return self.may_end() and not self.next_bytes(self.data)

    def allowed_after(self, data: bytes, beginning: bytes) -> set[int]:
        """The tokens that begin with ``beginning`` and that may follow ``data``."""
        tokenizer, state = self.tokenizer, self.state(data)
        return {
            token
            for token in range(tokenizer.vocab_size)
            if token not in tokenizer.closed_ids
            and (own := tokenizer.token_bytes(token))
            and own.startswith(beginning)
            and self.dfa.read(state, own) != DEAD
        }

    def allowed(self) -> set[int]:
        return self.allowed_after(self.data, self.held)

    def forced(self) -> bytes:
        """The forced text."""
        run = b""
        while not self.dfa.accepting[self.state(self.data + run)]:
            following = self.next_bytes(self.data + run)
            if len(following) != 1:
                break
            run += bytes(following)
        return run

    def accept(self, token: int) -> None:
        assert token in self.allowed()
        self.ids = [*self.ids, token]
        self.sampled += [True] * len(self.tokenizer.token_bytes(token))
        self.held = b""
        self.shown = max(self.shown, self.data, key=len)

    def jump(self, max_tokens: int) -> bool:
        """Appends the forced text. Returns whether an id changed."""
        forced = self.forced() if self.jumps else b""
        text = (self.data + forced).decode(errors="ignore")  # without half a character at the end
        if not forced or not (self.data + forced).startswith(text.encode()):
            return False
        ids = self.tokenizer.encode(text, continues=True)
        whole = b"".join([self.tokenizer.token_bytes(i) for i in ids])
        if whole != text.encode() or len(whole) < len(self.data) or len(ids) > max_tokens:
            return False
        before, self.ids, self.held = self.ids, ids, b""
        if ids != before and not self.must_end():
            last = self.tokenizer.token_bytes(ids[-1])
            if self.allowed_after(whole[: -len(last)], last) != {ids[-1]}:
                self.ids, self.held = ids[:-1], last
        self.sampled = (self.sampled + [False] * len(self.data))[: len(self.data)]
        self.shown = max(self.shown, self.data, key=len)
        self.num_redrawn += self.ids[: len(before)] != before
        return self.ids != before

    def forced_chars(self) -> set[int]:
        """The characters of the text none of whose bytes were sampled."""
        found, at = set(), 0
        for index, char in enumerate(self.data.decode(errors="ignore")):
            end = at + len(char.encode())
            if not any(self.sampled[at:end]):
                found.add(index)
            at = end
        return found

    def num_forced_tokens(self) -> int:
        """The tokens none of whose bytes were sampled."""
        count, at = 0, 0
        for token in self.ids:
            end = at + len(self.tokenizer.token_bytes(token))
            count += not any(self.sampled[at:end])
            at = end
        return count
