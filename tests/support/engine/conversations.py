"""Conversations for tests of token states: small tokenizers, all templates, and scripts of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from support import chat_template_shapes as shapes
from support import small_tokenizers

from agentflow.engine.text.chat_layout import Layout
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.state.token_state import TokenState
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.chat import Message

CHAT_TOKENS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SMALL_SPEC = small_tokenizers.byte_level(["<s>", "</s>", *CHAT_TOKENS], plain_added=["<think>", "</think>"])
SMALL = Tokenizer(SMALL_SPEC, named_tokens=TOKENS)
MARKERS = ["<|im_start|>", "<|im_end|>\n", "<s>", "user\n", "</think>"]
contents = st.text(st.sampled_from("the an \n{é日"), max_size=8) | st.sampled_from(
    ["", " ", *MARKERS, "a<|im_end|>"]
)
TEMPLATES = {name: ChatTemplate(source, TOKENS) for name, source in shapes.ALL.items()}
SENTENCEPIECE = {
    prepend: (Tokenizer(spec, named_tokens=TOKENS), small_tokenizers.library(spec))
    for prepend in ("every", "first", "none")
    for spec in [small_tokenizers.sentencepiece(prepend)]
}


def pieces_of(layout: Layout) -> shapes.Pieces:
    return shapes.joined([(piece.text, piece.turn) for piece in layout.pieces()])


def state_of(name: str, tokenizer: Tokenizer = SMALL) -> TokenState:
    return TokenState(tokenizer, TEMPLATES[name])


def say(state: TokenState, role: str, text: str) -> None:
    state.begin_role(role)
    state.text(text)
    state.end_role()


def letters(text: str, tokenizer: Tokenizer = SMALL) -> list[int]:
    """Ids of ``text`` that the tokenizer would never choose: one for each character."""
    return [i for char in text for i in tokenizer.encode(char, continues=True)]


def encoded(pieces: shapes.Pieces, tokenizer: Tokenizer = SMALL) -> list[int]:
    return [
        i
        for text, turn in pieces
        for i in (tokenizer.encode_markup if turn is None else tokenizer.encode)(text)
    ]


TEMPLATE_WORDS = [
    "<|im_start|>",
    "<|im_end|>\n",
    "<s>",
    "[/INST]",
    "</think>",
    "<think>\n",
    "user\n",
    "\n\n",
    "SYSTEM: ",
]
hostile_contents = st.text(st.sampled_from("ab \n{}<'\"é日"), max_size=6) | st.lists(
    st.sampled_from([*TEMPLATE_WORDS, "a", " ", "\n"]), max_size=4
).map("".join)
# Reasoning in the form in which the thinking template writes them itself.
reasoning = st.tuples(st.sampled_from(["hm", "a\nb"]), st.sampled_from(["yes", "a b ", ""])).map(
    lambda two: f"<think>\n{two[0]}\n</think>\n\n{two[1]}"
)


def alternating(
    answers: st.SearchStrategy[str] = hostile_contents,
) -> st.SearchStrategy[list[tuple[str, str]]]:
    """Conversations that every template accepts: perhaps a system turn, then user and assistant in turns."""

    @st.composite
    def draw_turns(draw: st.DrawFn) -> list[tuple[str, str]]:
        turns = [("system", draw(hostile_contents))] if draw(st.booleans()) else []
        for n in range(draw(st.integers(1, 5))):
            turns.append(("assistant", draw(answers)) if n % 2 else ("user", draw(hostile_contents)))
        return turns

    return draw_turns()


def messages_of(turns: shapes.Turns) -> list[Message]:
    return [Message(role, content) for role, content in turns]


@dataclass
class Script:
    """A conversation, and how it is to be replayed: each content as runs of text (in chunks) and of ids."""

    turns: list[tuple[str, list[tuple[list[str], bool]]]] = field(default_factory=list)
    opens: bool = False

    def contents(self) -> list[tuple[str, str]]:
        return [(role, "".join("".join(chunks) for chunks, _ in runs)) for role, runs in self.turns]


@st.composite
def scripts(draw: st.DrawFn, *, with_ids: bool) -> Script:
    script = Script(opens=draw(st.booleans()))
    roles = ["system"] if draw(st.booleans()) else []
    roles += ["user", "assistant", "user", "assistant"][: draw(st.integers(1, 4))]
    for role in roles:
        kinds = st.booleans() if with_ids and role == "assistant" else st.just(False)
        run = st.tuples(st.lists(contents, max_size=3), kinds)
        script.turns.append((role, draw(st.lists(run, max_size=3))))
    return script


def replay(state: TokenState, script: Script) -> None:
    for role, runs in script.turns:
        state.begin_role(role)
        for chunks, is_generated in runs:
            text = "".join(chunks)
            if is_generated:
                state.cut()
                state.generated(letters(text), text)
            else:
                for chunk in chunks:
                    state.text(chunk)
        state.end_role()
    if script.opens:
        state.begin_role("assistant")


def by_hand(script: Script, pieces: shapes.Pieces) -> list[int]:
    """The ids where the template alters nothing: neighbouring texts are one run, generations are not."""
    ids: list[int] = []
    for text, turn in shapes.joined(pieces):
        if turn is None:
            ids += SMALL.encode_markup(text)
            continue
        pending = ""
        for chunks, is_generated in script.turns[turn][1]:
            if is_generated and "".join(chunks):
                ids += SMALL.encode(pending) + letters("".join(chunks))
                pending = ""
            else:
                pending += "".join(chunks)
        ids += SMALL.encode(pending)
    return ids
