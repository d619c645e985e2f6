"""Descriptions for SGLang's clients: ``/get_model_info``, ``/get_server_info``, and their newer names.

The cache cannot be flushed: all tenants share it, and unused entries are evicted.
"""

from __future__ import annotations

from agentflow.server.http.call import ApiCall
from agentflow.server.sglang.types import SglangModelInfo, SglangModelQuery, SglangServerInfo
from agentflow.version import __version__

FLUSH = "/flush_cache"
"""A path of SGLang that the server does not have."""
WHY_NOT_FLUSHED = (
    "all tenants share the cache, which evicts the least recently used tokens; a request with a new "
    "'extra_key' finds nothing in it"
)


async def show_model_info(call: ApiCall) -> None:
    """Describes the model in the query parameter ``model``, by default the first."""
    generator = call.generator(call.read_query(SglangModelQuery).model, to_generate=False)
    name = generator.capabilities.model
    is_generation = not generator.info.embedding_size
    await call.reply(SglangModelInfo(model_path=name, tokenizer_path=name, is_generation=is_generation))


async def show_server_info(call: ApiCall) -> None:
    """Describes the server and its first model."""
    generator = call.generator(None, to_generate=False)
    name = generator.capabilities.model
    await call.reply(
        SglangServerInfo(
            version=__version__,
            model_path=name,
            tokenizer_path=name,
            served_model_name=name,
            context_length=call.service.context_length(generator) or generator.info.max_context,
        )
    )
