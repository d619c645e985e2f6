"""Chat templates of the shapes that models come with, each with a twin in plain Python.

A twin gives the template's output as pieces: ``(text, turn)``, where ``turn`` is None for markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Turns = Sequence[tuple[str, str]]
Pieces = list[tuple[str, int | None]]

SMOL_DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SMOL_DEFAULT + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# A header for each role, contents trimmed, bos first.
HEADERS_AND_TRIM = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- generation %}{{ message['content'] | trim }}{% endgeneration %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# The system text is merged into the first user turn; the roles must alternate.
INST = """{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}{% set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'].strip() + eos_token }}
    {%- else %}
        {{- raise_exception('only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
"""

# The system text is written into the last user turn.
SYSTEM_LAST = """{%- set ns = namespace(system='') %}{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = message['content'] + '\n\n' %}{% continue %}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST]' + (ns.system if loop.last else '') + message['content'] + '[/INST]' }}
    {%- else %}
        {{- message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Earlier turns of the assistant lose their reasoning, the last one shows them (even when there are none).
THINKING = """{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}{% set content = message.content %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_user %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

# A system message with the tools and the date, roles by name only, JSON around a content.
KNOWN_ROLES = """{{- '<|im_start|>system\nToday is ' + strftime_now('%d %B %Y') + '.' }}
{%- if tools %}{{- tools | tojson }}{% endif %}{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message['role'] not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('Unexpected role: ' + message['role']) }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {{- '<|im_start|>tool\n' + {'result': message['content']} | tojson + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""

# Plain words for markup, nothing special in it.
PLAIN = (
    "{% for message in messages %}"
    "{{ message.role | upper + ': ' + message.content.strip() + '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)

# Laid out for readers, which blocks and their lines must not show.
INDENTED = """{{ bos_token }}
{% for message in messages %}
    {% if message.role == 'system' %}
    Rules: {{ message.content }}
    {% else %}
    {# a remark #}
{{ message.role }}> {{ message.content }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
assistant>
{% endif %}
"""


def chatml(turns: Turns, opens: bool) -> Pieces:
    pieces: Pieces = []
    if turns and turns[0][0] != "system":
        pieces.append((f"<|im_start|>system\n{SMOL_DEFAULT}<|im_end|>\n", None))
    for number, (role, content) in enumerate(turns):
        pieces += [(f"<|im_start|>{role}\n", None), (content, number), ("<|im_end|>\n", None)]
    return [*pieces, ("<|im_start|>assistant\n" if opens else "", None)]


def headers_and_trim(turns: Turns, opens: bool) -> Pieces:
    pieces: Pieces = [("<s>", None)]
    for number, (role, content) in enumerate(turns):
        head = f"<|start_header_id|>{role}<|end_header_id|>\n\n"
        pieces += [(head, None), (content.strip(), number), ("<|eot_id|>", None)]
    return [*pieces, ("<|start_header_id|>assistant<|end_header_id|>\n\n" if opens else "", None)]


def thinking(turns: Turns, opens: bool) -> Pieces:
    pieces: Pieces = []
    last_user = max((n for n, (role, _) in enumerate(turns) if role == "user"), default=-1)
    for number, (role, content) in enumerate(turns):
        pieces.append((f"<|im_start|>{role}\n", None))
        if role == "assistant":
            *_, answer = content.rpartition("</think>")
            answer = answer.lstrip("\n") if "</think>" in content else content
            if number > last_user and "</think>" in content:
                pieces.append((content, number))  # tests write reasoning in the template's own form
            elif number > last_user:
                pieces += [("<think>\n\n</think>\n\n", None), (answer, number)]
            else:
                pieces.append((answer, number))
        else:
            pieces.append((content, number))
        pieces.append(("<|im_end|>\n", None))
    return [*pieces, ("<|im_start|>assistant\n" if opens else "", None)]


def plain(turns: Turns, opens: bool) -> Pieces:
    pieces: Pieces = []
    for number, (role, content) in enumerate(turns):
        pieces += [(f"{role.upper()}: ", None), (content.strip(), number), ("\n\n", None)]
    return [*pieces, ("ASSISTANT: " if opens else "", None)]


WITH_TWIN: dict[str, tuple[str, Callable[[Turns, bool], Pieces]]] = {
    "chatml": (CHATML, chatml),
    "headers_and_trim": (HEADERS_AND_TRIM, headers_and_trim),
    "thinking": (THINKING, thinking),
    "plain": (PLAIN, plain),
}

ALL = {
    "chatml": CHATML,
    "headers_and_trim": HEADERS_AND_TRIM,
    "inst": INST,
    "system_last": SYSTEM_LAST,
    "thinking": THINKING,
    "known_roles": KNOWN_ROLES,
    "plain": PLAIN,
    "indented": INDENTED,
}


def joined(pieces: Pieces) -> Pieces:
    """The same pieces with neighbouring markup put together and empty pieces left out."""
    whole: Pieces = []
    for text, turn in pieces:
        if not text:
            continue
        if turn is None and whole and whole[-1][1] is None:
            whole[-1] = (whole[-1][0] + text, None)
        else:
            whole.append((text, turn))
    return whole
