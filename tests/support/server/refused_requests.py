"""Requests that the HTTP APIs refuse with 400, by path: the fields that differ from a valid request, the
field that the error has, and its code."""

from __future__ import annotations

import json
from typing import Any

from support.fake_engine import TOKENIZER

Row = tuple[dict[str, Any], str | None, str]

INVALID, VALUE, UNSUPPORTED, LONG = (
    "invalid_request",
    "invalid_value",
    "unsupported",
    "context_length_exceeded",
)
SIZE, MAX_CONTEXT = 24, 64
"""Of the model that makes embeddings. The others' context has 512 tokens."""

SAYS = [{"role": "user", "content": "What do plants do?"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAYS},
    "/v1/completions": {"prompt": "The quick brown fox"},
    "/v1/responses": {"input": "What do plants do?"},
    "/v1/messages": {"messages": SAYS, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": SAYS},
    "/api/chat": {"messages": SAYS},
    "/api/generate": {"prompt": "a"},
    "/generate": {"text": "a"},
    "/tokenize": {},
    "/detokenize": {},
    "/v1/decisions": {"input": "a dog", "questions": [{"type": "predicate", "instructions": "It barks."}]},
    "/v1/embeddings": {"input": "a dog"},
    "/api/embed": {},
    "/api/embeddings": {},
}
"""A valid request of each path, without its model."""

FAR = "x" * 9_000
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
N_SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
BAD_PATTERN = {"type": "string", "pattern": "a("}


def tool(name: str = "weather", parameters: Any = PARAMETERS, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def response_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": PARAMETERS}


def message_tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


def schema_format(schema: Any, name: str = "x") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


def output_format(schema: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": schema}}


def text_format(schema: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "x", "schema": schema}}


def turns(*contents: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for content in contents]


def edits(**edit: Any) -> dict[str, Any]:
    return {"context_management": {"edits": [{"type": "clear_thinking_20251015", **edit}]}}


IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
SEARCHED = {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}
UNKNOWN_CHOICE = {"type": "function", "function": {"name": "other"}}
CUSTOM = {"type": "custom", "custom": {"name": "x"}}
BAD_TOOL = tool("f", {"type": "object", "properties": {"a": BAD_PATTERN}}, strict=True)
PLACE = "function.parameters.properties.a.pattern"
OBFUSCATED = {"stream": True, "stream_options": {"include_obfuscation": True}}
RESULT = {"role": "tool", "tool_call_id": "c9", "content": "x"}
SPOKEN = {"role": "assistant", "content": "x", "audio": {"id": "1"}}
QUESTION = {"type": "text", "text": "What?"}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {}}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}
ANY_OBJECT = {"output_config": output_format({})}
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"
CALLING = {"tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}

# Chat completions refuse fields of vLLM and SGLang like OpenAI's.
CHAT: list[Row] = [
    ({"audio": {"voice": "x", "format": "wav"}}, "audio", UNSUPPORTED),
    ({"functions": [{"name": "f"}]}, "functions", UNSUPPORTED),
    ({"function_call": "none"}, "function_call", UNSUPPORTED),
    ({"web_search_options": {}}, "web_search_options", UNSUPPORTED),
    ({"store": True}, "store", UNSUPPORTED),
    ({"modalities": ["text", "audio"]}, "modalities[1]", INVALID),
    ({"best_of": 2}, "best_of", UNSUPPORTED),
    ({"echo": True}, "echo", UNSUPPORTED),
    ({"suffix": "x"}, "suffix", UNSUPPORTED),
    ({"no_such": 1}, "no_such", INVALID),
    ({"top_logprobs": 2}, "top_logprobs", VALUE),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", INVALID),
    ({"temperature": -1}, "temperature", INVALID),
    ({"n": 0}, "n", INVALID),
    ({"n": 129}, "n", VALUE),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", VALUE),
    ({"logit_bias": {"x": 1}}, "logit_bias", INVALID),
    ({"logit_bias": {"100000": 1}}, "logit_bias", VALUE),
    ({"logit_bias": {"9999999": 1}, "stream": True}, "logit_bias", VALUE),
    ({"logit_bias": {"7": 101}}, "logit_bias[...]", INVALID),
    ({"stop_token_ids": [99999]}, "stop_token_ids", VALUE),
    ({"stream_options": {"include_usage": True}}, "stream_options", VALUE),
    (OBFUSCATED, "stream_options.include_obfuscation", UNSUPPORTED),
    ({"thinking_token_budget": 3, "thinking_budget": 3}, "thinking_budget", VALUE),
    ({"thinking_token_budget": -1}, "thinking_token_budget", INVALID),
    ({"messages": []}, "messages", INVALID),
    ({"messages": turns("x", role="poet")}, "messages[0].role", INVALID),
    ({"messages": turns(FAR)}, "messages", LONG),
    ({"messages": turns(FAR[:600]), "stream": True}, "messages", LONG),
    ({"messages": [*SAYS, RESULT]}, "messages[1].tool_call_id", VALUE),
    ({"messages": [*SAYS, {"role": "assistant"}]}, "messages[1].content", VALUE),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role", UNSUPPORTED),
    ({"messages": [SPOKEN]}, "messages[0].audio", UNSUPPORTED),
    ({"messages": turns([QUESTION, IMAGE_URL])}, "messages[0].content[1]", UNSUPPORTED),
    ({"tools": [CUSTOM]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [tool(), tool()]}, "tools", VALUE),
    ({"tools": [tool("a b")]}, "tools[0].function.name", INVALID),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", INVALID),
    ({"tools": [tool()], "tool_choice": UNKNOWN_CHOICE}, "tool_choice", VALUE),
    ({"tools": [tool()], "tool_choice": ALLOWED}, "tool_choice", UNSUPPORTED),
    ({"tools": [tool()], "tool_choice": CUSTOM}, "tool_choice", UNSUPPORTED),
    ({"tools": [BAD_TOOL], "tool_choice": "required"}, f"tools[0].{PLACE}", VALUE),
    ({"tools": [tool(), BAD_TOOL]}, f"tools[1].{PLACE}", VALUE),
    ({"tools": [BAD_TOOL], "response_format": schema_format(PARAMETERS)}, f"tools[0].{PLACE}", VALUE),
    ({"tools": [tool()], "response_format": schema_format(BAD_PATTERN)}, "response_format", VALUE),
    ({"response_format": schema_format(BAD_PATTERN)}, "response_format", VALUE),
    ({"response_format": schema_format({"type": "x"})}, "response_format", VALUE),
    ({"response_format": schema_format({}, "a b")}, "response_format.json_schema.name", INVALID),
    ({"response_format": {"type": "xml"}}, "response_format.type", INVALID),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format", VALUE),
    ({"regex": "a", "grammar": "start: A"}, "grammar", VALUE),
    ({"regex": "(a"}, "regex", VALUE),
    ({"regex": ""}, "regex", INVALID),
    ({"grammar": "start: nothing_known"}, "grammar", VALUE),
    ({"grammar": "nothing"}, "grammar", VALUE),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", VALUE),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", VALUE),
    ({"guided_regex": "("}, "guided_regex", VALUE),
    ({"guided_choice": ["a", "a"]}, "guided_choice", VALUE),
    ({"guided_grammar": "start: other"}, "guided_grammar", VALUE),
    ({"structured_outputs": {}}, "structured_outputs", VALUE),
    ({"structured_outputs": {"json": N_SCHEMA, "regex": "a"}}, "structured_outputs.regex", VALUE),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", VALUE),
    ({"ebnf": "root ::= ("}, "ebnf", VALUE),
    ({"ebnf": "root ::= other"}, "ebnf", VALUE),
    ({"ebnf": "root ::= " + "(" * 9000}, "ebnf", VALUE),
    ({"skip_special_tokens": False}, "skip_special_tokens", UNSUPPORTED),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", UNSUPPORTED),
    ({"return_token_ids": True, "stream": True}, "return_token_ids", VALUE),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", VALUE),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", VALUE),
    ({"chat_template_kwargs": {"mood": "x" * 70_000}}, "chat_template_kwargs", VALUE),
    ({"continue_final_message": True}, "continue_final_message", VALUE),
    ({"bad_words": ["unforeseeable consequences"]}, "bad_words[0]", UNSUPPORTED),
]
COMPLETIONS: list[Row] = [
    ({"suffix": "x"}, "suffix", UNSUPPORTED),
    ({"best_of": 1, "n": 2}, "best_of", VALUE),
    ({"best_of": 2, "stream": True}, "best_of", VALUE),
    ({"best_of": 1000}, "best_of", VALUE),
    ({"logprobs": 6}, "logprobs", INVALID),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", VALUE),
    ({"prompt_logprobs": 21}, "prompt_logprobs", INVALID),
    ({"prompt": ["a", 5]}, "prompt", VALUE),
    ({"prompt": []}, "prompt", INVALID),
    ({"prompt": [[]]}, "prompt[0]", INVALID),
    ({"prompt": None}, "prompt", INVALID),
    ({"prompt": [["x"]]}, "prompt[0][0]", INVALID),
    ({"prompt": FAR}, "prompt", LONG),
    ({"prompt": ["a", FAR], "stream": True}, "prompt", LONG),
    ({"prompt": [5] * 513, "echo": True, "max_tokens": 0}, "prompt", LONG),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt", VALUE),
    ({"prompt": ""}, "prompt", VALUE),
    ({"prompt": ["", ""], "n": 2}, "prompt", VALUE),
    ({"prompt": [[5, 99999]], "n": 2}, "prompt", VALUE),
    ({"messages": []}, "messages", INVALID),
    ({"response_format": {"type": "text"}}, "response_format", INVALID),
    ({"temperature": -1}, "temperature", INVALID),
]
RESPONSES: list[Row] = [
    ({"input": []}, "input", VALUE),
    ({"input": 3}, "input", INVALID),
    ({"input": turns("x", role="nobody")}, "input[0].role", INVALID),
    ({"input": [{"role": "user"}]}, "input[0].content", INVALID),
    ({"input": [{**SAYS[0], "id": {"a": 1}}]}, "input[0].id", INVALID),
    ({"input": [{**SAYS[0], "id": {"a": 1}}], "background": True}, "input[0].id", INVALID),
    ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type", UNSUPPORTED),
    ({"input": turns([{"type": "input_image", "image_url": "x"}])}, "input[0].content[0]", UNSUPPORTED),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id", VALUE),
    ({"input": FAR}, "input", LONG),
    ({"input": FAR, "background": True}, "input", LONG),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [response_tool("a b")]}, "tools[0].name", INVALID),
    ({"tools": [response_tool("look")], "tool_choice": "any"}, "tool_choice", VALUE),
    ({"tools": [response_tool("look")], "tool_choice": {"type": "mcp"}}, "tool_choice", UNSUPPORTED),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"background": True, "store": False}, "store", VALUE),
    ({"conversation": 3}, "conversation", INVALID),
    ({"prompt": {"id": "p"}}, "prompt", UNSUPPORTED),
    ({"text": text_format({"type": "nothing"})}, "text.format.schema", VALUE),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", INVALID),
    ({"temperature": -1}, "temperature", INVALID),
    ({"nothing": 1}, "nothing", INVALID),
]
MESSAGES: list[Row] = [
    ({"messages": turns([IMAGE])}, "messages[0].content[0]", UNSUPPORTED),
    ({"messages": turns([{"type": "document"}])}, "messages[0].content[0].type", UNSUPPORTED),
    ({"messages": turns([THOUGHT])}, "messages[0].content[0]", VALUE),
    ({"messages": [*SAYS, *turns([SEARCHED], role="assistant")]}, None, UNSUPPORTED),
    ({"messages": turns("x", role="tool")}, "messages[0].role", UNSUPPORTED),
    ({"messages": []}, "messages", INVALID),
    ({"messages": turns(FAR)}, "messages", LONG),
    ({"messages": turns(FAR), "stream": True}, "messages", LONG),
    ({"messages": turns(FAR[:600]), "stream": True}, "messages", LONG),
    ({"system": [IMAGE]}, "system[0].type", UNSUPPORTED),
    ({"system": [{"text": "Be brief."}]}, "system[0].type", INVALID),
    ({"tools": [message_tool(), WEB_SEARCH]}, "tools[1].type", UNSUPPORTED),
    ({"tools": [{"name": "weather"}]}, "tools[0].input_schema", INVALID),
    ({"tools": [message_tool(descripton="")]}, "tools[0].descripton", INVALID),
    ({"tools": [message_tool("a b")]}, "tools[0].name", INVALID),
    ({"tools": [message_tool(input_examples=[1])]}, "tools[0].input_examples[0]", VALUE),
    ({"tools": [message_tool(), message_tool()]}, "tools", VALUE),
    ({"tool_choice": {"type": "any"}}, "tool_choice", VALUE),
    ({"tools": [message_tool()], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", VALUE),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", VALUE),
    ({"container": "c_1"}, "container", UNSUPPORTED),
    ({"inference_geo": "us"}, "inference_geo", UNSUPPORTED),
    ({"diagnostics": {"previous_message_id": "m"}}, "diagnostics", UNSUPPORTED),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers[0]", UNSUPPORTED),
    (edits(type="x"), "context_management.edits[0].type", UNSUPPORTED),
    (edits(keep={"type": "thinking_turns", "value": 1}), "context_management.edits[0].keep", UNSUPPORTED),
    (edits(), "context_management.edits[0].keep", UNSUPPORTED),
    ({"thread": {"type": "create"}}, "thread", "thread_unsupported_request"),
    ({"nothing": 1}, "nothing", INVALID),
    ({"temperature": 1.5}, "temperature", INVALID),
    ({"top_p": -0.1}, "top_p", INVALID),
    ({"seed": -1}, "seed", INVALID),
    ({"speed": "fast"}, "speed", UNSUPPORTED),
    ({"service_tier": "batch"}, "service_tier", UNSUPPORTED),
    ({"max_tokens": 0}, "max_tokens", INVALID),
    ({"stop_sequences": [""]}, "stop_sequences[0]", INVALID),
    ({"output_config": output_format(BAD_PATTERN)}, "output_config.format.schema", VALUE),
    ({**ANY_OBJECT, "messages": [*SAYS, *turns("{", role="assistant")]}, "messages", VALUE),
    ({**ANY_OBJECT, "output_format": output_format({})["format"]}, "output_format", VALUE),
]
COUNTED: list[Row] = [
    ({"messages": turns("") * 5000}, "messages", INVALID),
    ({"output_config": output_format([None])}, "output_config.format.schema", VALUE),
    ({"output_format": output_format(0)["format"]}, "output_config.format.schema", VALUE),
]
OLLAMA_CHAT: list[Row] = [
    ({"messages": [{**SAYS[0], "images": ["aGk="]}]}, "messages[0].images", UNSUPPORTED),
    ({"messages": [SAYS[0] | CALLING]}, "messages[0].tool_calls", VALUE),
    ({"messages": [{"role": "robot"}]}, "messages[0].role", INVALID),
    ({"messages": [{"role": "assistant", **CALLING}, *SAYS]}, ARGUMENTS, VALUE),
    ({"messages": turns(FAR)}, "messages", LONG),
    ({"think": True}, "think", UNSUPPORTED),
    ({"think": "high"}, "think", UNSUPPORTED),
    ({"think": "much"}, "think", INVALID),
    ({"format": "yaml"}, "format", VALUE),
    ({"format": 5}, "format", VALUE),
    ({"format": {"type": "no type"}}, "format", VALUE),
    ({"top_logprobs": 2}, "top_logprobs", VALUE),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", INVALID),
    ({"options": {"mirostat": 1}}, "options.mirostat", INVALID),
    ({"options": {"warmth": 9, "mirostat": 1}}, "options.mirostat", INVALID),
    ({"options": {"typical_p": 0.5}}, "options.typical_p", INVALID),
    ({"options": {"warmth": 9, "typical_p": 0.5}}, "options.typical_p", INVALID),
    ({"options": {"warmth": 9, "tfs_z": 2.0}}, "options.tfs_z", INVALID),
    ({"options": {"temperature": -1}}, "options.temperature", INVALID),
    ({"options": {"num_predict": -3}}, "options.num_predict", INVALID),
    ({"tools": [tool(), tool()]}, "tools", VALUE),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", INVALID),
    ({"keep_alive": "x" * 33}, "keep_alive", INVALID),
    ({"_debug_render_only": True}, "_debug_render_only", UNSUPPORTED),
    ({"n": 2}, "n", INVALID),
]
OLLAMA_GENERATE: list[Row] = [
    ({"suffix": "}"}, "suffix", UNSUPPORTED),
    ({"template": "{{ .Prompt }}"}, "template", UNSUPPORTED),
    ({"images": ["aGk="]}, "images", UNSUPPORTED),
    ({"images": "aGk="}, "images", UNSUPPORTED),
    ({"raw": True, "system": "a"}, "system", UNSUPPORTED),
    ({"raw": True, "context": [5]}, "context", UNSUPPORTED),
    ({"context": [TOKENIZER.vocab_size]}, "context", VALUE),
    ({"context": [-1]}, "context[0]", INVALID),
    ({"context": [5] * 5_000}, "prompt", LONG),
    ({"context": [5], "prompt": FAR}, "prompt", LONG),
    ({"prompt": FAR}, "prompt", LONG),
    ({"think": True}, "think", UNSUPPORTED),
    ({"prompt": 5}, "prompt", INVALID),
    ({"width": 5}, "width", INVALID),
]
UNSUPPORTED_OF_SGLANG = (
    *("lora_path", "session_params", "return_hidden_states", "token_ids_logprob", "custom_logit_processor"),
    *("return_routed_experts", "return_indexer_topk"),
    *("input_embeds", "image_data", "video_data", "audio_data"),
)
SGLANG: list[Row] = [
    ({"text": None}, "text", VALUE),
    ({"input_ids": [5]}, "text", VALUE),
    ({"text": []}, "text", INVALID),
    ({"text": ""}, "text", VALUE),
    ({"text": 5}, "text", INVALID),
    ({"text": FAR}, "text", LONG),
    ({"text": ["a"] * 200}, "text", VALUE),
    ({"text": None, "input_ids": []}, "input_ids", INVALID),
    ({"text": None, "input_ids": [5, [6]]}, "input_ids", VALUE),
    ({"text": None, "input_ids": [TOKENIZER.vocab_size]}, "input_ids", VALUE),
    ({"text": None, "input_ids": [5] * 9_000}, "input_ids", LONG),
    ({"sampling_params": [{}]}, "sampling_params", INVALID),
    ({"top_logprobs_num": 21}, "top_logprobs_num", INVALID),
    ({"logprob_start_len": -2}, "logprob_start_len", INVALID),
    ({"rid": "x" * 129}, "rid", INVALID),
    ({"rid": ["x"]}, "rid", INVALID),
    ({"width": 5}, "width", INVALID),
    *[({name: True}, name, UNSUPPORTED) for name in UNSUPPORTED_OF_SGLANG],
    *[
        ({"sampling_params": {**more, name: value}}, f"sampling_params.{name}", code)
        for name, value, code, more in [
            ("n", 200, VALUE, {}),
            ("min_new_tokens", 129, VALUE, {}),
            ("temperature", -1, INVALID, {}),
            ("warmth", 1, INVALID, {}),
            ("stop_regex", ["a", "b"], INVALID, {}),
            ("stop_regex", "(", VALUE, {}),
            ("stop_regex", "a*", VALUE, {}),
            ("stop_token_ids", [2**31 - 1], VALUE, {}),
            ("logit_bias", {"2147483647": 1}, VALUE, {}),
            ("regex", "(", VALUE, {}),
            ("json_schema", "no", VALUE, {}),
            ("ebnf", "root ::=", VALUE, {}),
            ("ebnf", "a", VALUE, {"regex": "a"}),
            ("ebnf", 'root ::= "a"', VALUE, {"regex": "a"}),
            ("skip_special_tokens", False, UNSUPPORTED, {}),
            ("spaces_between_special_tokens", False, UNSUPPORTED, {}),
            ("no_stop_trim", True, UNSUPPORTED, {}),
            ("structural_tag", "{}", UNSUPPORTED, {}),
            ("custom_params", {"a": 1}, UNSUPPORTED, {}),
        ]
    ],
]
TOKENIZE: list[Row] = [
    ({}, "prompt", VALUE),
    ({"prompt": "x", "messages": SAYS}, "prompt", VALUE),
    ({"prompt": "x", "tools": []}, "tools", VALUE),
    ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", VALUE),
    ({"messages": SAYS, "add_special_tokens": True}, "add_special_tokens", VALUE),
    ({"messages": []}, "messages", INVALID),
    ({"messages": turns("", role="system") * 513}, "messages", LONG),
]
DETOKENIZE: list[Row] = [
    ({"tokens": [99999]}, "tokens", VALUE),
    ({"tokens": [-1]}, "tokens[0]", INVALID),
    ({}, "tokens", INVALID),
]
EMBEDDINGS: list[Row] = [
    ({"input": ""}, "input", INVALID),
    ({"input": []}, "input", INVALID),
    ({"input": [[]]}, "input[0]", INVALID),
    ({"input": ["a", ""]}, "input[1]", INVALID),
    ({"input": None}, "input", INVALID),
    ({"input": 5}, "input", INVALID),
    ({"input": [1.5]}, "input[0]", INVALID),
    ({"input": ["a", 5]}, "input", VALUE),
    ({"input": ["a"] * 9}, "input", VALUE),
    ({"input": [-1]}, "input[0]", INVALID),
    ({"input": [TOKENIZER.vocab_size]}, "input", VALUE),
    ({"input": [[5], [10**6]]}, "input", VALUE),
    ({"input": [5] * (MAX_CONTEXT + 1)}, "input", LONG),
    ({"input": "word " * 200}, "input", LONG),
    ({"input": "word " * 100_000}, "input", LONG),
    ({"input": [[5] * 50] * 5}, "input", LONG),
    ({"dimensions": 0}, "dimensions", INVALID),
    ({"dimensions": SIZE + 1}, "dimensions", VALUE),
    ({"dimensions": "all"}, "dimensions", INVALID),
    ({"encoding_format": "hex"}, "encoding_format", INVALID),
    ({"prompt_name": "passage"}, "prompt_name", VALUE),
    ({"prompt_name": "query", "prompt": "Q: "}, "prompt_name", VALUE),
    ({"truncate": True}, "truncate", INVALID),
]
OLLAMA_EMBED: list[Row] = [
    ({"input": ["a", ""]}, "input[1]", VALUE),
    ({"input": [[5]]}, "input[0]", INVALID),
    ({"input": ["a"] * 9}, "input", VALUE),
    ({"input": "word " * 100, "truncate": True}, "input", LONG),
    ({"input": "a", "dimensions": SIZE + 1}, "dimensions", VALUE),
    ({}, "input", INVALID),
]
OLLAMA_EMBEDDINGS: list[Row] = [({"prompt": "word " * 100}, "prompt", LONG)]

_CHOICE = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}
DECISIONS: list[Row] = [
    ({"input": []}, "input", VALUE),
    ({"input": FAR}, "input", LONG),
    ({"questions": []}, "questions", INVALID),
    ({"questions": [{"type": "guess", "instructions": "x"}]}, "questions[0].type", INVALID),
    ({"questions": [{"type": "predicate", "instructions": " "}]}, "questions[0].instructions", VALUE),
    ({"questions": [{**_CHOICE, "choices": [{"value": "a"}]}]}, "questions[0].choices", INVALID),
    ({"questions": [{**_CHOICE, "choices": [{"value": "a"}] * 2}]}, "questions[0].choices", VALUE),
    ({"questions": [{**_CHOICE, "choices": [{"value": 3}] * 2}]}, "questions[0].choices[0].value", INVALID),
    ({"questions": [{**_CHOICE, "temperature": 1}]}, "questions[0].temperature", INVALID),
    ({"temperature": 1}, "temperature", INVALID),
]
GENERATING: dict[str, list[Row]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNTED,
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
    "/generate": SGLANG,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    # A model that generates makes no embeddings, and the reverse.
    "/v1/decisions": DECISIONS,
    "/v1/embeddings": [({}, "model", UNSUPPORTED)],
    "/api/embed": [({"input": "a"}, "model", UNSUPPORTED)],
    "/api/embeddings": [({"prompt": "a"}, "model", UNSUPPORTED)],
}
EMBEDDING: dict[str, list[Row]] = {
    "/v1/embeddings": EMBEDDINGS,
    "/api/embed": OLLAMA_EMBED,
    "/api/embeddings": OLLAMA_EMBEDDINGS,
    "/v1/decisions": [({}, "model", UNSUPPORTED)],
    "/v1/completions": [({}, "model", UNSUPPORTED)],
    "/v1/chat/completions": [({}, "model", UNSUPPORTED)],
    "/api/generate": [({}, "model", UNSUPPORTED)],
}


def label(row: Row) -> str:
    """A short name of a row, for the list of tests."""
    return json.dumps(row[0], default=str)[:60]
