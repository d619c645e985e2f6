"""The options of an engine, each declared once.

The server derives a flag, a variable and a key of its file from each field of ``EngineSettings``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from agentflow.engine.scheduling.defaults import (
    CPU_TOKEN_BUDGET,
    DEFAULT_POLICY,
    GPU_TOKEN_BUDGET,
    MAX_RUNNING,
    PolicyName,
)
from agentflow.protocol.wire import DEFAULT_MODEL
from agentflow.runtime.declared import Count, Declared, Seconds, doc

Quantize = Literal["int8", "int4", "fp8"]
KvDtype = Literal["auto", "fp8"]


class EngineSettings(Declared, frozen=True, kw_only=True):
    """How a model is run. The time limits and ``exit_on_engine_failure`` apply to an engine in a separate
    process: beyond a limit the process is killed and replaced. ``BadArgument`` for a value that is not
    allowed."""

    task: Annotated[
        Literal["generate", "embed"], doc("the model's task: to generate text, or embeddings")
    ] = "generate"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        doc(
            "data type of weights and KV (auto: bfloat16, but quantised weights stay as in the file; float16 "
            "is for GPUs)"
        ),
    ] = "auto"
    quantize: Annotated[
        Quantize | None,
        doc(
            "round weights that are not quantised to 8 or 4 bits (fp8: 8-bit floats, on GPUs of compute "
            "capability 8.9 or higher)"
        ),
    ] = None
    kv_dtype: Annotated[
        KvDtype,
        doc(
            "data type of keys and values (auto: the same as dtype; fp8: 8-bit floats with half of the "
            "memory, on GPUs of compute capability 8.9 or higher)"
        ),
    ] = "auto"
    chat_template: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        doc("a Jinja file that replaces the model's chat template", metavar="FILE"),
    ] = None
    device: Annotated[
        Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d{1,3})?)$")] | None,
        doc("where the model runs: cpu, cuda, or cuda:1 for the second GPU (not set: a GPU if there is one)"),
    ] = None
    replicas: Annotated[
        Count,
        doc(
            "engine processes that serve the model; each has a GPU, starting with device, or a part of the "
            "CPU threads"
        ),
    ] = 1
    tensor_parallel: Annotated[
        Count,
        doc(
            "processes over which the model is divided: each has a GPU, starting with device, or a part of "
            "the CPU threads"
        ),
    ] = 1
    kv_tokens: Annotated[
        Count | None,
        doc("capacity of the KV pool in tokens, of each replica (not set: as many as fit into memory)"),
    ] = None
    token_budget: Annotated[
        Count | None,
        doc(
            f"tokens of one forward pass (not set: {CPU_TOKEN_BUDGET} on a CPU, {GPU_TOKEN_BUDGET} on a GPU)"
        ),
    ] = None
    max_running: Annotated[Count, doc("requests in one batch")] = MAX_RUNNING
    tpot_target_ms: Annotated[
        Count | None,
        doc(
            "target time per output token, in milliseconds, of requests with the objective latency: it "
            "limits prompts and further requests in each forward pass"
        ),
    ] = None
    threads: Annotated[Count | None, doc("CPU threads (not set: torch's default, within the CPU quota)")] = (
        None
    )
    policy: Annotated[PolicyName, doc("scheduling policy: the order in which requests are admitted")] = (
        DEFAULT_POLICY
    )
    cache: Annotated[bool, doc("use the prefix cache")] = True
    deterministic: Annotated[
        bool,
        doc(
            "give a request with a seed the same answer regardless of other requests, even if that is "
            "slower; models that cannot do so are rejected"
        ),
    ] = False
    loras: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        doc(
            "an adapter (LoRA) of the model, NAME=PATH, for requests of the model MODEL:NAME",
            metavar="NAME=PATH",
        ),
    ] = ()
    max_unfinished: Annotated[Count | None, doc("requests that wait or run; further ones are rejected")] = (
        4096
    )
    load_timeout_s: Annotated[
        Seconds | None,
        doc("time limit for loading (not set: 180 s, plus 1 s for each 20 MB of weights)"),
    ] = None
    step_timeout_s: Annotated[
        Seconds | None,
        doc("time limit for one forward pass (not set: 30 to 300 s, from earlier passes)"),
    ] = None
    exit_on_engine_failure: Annotated[
        bool, doc("exit with status 1 when an engine has died three times in a row")
    ] = False


class EngineOptions(EngineSettings, frozen=True):
    """The options of one engine. ``model``: a name, folder or GGUF file, as for ``resolve_model``.
    ``own_process``: it runs in a separate process, which is replaced when it dies, instead of in a thread.
    ``max_unfinished`` None: no limit. ``adapter``: the adapter of ``loras`` that an embedded session uses."""

    model: str = DEFAULT_MODEL
    own_process: bool = False
    adapter: str = ""
