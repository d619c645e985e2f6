"""Sessions of agents over HTTP: how many tokens of earlier turns a prompt finds in the cache.

A random model writes answers in the notation of a chat template, with tokens that the tokenizer would not
choose. A client sends the whole conversation with each request, in the shape of a known agent."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from agentflow.engine.generator.context import (
    EngineContext,
    OutputTokenCache,
    PromptLimits,
    fill_conversation,
)
from agentflow.engine.messages import Finished
from agentflow.engine.request import Origin
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.common_prefix import common_prefix
from agentflow.engine.text.reasoning import reasoning_marks
from agentflow.engine.text.state.rendered_prefixes import RenderedPrefixes
from agentflow.engine.text.state.token_state import TokenState
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.tool_format import ToolFormat, takes_system, tool_format
from agentflow.engine.text.tools import ReplyText
from agentflow.protocol.chat import Conversation, Message, ToolSpec, read_reply

TURNS = 36
READ = ToolSpec(
    "read",
    "Reads lines of a file.",
    {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
)
WORDS = ["the", "file", "has", "a\n", "test", "é", "日本", "<b>", "{x}", "\n\n", "question", "\t", "答え"]


@dataclass(frozen=True)
class Client:
    """How a client writes an answer that it sends back."""

    arguments: Callable[[str], str]
    keeps_reasoning: bool = True
    strips: bool = False
    turns_of_user: int = 14  # a message of the user after this many calls

    def sent_back(self, answer: Message, reasoning: str) -> Message:
        calls = tuple(replace(call, arguments=self.arguments(call.arguments)) for call in answer.tool_calls)
        content = answer.content.rstrip() if self.strips else answer.content
        kept = reasoning if self.keeps_reasoning and reasoning else None
        return replace(answer, content=content, tool_calls=calls, reasoning=kept, generated=False)


def _compact(arguments: str) -> str:
    return json.dumps(json.loads(arguments), separators=(",", ":"), ensure_ascii=False)


CLIENTS = {
    "codex": Client(str),
    "claude_code": Client(_compact, strips=True),
    "langchain": Client(lambda arguments: json.dumps(json.loads(arguments)), keeps_reasoning=False),
}


@dataclass
class Found:
    """How many tokens of prompts are from earlier turns, and how many of them were computed before."""

    earlier: int = 0
    same_text: int = 0  # of them, before the first difference between the texts
    found: int = 0

    @property
    def share(self) -> float:
        return self.found / self.earlier

    @property
    def share_of_same_text(self) -> float:
        return self.found / self.same_text


@dataclass
class AgentSession:
    """One session. ``prefixes``: None for a server without them."""

    template: ChatTemplate
    tokenizer: Tokenizer
    client: Client
    prefixes: RenderedPrefixes | None
    seed: int = 0
    found: Found = field(default_factory=Found)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.outputs = OutputTokenCache()
        self.computed: list[tuple[list[int], str]] = []
        size = self.tokenizer.vocab_size
        self.limits = PromptLimits(self.tokenizer, RunnerInfo("x", size, 10**7, 10**7, (0,), 1, 1, ""))

    def run(self, turns: int = TURNS) -> Found:
        messages = (Message("system", self.text(60)), Message("user", self.text(40)))
        if not takes_system(self.template):
            messages = messages[1:]
        for turn in range(turns):
            is_last = turn % self.client.turns_of_user == self.client.turns_of_user - 1
            answer = self.request(messages, calls=not is_last)
            messages += (answer,)
            for call in answer.tool_calls:
                messages += (Message("tool", self.text(40), tool_call_id=call.id, name=call.name),)
            if not answer.tool_calls:
                messages += (Message("user", self.text(30)),)
        return self.found

    def request(self, messages: tuple[Message, ...], *, calls: bool) -> Message:
        """Answers one request, and returns the answer as the client sends it back."""
        state = TokenState(self.tokenizer, self.template)
        context = EngineContext(state, Origin("", ""), self.limits)
        if self.prefixes is not None:
            state.attach_to(self.prefixes, b"")
        fill_conversation(context, Conversation(messages, (READ,)), self.template, self.outputs)
        state.cut()
        prompt, shown = state.ids(), state.text_view()
        assert "".join(self.tokenizer.list_texts(prompt)) == shown
        self.count(prompt, shown)
        text, reasoning, thinking_end = self.answer(context, calls=calls)
        ids = self.odd_ids(text)
        num_reasoning = len(self.odd_ids(text[:thinking_end])) if thinking_end else 0
        end = Finished(0, ids, text, "stop", 0, 0, len(ids), [], reasoning_tokens=num_reasoning)
        shown_text = text[thinking_end:].lstrip("\n") if reasoning else text
        reply = ReplyText(context.tools).finish(shown_text, None, is_truncated=False)
        message = read_reply(reply).message()
        self.outputs.put_answer(context, end, message)
        state.keep_answer(ids, text)
        self.computed.append((prompt + ids, shown + text))
        return self.client.sent_back(message, reasoning)

    def count(self, prompt: list[int], shown: str) -> None:
        if not self.computed:
            return
        earlier, text = self.computed[-1]
        num_found = common_prefix(earlier, prompt)
        self.found.earlier += len(earlier)
        self.found.found += num_found
        if num_found == len(earlier):
            self.found.same_text += num_found
            return
        length = common_prefix(text, shown)
        texts = self.tokenizer.list_texts(earlier)
        at = num = 0
        while num < len(texts) and at + len(texts[num]) <= length:
            at, num = at + len(texts[num]), num + 1
        self.found.same_text += num

    def answer(self, context: EngineContext, *, calls: bool) -> tuple[str, str, int]:
        """Returns an answer in the template's notation, its reasoning, and where the reasoning ends."""
        prose = self.text(8).strip()
        form = tool_format(self.template)
        if calls:
            number = self.random.randint(1, 2 if form.allows_several else 1)
            written = [self.call(form) for _ in range(number)]
            shown = form.before.lstrip("\n") if not form.mark else form.before
            if form.is_list:
                answer = f"{form.begin}[{', '.join(written)}]{form.end}"
            elif not form.mark:
                answer = written[0]
            else:
                marked = [f"{form.begin}{one}{form.end}" for one in written]
                answer = prose + shown + (form.between or "").join(marked)
        else:
            answer = prose
        marks = reasoning_marks(self.template.source)
        if marks is None:
            return answer, "", 0
        reasoning = self.text(15).strip()
        opened, _ = context.tokens.opening() or ("", "")
        begin = "" if opened.rstrip().endswith(marks.begin) else f"{marks.begin}\n"
        thought = f"{begin}{reasoning}\n{marks.end}"
        return f"{thought}\n\n{answer}", reasoning, len(thought)

    def call(self, form: ToolFormat) -> str:
        arguments = json.dumps(
            {"path": self.text(3), "lines": self.random.randint(1, 99)}, ensure_ascii=False
        )
        members = [(key, json.dumps(value)) for key, value in form.constants]
        named = [(form.name_key, '"read"'), (form.arguments_key, arguments)]
        members += named if form.name_first else named[::-1]
        return "{" + ", ".join([f'"{key}": {value}' for key, value in members]) + "}"

    def text(self, words: int) -> str:
        return " ".join(self.random.choices(WORDS, k=words))

    def odd_ids(self, text: str) -> list[int]:
        """The tokens of ``text`` as a model samples them: mostly not the tokenizer's."""
        ids: list[int] = []
        at = 0
        for low, high in [*self.tokenizer.spelled(text), (len(text), len(text))]:
            while at < low:
                end = min(low, at + self.random.randint(1, 6))
                ids += self.tokenizer.encode(text[at:end], continues=True)
                at = end
            if low < high:
                ids += self.tokenizer.encode_written(text[low:high])
                at = high
        return ids
