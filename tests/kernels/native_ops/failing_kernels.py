"""Runs the native kernels where threads or memory are refused, in a separate process for
test_native_failures.py. Prints the result of each case. Ends while the kernels compute.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from kernel_cases import Shape
from test_native_forward import NUM_LAYERS, SIZES, VOCAB, Step, model_of, step_of

from agentflow.engine.models.forward.decoder import Decoder
from agentflow.kernels.inputs import AttentionBatch, ChoiceRows, ForwardInput
from agentflow.kernels.platforms import NATIVE

NUM_THREADS = 3
MANY_TOKENS = 4_000_000
MANY_ROWS = 200_000


@contextmanager
def no_more_memory() -> Iterator[None]:
    """Address space ends 2 MB above the used part."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def no_more_threads() -> Iterator[None]:
    """New threads would get stacks as large as the address space."""
    libc = ctypes.CDLL(None)
    before, attributes = ctypes.create_string_buffer(256), ctypes.create_string_buffer(256)
    libc.pthread_getattr_default_np(before)
    libc.pthread_attr_init(attributes)
    assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 47)) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0
    try:
        yield
    finally:
        libc.pthread_setattr_default_np(before)


def says_memory_error(call: Callable[[], object]) -> None:
    with no_more_memory():
        try:
            call()
        except MemoryError:
            failed = True
        else:
            failed = False
    print("MemoryError" if failed else "nothing", flush=True)


def drawn_rows(num: int) -> ChoiceRows:
    return ChoiceRows(
        targets=np.full(num, -1),
        temperatures=np.ones(num, dtype=np.float32),
        top_ks=np.zeros(num, dtype=np.int64),
        top_ps=np.ones(num, dtype=np.float32),
        min_ps=np.zeros(num, dtype=np.float32),
        uniforms=np.full(num, 0.5),
    )


def in_a_loop() -> None:
    """Each row needs 16 MB on the thread that takes it: the caller's, or one of the team."""
    few = torch.zeros(6, 1000)
    expected = NATIVE.sampler.choose(few, drawn_rows(6)).tolist()
    many, rows = torch.zeros(6, MANY_TOKENS), drawn_rows(6)
    says_memory_error(lambda: NATIVE.sampler.choose(many, rows))
    print(NATIVE.sampler.choose(few, drawn_rows(6)).tolist() == expected)
    print(NATIVE.sampler.choose(many, rows).tolist() == [MANY_TOKENS // 2] * 6)


def in_a_job() -> None:
    """A forward of these rows needs 100 MB on the thread of the team that began it."""
    model, step = small_model()
    expected = step.run(model, NATIVE)[0]
    given = long_text(MANY_ROWS)
    says_memory_error(lambda: model.forward(given))
    print(torch.equal(step.run(model, NATIVE)[0], expected))


def at_the_end() -> None:
    """A daemon computes on while the process ends; one thread makes its memory the largest."""
    use_threads(1)
    model, given = small_model()[0], long_text(MANY_ROWS // 10)
    assert model.whole_forward is not None
    start = model.whole_forward.start_hidden
    has_begun = threading.Event()

    def compute() -> None:
        finish = start(given)
        has_begun.set()
        finish()

    threading.Thread(target=compute, daemon=True).start()
    has_begun.wait()


def long_text(num_rows: int) -> ForwardInput:
    pool_shape = (num_rows, 2, SIZES[0].num_kv_heads, SIZES[0].head_dim)
    rows, lens = np.arange(num_rows), np.array([num_rows])
    batch = AttentionBatch(rows.astype(np.int32)[None], np.array([0]), lens, lens, None)
    layers = tuple(torch.zeros(pool_shape) for _ in range(NUM_LAYERS))
    return ForwardInput(rows % VOCAB, rows, rows, layers, batch, rows[:1])


def without_threads() -> None:
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s")
    use_threads(1)
    model, step = small_model()
    use_threads(NUM_THREADS)
    before = num_threads()
    with no_more_threads():
        alone = [step.run(model, NATIVE)[0] for _ in range(3)]
        print(num_threads() - before, flush=True)
    together = step.run(model, NATIVE)[0]
    print(num_threads() - before, all(torch.allclose(one, together, rtol=1e-5, atol=1e-5) for one in alone))


def use_threads(num: int) -> None:
    """Sets the number of threads of the native kernels alone: torch would start its own."""
    torch.get_num_threads = lambda: num


def small_model() -> tuple[Decoder, Step]:
    model = model_of(SIZES[0], NATIVE, torch.float32)
    return model, step_of(SIZES[0], [Shape(-1, 0, 300, 4)] * 3, [True], torch.float32, 1)


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


if __name__ == "__main__":
    without_threads()  # first: the team has no threads yet
    in_a_loop()
    in_a_job()
    at_the_end()
