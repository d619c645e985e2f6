"""Requests about models that do not generate: ``/v1/models``, ``/tokenize`` and ``/detokenize``.

The list of models is OpenAI's; the tokenizer's endpoints are vLLM's.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.compatible.field_errors import naming_field, naming_param
from agentflow.server.compatible.fields import MAX_MESSAGES, MAX_TOOLS, TokenId
from agentflow.server.completion.engine_run import COUNTED_CONTEXTS, prompt_ids
from agentflow.server.completion.request import CompletionRequest
from agentflow.server.errors import invalid_field
from agentflow.server.http.call import ApiCall
from agentflow.server.models.models import Model
from agentflow.server.openai.request import read_conversation, read_tools
from agentflow.server.openai.types import ChatMessage, Tool


class ModelCard(msgspec.Struct):
    """A model. ``created``: when the server loaded it (Unix time). ``max_model_len``: the limit of prompt and
    output tokens together. ``embedding_size``: the dimensions of its embeddings; null: it generates text.
    ``input_modalities``: ``text``, and ``image`` and ``video`` if prompts may have them. ``parent``: the base
    model, if this is a model with an adapter."""

    id: str
    created: int
    max_model_len: int | None
    embedding_size: int | None = None
    input_modalities: tuple[str, ...] = ("text",)
    object: str = "model"
    owned_by: str = "agentflow"
    parent: str | None = None


class ModelList(msgspec.Struct):
    """The models that the tenant may use. The first is the default of sessions."""

    data: list[ModelCard]
    object: str = "list"


async def list_models(call: ApiCall) -> None:
    """Lists the models that the tenant may use."""
    seen = call.service.models.seen_by(call.tenant)
    await call.reply(ModelList([make_card(call, model) for model in seen]))


async def get_model(call: ApiCall) -> None:
    """Describes one model."""
    await call.reply(make_card(call, call.service.models.find(call.path_params["name"], call.tenant)))


def make_card(call: ApiCall, model: Model) -> ModelCard:
    """The description of a model that the tenant may use."""
    generator = model.generator(call.tenant)
    size = generator.embedding_size if isinstance(generator, EngineGenerator) else 0
    accepted = generator.capabilities
    return ModelCard(
        model.name,
        model.created_s,
        call.service.context_length(generator),
        size or None,
        ("text", *["image"] * accepted.images, *["video"] * accepted.videos),
        parent=getattr(model, "parent", None),
    )


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The tokenizer's properties, for clients that prepare prompts. ``chat_template``: its Jinja source."""

    tokenizer_class: str
    model_max_length: int | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    chat_template: str | None


async def get_tokenizer_info(call: ApiCall) -> None:
    """Describes the tokenizer of the model in the query parameter ``model``, by default the first."""
    generator = call.generator(call.query.get("model"), to_generate=False)
    tokenizer, template = generator.tokenizer, generator.template
    named = tokenizer.named_tokens
    await call.reply(
        TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            model_max_length=call.service.context_length(generator),
            bos_token=tokenizer.bos,
            eos_token=tokenizer.eos,
            pad_token=named.get("pad_token"),
            unk_token=named.get("unk_token"),
            add_bos_token=tokenizer.bos_id in tokenizer.prefix_ids,
            chat_template=template.source if template.has_template else None,
        )
    )


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either ``prompt``, as in ``/v1/completions``, or ``messages``, as in ``/v1/chat/completions``.

    ``add_special_tokens`` (with ``prompt``): adds the special tokens that the model expects before a text.
    ``add_generation_prompt`` (with ``messages``): adds the opening of the assistant's turn.
    ``return_token_strs``: also returns the text of each token. ``model``: by default the first.
    """

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """``max_model_len``: the limit of prompt and output tokens together."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids to convert to text. ``model``: by default the first."""

    tokens: list[TokenId]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct):
    """The text of the ids, with special tokens."""

    prompt: str


async def tokenize(call: ApiCall) -> None:
    """Returns the token ids of a prompt."""
    body = await call.process(call.read, TokenizeRequest)
    generator = call.generator(body.model, to_generate=False)
    texts: list[str] | None = None
    async with generator.metered():
        with naming_field(generator, "prompt" if body.messages is None else "messages"):
            token_ids = await _find_ids(call, body, generator)
        if body.return_token_strs:
            texts = await generator.requests.run_off_loop(
                len(token_ids), partial(_texts, generator), token_ids
            )
    call.record.prompt_tokens = len(token_ids)
    await call.reply(
        TokenizeAnswer(
            tokens=token_ids,
            count=len(token_ids),
            max_model_len=call.service.context_length(generator),
            token_strs=texts,
        )
    )


async def detokenize(call: ApiCall) -> None:
    """Returns the text of token ids."""
    body = await call.process(call.read, DetokenizeRequest)
    generator = call.generator(body.model, to_generate=False)
    with naming_param("tokens"):
        generator.limits.check_ids(body.tokens)
    decode = partial(generator.tokenizer.decode, skip_special=False)
    async with generator.metered():
        text = await generator.requests.run_off_loop(len(body.tokens), decode, body.tokens)
    await call.reply(DetokenizeAnswer(text))


def _texts(generator: EngineGenerator, token_ids: list[int]) -> list[str]:
    decode = generator.tokenizer.decode
    return [decode([token_id], skip_special=False, continues=True) for token_id in token_ids]


async def _find_ids(call: ApiCall, body: TokenizeRequest, generator: EngineGenerator) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid_field("prompt", "give either 'prompt' or 'messages'")
    if body.messages is not None:
        if body.add_special_tokens is not None:
            raise invalid_field("add_special_tokens", "it needs 'prompt'")
        request = CompletionRequest(
            await call.process(read_conversation, body.messages, generator.capabilities),
            SamplingParams(),
            tools=await call.process(read_tools, body.tools or ()),
            opens_turn=body.add_generation_prompt is not False,
        )
        return await prompt_ids(generator, request)
    for name in ("tools", "add_generation_prompt"):
        if getattr(body, name) is not None:
            raise invalid_field(name, "it needs 'messages'")
    prompt = body.prompt or ""
    if body.add_special_tokens is not False and prompt:
        return await prompt_ids(generator, CompletionRequest(prompt, SamplingParams()))
    tokenizer = generator.tokenizer
    if not prompt:
        return [] if body.add_special_tokens is False else list(tokenizer.prefix_ids)
    most = COUNTED_CONTEXTS * generator.limits.max_tokens()
    generator.limits.check_length(len(prompt), most)
    await generator.requests.check_texts([prompt], most)
    return await generator.requests.run_off_loop(len(prompt), tokenizer.encode_markup, prompt)
