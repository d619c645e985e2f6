"""Reasoning models: chat templates of the usual shapes, and a model that repeats the user's last
message: ``<think>``, reasoning, ``</think>`` and an answer; or an answer in channels, whose
tokens ``«end»`` and so on stand for in the message."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from support.small_tokenizers import byte_level

from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer

# The model opens its reasoning itself; a variable closes them. Turns after the last user message keep theirs.
QWEN = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{% endfor %}
    {{- '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content or '' %}{% set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (reasoning or loop.last) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
# The prompt opens the reasoning. Past ones are cut out of the contents.
DEEPSEEK = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|user|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<|assistant|>' + content + '<|end|>' }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{% endif %}
"""
# Answers in channels. Past reasoning stand before calls that no answer in text follows, and in a last answer.
CHANNELS = """{%- set ns = namespace(name='') %}
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\n' }}
    {%- for tool in tools %}
        {{- '// ' + tool.function.description + '\ntype ' + tool.function.name + ' = (_: ' }}
        {{- tool.function.parameters | tojson + ') => any;\n' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content and '<|channel|>' in message.content and message.role == 'assistant' %}
        {{- raise_exception('channels belong into thinking and content') }}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}{% set ns.name = call.name %}
        {%- set ns.done = false %}
        {%- for later in messages[loop.index:] %}
            {%- if later.role == 'assistant' and not later.tool_calls %}{% set ns.done = true %}{% endif %}
        {%- endfor %}
        {%- if message.content and message.thinking %}
            {{- raise_exception('give either content or thinking beside calls') }}
        {%- elif (message.content or message.thinking) and not ns.done %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (message.content or message.thinking) + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if loop.last and not add_generation_prompt and message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""


@dataclass(frozen=True)
class ReasoningModel:
    """``user``, ``after_user``, ``assistant``: the template's markup. The first id is the end token."""

    template: ChatTemplate
    tokenizer: Tokenizer
    user: str
    after_user: str
    assistant: str

    def runner(self, **options) -> FakeRunner:
        """``options`` as of ``FakeRunner``. Where a grammar forbids the script's reasoning, the answer of the
        script follows."""
        defaults = {"vocab_size": self.tokenizer.vocab_size, "max_context": 4096, "num_slots": 16384}
        return FakeRunner(**(defaults | {"end_token_ids": (0,), "next_token": self.next_token} | options))

    def next_token(self, tokens: NDArray[np.int64]) -> int:
        text = self.tokenizer.decode(tokens.tolist(), skip_special=False, continues=True)
        before, _, written = text.rpartition(self.assistant)
        script = before.rpartition(self.user)[2].split(self.after_user)[0]
        if not script.startswith(written):
            script = script.rpartition("</think>")[2].lstrip()
            written = written.rpartition("</think>")[2].lstrip()
        rest = script.removeprefix(written)
        return self.tokenizer.encode_written(rest)[0] if rest else 0


@dataclass(frozen=True)
class ChannelModel(ReasoningModel):
    """Also repeats the result of a tool. The first three ids are end tokens."""

    def runner(self, **options) -> FakeRunner:
        return super().runner(**({"end_token_ids": (0, 1, 2)} | options))

    def next_token(self, tokens: NDArray[np.int64]) -> int:
        text = self.tokenizer.decode(tokens.tolist(), skip_special=False, continues=True)
        found = re.findall(r"<\|start\|>(user|functions)[^<]*(?:<\|channel\|>commentary)?<\|message\|>", text)
        _, _, said = text.rpartition(f"<|start|>{found[-1]}")
        script, _, written = said.partition("<|message|>")[2].partition("<|end|><|start|>assistant")
        if found[-1] == "functions":
            script = json.loads(script)
        script = in_channels(script)
        begun = written.split("<|end|><|start|>assistant")
        messages = script.split("<|end|><|start|>assistant")[len(begun) - 1 :]
        if messages and messages[0].startswith(begun[-1]):  # a budget may have ended an earlier one
            script, written = "<|end|><|start|>assistant".join(messages), begun[-1]
        if not script.startswith(written):
            script = script.rpartition("<|message|>")[2]
            written = written.rpartition("<|message|>")[2]
        rest = script.removeprefix(written)
        return self.tokenizer.encode_written(rest)[0] if rest else 0


def in_channels(script: str) -> str:
    """The model's text for this script."""
    return script.replace("«", "<|").replace("»", "|>")


def _tokenizer(special: Sequence[str], marks: Sequence[str], source: str) -> Tokenizer:
    spec = byte_level(special, marks)
    template = ChatTemplate(source, {"bos_token": special[0]})
    return Tokenizer(
        spec,
        turn_markup=template.turn_markup(),
        tool_markup="<tool_call>\n</tool_call>",
        template_source=source,
    )


# Marks that are added tokens and not special, as in Qwen's tokenizers.
QWEN_MODEL = ReasoningModel(
    ChatTemplate(QWEN),
    _tokenizer(("<|im_end|>", "<|im_start|>"), ("<think>", "</think>", "<tool_call>", "</tool_call>"), QWEN),
    "<|im_start|>user\n",
    "<|im_end|>",
    "<|im_start|>assistant\n",
)
# Marks that are special tokens.
DEEPSEEK_MODEL = ReasoningModel(
    ChatTemplate(DEEPSEEK, {"bos_token": "<|begin|>"}),
    _tokenizer(("<|end|>", "<|begin|>", "<|user|>", "<|assistant|>", "<think>", "</think>"), (), DEEPSEEK),
    "<|user|>",
    "<|assistant|>",
    "<|assistant|>",
)
# Marks that are not single tokens.
SPELLED_MODEL = ReasoningModel(
    ChatTemplate(QWEN),
    _tokenizer(("<|im_end|>", "<|im_start|>"), (), QWEN),
    "<|im_start|>user\n",
    "<|im_end|>",
    "<|im_start|>assistant\n",
)
CHANNEL_TOKENS = ("<|return|>", "<|call|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>")
CHANNEL_MODEL = ChannelModel(
    ChatTemplate(CHANNELS),
    _tokenizer((*CHANNEL_TOKENS, "<|channel|>", "<|constrain|>"), (), CHANNELS),
    "<|start|>user<|message|>",
    "<|end|>",
    "<|start|>assistant",
)
MODELS = {"qwen": QWEN_MODEL, "deepseek": DEEPSEEK_MODEL, "spelled": SPELLED_MODEL}
