"""The whole engine on the deterministic runner, as a backend: for tests that need slots and steps but
no model. A gate pauses the engine before a step, so that a test can act at a chosen point."""

import copy
import functools
import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
from support.chat_template_shapes import CHATML
from support.direct_compiler import direct_compiler
from support.small_tokenizers import byte_level

from agentflow.backends.local import interpreted
from agentflow.engine.batch import Batch
from agentflow.engine.client import EngineClient, running_engine
from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.runtime.task_group import loop_caller

TOKENIZER = Tokenizer(byte_level(special=("<|im_start|>", "<|im_end|>")))
TEMPLATE = ChatTemplate(CHATML)
_prepare = GrammarCache.prepare


@functools.lru_cache(2)
def _prepared(vocab_size: int) -> dict[str, Any]:
    made = GrammarCache(TOKENIZER, vocab_size)
    before = {*vars(made)}
    _prepare(made)
    return {name: value for name, value in vars(made).items() if name not in before}


def _share(self: GrammarCache) -> None:
    """``GrammarCache.prepare``: engines share the data made from the tokenizer of tests, as it takes longer
    than most of their requests. Each has its masks."""
    if self._tokenizer is not TOKENIZER:
        _prepare(self)
        return
    vars(self).update(_prepared(self._vocab_size))
    vars(self)["vocabulary"] = vocabulary = copy.copy(self.vocabulary)
    vocabulary._prefix_masks = {}


GrammarCache.prepare = _share


class StepGate:
    """Allows a number of steps, then pauses the engine until more are allowed."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._allowed: float = math.inf
        self._call_in_loop = None
        self._is_held = None
        self.batches: list[Batch] = []

    def attach(self) -> None:
        """Called in the event loop before the engine starts."""
        self._call_in_loop = loop_caller()
        self._is_held = anyio.Event()

    def allow(self, num_steps: float) -> None:
        """Lets ``num_steps`` more steps run, instead of the steps that are left."""
        with self._condition:
            self._allowed = num_steps
            if self._is_held.is_set():
                self._is_held = anyio.Event()
            self._condition.notify_all()

    def open(self) -> None:
        self.allow(math.inf)

    def wait_until_open(self) -> None:
        """Blocks a thread."""
        with self._condition:
            assert self._condition.wait_for(lambda: self._allowed == math.inf, timeout=30)

    async def held(self) -> None:
        """Waits until the engine is paused before a step that is not allowed."""
        with anyio.fail_after(10):
            await self._is_held.wait()

    def __call__(self, batch: Batch) -> None:
        with self._condition:
            self.batches.append(batch)
            if self._allowed <= 0:
                self._call_in_loop(self._is_held.set)
                if not self._condition.wait_for(lambda: self._allowed > 0, timeout=30):
                    raise RuntimeError("the gate was not opened")
            self._allowed -= 1


class FakeEngine:
    """A backend: ``af.session(backend=FakeEngine(...))``. Open one session on it at a time."""

    def __init__(
        self,
        *,
        runner: FakeRunner | None = None,
        tokenizer: Tokenizer = TOKENIZER,
        template: ChatTemplate = TEMPLATE,
        max_unfinished: int | None = None,
        **config,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.gate = StepGate()
        self.runner = runner or FakeRunner(
            vocab_size=TOKENIZER.vocab_size, num_slots=4096, max_context=1024, on_step=self.gate
        )
        self.config = SchedulerConfig(**config)
        self.max_unfinished = max_unfinished
        self.client: EngineClient | None = None

    @asynccontextmanager
    async def open_client(self) -> AsyncIterator[EngineClient]:
        self.gate.attach()
        opening = running_engine(
            lambda: (self.runner, self.tokenizer, self.config), max_unfinished=self.max_unfinished
        )
        async with opening as client:
            self.client = client
            try:
                yield client
            finally:
                self.gate.open()

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with self.open_client() as client:
            generator = EngineGenerator(client, self.template)
            async with interpreted(generator, deliver) as connection:
                yield connection

    async def assert_idle(self) -> None:
        """Waits until no call waits for the engine. By the time it has read its messages, before its next
        step, it has then returned all slots."""
        with anyio.fail_after(10):
            await self.client.until_idle()
        stats = await self.client.stats()
        assert (stats.running, stats.waiting, stats.in_use_slots) == (0, 0, 0)
        assert stats.free_slots + stats.cached_slots == stats.total_slots
        self.client.engine.scheduler.check_idle()


def embedding_engine(size: int, max_context: int) -> FakeEngine:
    """An engine that makes embeddings with ``size`` numbers."""
    engine = FakeEngine()
    engine.runner = FakeRunner(
        vocab_size=TOKENIZER.vocab_size, max_context=max_context, embedding_size=size, on_step=engine.gate
    )
    return engine


class ConstrainedEngine(FakeEngine):
    """A fake engine with the compiler of constraints."""

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with self.open_client() as client, direct_compiler() as compiler:
            generator = EngineGenerator(client, self.template, compiler=compiler)
            async with interpreted(generator, deliver) as connection:
                yield connection
