"""Chat templates that know of tools, in the manner of models that do; all written for these tests."""

from __future__ import annotations

from support import chat_template_shapes as shapes
from support import small_tokenizers

from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer

# Like Qwen2.5 and Hermes: tools in the system turn, calls between marks, results in user turns.
HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\nYou may call functions. They are:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nWrite calls as\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
           or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

# The same, as of Qwen3: text is left alone, and a last answer begins with its reasoning.
THINKING_HERMES = HERMES.replace(
    "{{- call.arguments | tojson }}",
    "{{- call.arguments if call.arguments is string else call.arguments | tojson }}",
).replace(
    "{{- '<|im_start|>assistant' }}",
    "{{- '<|im_start|>assistant' + ('\\n<think>\\n\\n</think>\\n' if loop.last else '') }}",
)

# Like Llama 3.1: a call is the whole turn, without any mark, and there is never more than one.
LLAMA = """{{- bos_token }}
{%- set turns = messages[1:] if messages and messages[0].role == 'system' else messages %}
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system }}
{%- if tools %}
    {{- '\\n\\nTo call a function, answer with {"name": function, "parameters": arguments} alone.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in turns %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + {'output': message.content} | tojson }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

# Like Mistral: the calls are one list behind a special token, and their ids have nine characters.
MISTRAL = """{{- bos_token }}
{%- set turns = messages[1:] if messages and messages[0].role == 'system' else messages %}
{%- set system = messages[0].content + '\\n\\n' if messages and messages[0].role == 'system' else '' %}
{%- set ns = namespace(last=-1) %}
{%- for message in turns %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('nine characters') }}{% endif %}
            {{- call.function | tojson }}
            {{- '' if loop.last else ', ' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('nine characters') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

# The same, with the id in each shown call.
MISTRAL_WITH_IDS = MISTRAL.replace(
    "{{- call.function | tojson }}",
    """{{- (call.function | tojson)[:-1] + ', "id": "' + call.id[-9:] + '"}' }}""",
).replace("length != 9", "length < 9")

# Like other models with these marks: the arguments first, spaces here and there, results with their names.
SPACED_HERMES = (
    HERMES.replace(
        '\'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \'',
        "'\\n<tool_call>\\n{ \"arguments\": '",
    )
    .replace("'}\\n</tool_call>'", "', \"name\": \"' + call.name + '\"}\\n</tool_call> '")
    .replace(
        "message.content + '\\n</tool_response>'",
        "message.name + ': ' + message.content + '\\n</tool_response>'",
    )
)

# Each parameter by itself, arguments before the name, and the template looks at the types.
BY_PARAMETER = """{%- if tools %}
    {%- for tool in tools %}
        {%- set function = tool.function %}
        {{- '- ' + function.name + ': ' + function.description | trim + '\\n' }}
        {%- for name, said in function.parameters.properties.items() %}
            {{- '  ' + name + (' (text)' if said.type == 'string' else ' (other)') }}
            {%- if said.description %}{{- ': ' + said.description }}{% endif %}{{- '\\n' }}
        {%- endfor %}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- set function = call.function %}
        {{- '<call>{"arguments": ' + function.arguments + ', "name": "' + function.name + '"}</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

MARKS = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
MARKS += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>", *MARKS]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SPEC = small_tokenizers.byte_level(SPECIAL, plain_added=["<tool_call>", "</tool_call>"])
TOKENIZER = Tokenizer(SPEC, named_tokens=TOKENS, tool_markup="[TOOL_CALLS]")

SOURCES = {
    "hermes": HERMES,
    "thinking_hermes": THINKING_HERMES,
    "spaced_hermes": SPACED_HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral_with_ids": MISTRAL_WITH_IDS,
    "by_parameter": BY_PARAMETER,
}
TEMPLATES = {name: ChatTemplate(source, TOKENS) for name, source in SOURCES.items()}
WITHOUT_TOOLS = {name: ChatTemplate(shapes.ALL[name], TOKENS) for name in ("chatml", "inst", "known_roles")}
