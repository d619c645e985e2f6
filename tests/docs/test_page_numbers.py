"""The numbers in the text of pages are the constants of the code."""

from __future__ import annotations

import re

import pytest
from support.docs.page_blocks import DOCS

from agentflow.backends.apis.batches.anthropic_batches import AnthropicBatches
from agentflow.backends.apis.batches.openai_batches import OpenAIBatches
from agentflow.backends.apis.generation.calls import MAX_ANSWERS
from agentflow.backends.apis.generation.generator import MIN_WARMED_TOKENS
from agentflow.backends.apis.generation.prefix_gate import CACHED_S
from agentflow.backends.apis.http import pacing, transport
from agentflow.engine.cache.evicted_blocks import HASHED_BLOCK_TOKENS
from agentflow.engine.cache.evicted_blocks import MAX_BLOCKS as MAX_EVICTED
from agentflow.engine.generator.ahead import MIN_AHEAD_TOKENS
from agentflow.engine.generator.select import MAX_TREE_TOKENS
from agentflow.engine.grammar.compiler.messages import CompileLimits
from agentflow.engine.grammar.dfa import MAX_STATES
from agentflow.engine.local_engine import LOAD_S, SLOW_DISK_BYTES_PER_S
from agentflow.engine.media.decoding import MAX_FRAME_PIXELS, MAX_IMAGE_PIXELS
from agentflow.engine.media.messages import MAX_SAMPLED_FRAMES, MediaLimits
from agentflow.engine.models.vision.gemma3 import MAX_TOKENS as MAX_GEMMA_TOKENS
from agentflow.engine.process.deadlines import STEP_FACTOR, Deadlines
from agentflow.engine.process.supervisor import MAX_DEATHS_IN_A_ROW, MAX_DELAY_S, restart_delay_s
from agentflow.engine.scheduling.program_pauses import PAUSED_S
from agentflow.engine.scheduling.retries import RECOVERY_PASSES
from agentflow.engine.scheduling.step_limits import MAX_STRETCH
from agentflow.engine.text.state.rendered_prefixes import MAX_TOKENS as MAX_RENDERED_TOKENS
from agentflow.engine.watching.shared_watches import MAX_WATCHES
from agentflow.engine.watching.snapshot import MAX_PEEK_TOKENS, MAX_REQUESTS, MAX_STEPS
from agentflow.language.batch import retries
from agentflow.language.batch.map import DEFAULT_BATCH_CONCURRENCY, DEFAULT_CONCURRENCY
from agentflow.language.observing.runs import MAX_RUNS
from agentflow.language.op_log import MAX_IN_FLIGHT
from agentflow.language.typed.values import DEFAULT_LIST_ITEMS, DEFAULT_STRING_CHARS
from agentflow.protocol.images import MAX_IMAGE_BYTES, MAX_VIDEO_BYTES
from agentflow.protocol.ops import MAX_CHOICES, MAX_EMBED_CHARS, MAX_EMBED_TEXTS, MAX_FAILURE_BYTES
from agentflow.protocol.sampling import MAX_STOP_CHARS, MAX_STOPS
from agentflow.runtime import circuit
from agentflow.runtime.interpreter.observation import MAX_GRAPH_WATCHES
from agentflow.runtime.interpreter.state_tree import MAX_SEALED_BYTES
from agentflow.runtime.interpreter.wired_text import MAX_OP_CHARS
from agentflow.runtime.programs.live import MAX_SHOWN
from agentflow.server.anthropic.types import MAX_BLOCKS, MAX_EXAMPLES, MAX_MESSAGES
from agentflow.server.gateway.defaults import CACHE_TOKENS, GatewayLimits
from agentflow.server.gateway.websocket_proxy import HANDSHAKE_S
from agentflow.server.http.protocol import MAX_HEADERS
from agentflow.server.image_fetcher import FETCH_S, MAX_REDIRECTS
from agentflow.server.log import MAX_LOGGED_BYTES, MAX_PATH_CHARS
from agentflow.server.metrics.request_times import MAX_TENANT_CHARS
from agentflow.server.openai.adapters import MAX_ADAPTERS
from agentflow.server.stores.fronts import BEAT_S, LIFE_MS, MAX_ASKED
from agentflow.server.tenants.keys import FAILURES_PER_MINUTE
from agentflow.server.tenants.tickets import MAX_UNUSED_TICKETS, TICKET_LIFE_S

MB = 1_000_000
GATEWAY, MEDIA, STEPS, COMPILE = GatewayLimits(), MediaLimits(), Deadlines(), CompileLimits()

SENTENCES = {
    "concepts/constrained-decoding.md": [
        f"at most {MAX_CHOICES:,} texts",
        f"more than about {MAX_STATES:,} states",
    ],
    "concepts/images.md": [
        f"{MAX_IMAGE_PIXELS // MB} million pixels, and a frame of a video {MAX_FRAME_PIXELS // MB} million",
        f"may take {MEDIA.image_cpu_s:g} seconds of processor time, a video {MEDIA.video_cpu_s:g}",
        f"{MEDIA.memory_bytes // 10**9} GB of memory",
        f"up to {MEDIA.cache_bytes // MB} MB for a model",
        f"at most {MAX_GEMMA_TOKENS:,}",
        f"the number of frames, up to {MAX_SAMPLED_FRAMES}",
    ],
    "concepts/programs-in-the-scheduler.md": [
        f"if it has {MIN_AHEAD_TOKENS} new tokens or more",
        f"ends after {'four' if PAUSED_S == 240 else PAUSED_S} minutes",
    ],
    "concepts/scheduling.md": [f"at most {MAX_STRETCH:g} times as long"],
    "guides/api-models.md": [
        f"doubles from {transport.FIRST_PAUSE_S:g} to {transport.MAX_PAUSE_S:g} seconds",
        f"longer than {transport.MAX_RETRY_AFTER_S:g} seconds",
        f"connecting is {transport.CONNECT_TIMEOUT_S:g} seconds",
        f"{'Five' if transport.LIMITED_ATTEMPTS == 5 else transport.LIMITED_ATTEMPTS} such refusals",
        f"at most {'two' if transport.SHORT_WAIT_S == 2 else transport.SHORT_WAIT_S} seconds",
        f"at most {pacing.FIRST_REQUESTS} requests are sent",
        f"After {'three' if MAX_ANSWERS == 3 else MAX_ANSWERS} invalid answers",
        f"less than about {MIN_WARMED_TOKENS:,} tokens",
        f"in the last {'four' if CACHED_S == 240 else CACHED_S} minutes",
        f"{'Three' if circuit.MAX_FAILURES == 3 else circuit.MAX_FAILURES} failures in a row",
        f"not asked for {circuit.FIRST_PAUSE_S:g} seconds",
        f"up to {'a minute' if circuit.MAX_PAUSE_S == 60 else circuit.MAX_PAUSE_S}",
        f"at most {DEFAULT_BATCH_CONCURRENCY:,} inputs wait",
        f"OpenAI: {OpenAIBatches.max_requests:,} requests",
        f"Anthropic: {AnthropicBatches.max_requests:,} or",
    ],
    "guides/images.md": [
        f"up to {MAX_IMAGE_BYTES // MB} MB",
        f"up to {MAX_VIDEO_BYTES // MB} MB",
        f"up to {MAX_SAMPLED_FRAMES} frames",
    ],
    "guides/many-inputs.md": [
        f"at most {DEFAULT_CONCURRENCY}",
        f"otherwise {retries.FIRST_PAUSE_S:g} s, doubled up to {retries.MAX_PAUSE_S:g} s",
    ],
    "guides/notebooks.md": [f"the latest {MAX_RUNS} runs"],
    "guides/recording.md": [f"at most {MAX_FAILURE_BYTES:,} bytes of each"],
    "guides/typed-output.md": [f"{DEFAULT_STRING_CHARS:,} characters", f"{DEFAULT_LIST_ITEMS} members"],
    "internals/architecture.md": [
        f"Choices of more than {MAX_TREE_TOKENS} tokens",
        f"at most a {'million' if MAX_RENDERED_TOKENS == MB else MAX_RENDERED_TOKENS} tokens",
    ],
    "operating/deployment.md": [
        f"{STEP_FACTOR:g} times the usual duration",
        f"({STEPS.step_s:g} s to {STEPS.first_step_s:g} s,",
        f"{LOAD_S:g} s plus 1 s for each {SLOW_DISK_BYTES_PER_S / MB:g} MB of weights",
        f"dies {'three' if MAX_DEATHS_IN_A_ROW == 3 else MAX_DEATHS_IN_A_ROW} times in a row",
        f"retry after {restart_delay_s(MAX_DEATHS_IN_A_ROW):g} s, then at doubled intervals",
        f"intervals up to {MAX_DELAY_S:g} s",
        f"doubles after each {RECOVERY_PASSES} passes",
    ],
    "operating/embeddings.md": [f"at most {MAX_EMBED_TEXTS} texts and {MAX_EMBED_CHARS:,} characters"],
    "operating/gateway.md": [
        f"{CACHE_TOKENS:,}",
        f"sends nothing for {GATEWAY.stall_s:g} s",
        f"every {GATEWAY.check_s:g} s",
        f"`--timeout-s` ({GATEWAY.first_byte_s:g} s)",
        f"handshake within {HANDSHAKE_S:g} s",
        f"up to {GATEWAY.body_bytes // MB} MB is kept",
        f"at most {GATEWAY.bodies_bytes // MB} MB together",
        f"no part of a body for {GATEWAY.body_timeout_s:g} s",
    ],
    "operating/lora.md": [f"(at most {MAX_ADAPTERS:,})"],
    "operating/monitoring.md": [f"up to {MAX_LOGGED_BYTES:,} bytes of each"],
    "operating/overload.md": [f"64 KB and {MAX_HEADERS} lines"],
    "operating/security.md": [
        f"At most {FAILURES_PER_MINUTE} wrong keys per minute",
        f"expires after {TICKET_LIFE_S} seconds",
        f"at most {MAX_REDIRECTS} are followed",
        f"at most {MAX_IMAGE_BYTES // MB} MB, a video {MAX_VIDEO_BYTES // MB} MB",
        f"within {FETCH_S:g} seconds",
        f"limited to {MAX_PATH_CHARS} characters",
    ],
    "operating/several-servers.md": [f"every {BEAT_S:g} s", f"within {LIFE_MS // 1000} s"],
    "operating/tenants.md": [f"the {MAX_ASKED} requests that other servers"],
    "operating/troubleshooting.md": [f"more than {MAX_IN_FLIGHT:,} ops wait"],
    "reference/anthropic-api.md": [
        f"at most {MAX_MESSAGES:,} messages, with at most {MAX_BLOCKS:,} blocks each",
        f"at most {MAX_STOPS}, of 1 to {MAX_STOP_CHARS:,} characters",
        f"`input_examples` (up to {MAX_EXAMPLES},",
    ],
    "reference/http-api.md": [f"within {TICKET_LIFE_S} seconds", f"{MAX_UNUSED_TICKETS} unused tickets"],
    "reference/json-schema.md": [
        f"a string ends after {DEFAULT_STRING_CHARS:,} characters",
        f"after {DEFAULT_LIST_ITEMS} members",
        f"{COMPILE.cpu_s:g} s of processor time",
        f"{COMPILE.memory_bytes // MB} MB of memory",
        f"within {COMPILE.wall_s:g} s",
    ],
    "reference/metrics.md": [
        f"{HASHED_BLOCK_TOKENS} or more prompt tokens",
        f"last {MAX_EVICTED:,} evicted blocks",
        f"the first {MAX_TENANT_CHARS} characters",
    ],
    "reference/protocol.md": [
        f"first {MAX_PEEK_TOKENS} tokens",
        f"at most the newest {MAX_STEPS}",
        f"at most {MAX_REQUESTS}: running ones first",
        f"at most {MAX_WATCHES} watches",
        f"at most {MAX_GRAPH_WATCHES} watches with `graphs`",
        f"at most {MAX_SEALED_BYTES:,} bytes",
        f"exceeds {MAX_OP_CHARS:,} characters",
        f"at most {MAX_SHOWN:,} states and {MAX_SHOWN:,} nodes",
        f"has {MAX_IMAGE_BYTES:,} bytes at most, a video {MAX_VIDEO_BYTES:,}",
    ],
}


def has_sentence(text: str, sentence: str) -> bool:
    """Whether the text has the sentence, and not only a part of a word or a number of it: no 15 of 115."""
    before = r"(?<!\w)(?<!\d[.,])" if sentence[0].isalnum() else ""
    after = r"(?!\w)(?![.,]\d)" if sentence[-1].isalnum() else ""
    return re.search(before + re.escape(sentence) + after, text) is not None


@pytest.mark.parametrize(
    ("text", "sentence", "expected"),
    [
        ("after 15 members", "15 members", True),
        ("after 115 members", "15 members", False),
        ("after 1,015 members", "15 members", False),
        ("after 0.15 members", "15 members", False),
        ("at most 15", "at most 15", True),
        ("at most 15. Then", "at most 15", True),
        ("at most 150", "at most 15", False),
        ("at most 15,000", "at most 15", False),
        ("at most 15.5", "at most 15", False),
        ("at most 150 and at most 15", "at most 15", True),
        ("(at most 15)", "(at most 15)", True),
    ],
)
def test_f37_a_number_in_a_sentence_is_compared_whole(text: str, sentence: str, expected: bool) -> None:
    assert has_sentence(text, sentence) == expected


@pytest.mark.parametrize("page", SENTENCES)
def test_f37_the_numbers_in_the_text_are_the_constants(page: str) -> None:
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    assert [sentence for sentence in SENTENCES[page] if not has_sentence(text, sentence)] == []
