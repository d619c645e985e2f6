"""Models that two processes compute together, against the same models in one process; and the sums between
the processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support.engine.family_models import IN_BLOCKS, save_model
from support.engine.gguf_models import write_gguf
from support.engine.rank_peer import Peer, matrix, numbers, running_peer
from support.engine.runner_driver import Driver

from agentflow.engine.batch import LogitEdits, ScoredTokens, TokenMasks
from agentflow.engine.models.tensor_parallel.runner import TensorParallelRunner
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.runner import AcceleratorFault, ModelRunner
from agentflow.errors import BadArgument
from agentflow.kernels.native_ops.shared_ranks import SLOT_BYTES

pytestmark = pytest.mark.timeout(120)

EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_biased": EVEN,
    "llama_tied": EVEN | {"num_key_value_heads": 1, "vocab_size": 321},
    "qwen3": EVEN,
    "gemma3": EVEN,
    "mixtral": EVEN,
    "phi3": EVEN,
    "gpt2": {"n_head": 4},
    "phi": EVEN,
    "gpt_neox": EVEN | {"num_key_value_heads": None},
    "cohere_normed": EVEN,
    "falcon": EVEN | {"num_key_value_heads": 1},
}


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with running_peer() as running:
        yield running


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A divided model has one thread in each process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def prompts() -> list[list[int]]:
    made = np.random.default_rng(0)
    return [made.integers(10, 320, n).tolist() for n in (3, 40, 17)]


def greedy(runner: ModelRunner, num_tokens: int = 80) -> list[list[int]]:
    """Continuations of prompts: random chunks of prompts in one batch with decoding requests."""
    driver = Driver(runner)
    batch = [driver.add(prompt) for prompt in prompts()]
    driver.generate(batch, num_tokens, max_chunk=12)
    return [walker.generated for walker in batch]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_processes_generate_the_same_tokens_as_one(name: str, peer: Peer, tmp_path: Path) -> None:
    save_model(name, tmp_path, **FAMILIES[name])
    alone = TorchRunner(tmp_path, num_slots=1000, device="cpu", dtype="float32")
    divided = peer.load(tmp_path)
    assert greedy(divided) == greedy(alone)
    assert divided.info.vocab_size == alone.info.vocab_size
    kv_parts = 1 if FAMILIES[name].get("num_key_value_heads") == 1 else 2
    assert divided.info.kv_bytes_per_token == alone.info.kv_bytes_per_token // kv_parts


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_gloo_gives_the_same_tokens(
    kernels: str, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of the native forward pass, and between the kernels of torch."""
    save_model("gemma3", tmp_path, **EVEN)
    alone = greedy(TorchRunner(tmp_path, num_slots=1000, device="cpu", dtype="float32"), 30)
    monkeypatch.setenv("AGENTFLOW_KERNELS", kernels)  # the peer has the native ones
    assert greedy(peer.load(tmp_path, "gloo"), 30) == alone


@pytest.mark.parametrize("kind", ["Q8_0", "F32"])
def test_blocks_of_a_file_are_divided(kind: str, peer: Peer, tmp_path: Path) -> None:
    """The file stores the rows of queries and keys in pairs."""
    model = tmp_path / "model"
    save_model("llama", model, **(IN_BLOCKS | {"intermediate_size": 128}))
    write_gguf(model, tmp_path / "model.gguf", kind)
    found = []
    for runner in (
        TorchRunner(tmp_path / "model.gguf", num_slots=1000, device="cpu", dtype="auto"),
        peer.load(tmp_path / "model.gguf", dtype="auto"),
    ):
        driver = Driver(runner)
        walker = driver.add(prompts()[1])
        rows = {"rows": np.arange(39), "target_ids": np.array(walker.tokens[1:]), "needs_logprobs": True}
        output = driver.step([(walker, 39)], **rows)
        assert output.logprobs is not None
        found.append(output.logprobs)
    spread = float(np.ptp(found[0]))
    np.testing.assert_allclose(found[1], found[0], atol=0.03 * spread)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_ranks_round_to_the_same_blocks(quantize: str, peer: Peer, tmp_path: Path) -> None:
    """In float32, products with blocks are exact but for the order of sums. The heads of a rank are whole
    panels; others would have 8 bits."""
    save_model("llama", tmp_path, **(IN_BLOCKS | {"intermediate_size": 128, "head_dim": 32}))
    alone = TorchRunner(tmp_path, num_slots=1000, device="cpu", dtype="float32", quantize=quantize)
    assert greedy(peer.load(tmp_path, quantize=quantize), 50) == greedy(alone, 50)


def test_all_results_of_sampling_are_the_same(peer: Peer, tmp_path: Path) -> None:
    """Draws, masks, edits, likeliest and scored tokens, more rows than one part of logits."""
    save_model("qwen3", tmp_path, **EVEN)
    made = np.random.default_rng(1)
    prompt = made.integers(10, 320, 250).tolist()
    num = 200
    rows = np.concatenate((np.arange(num), np.arange(num)))
    words = made.integers(0, 2**32, (5, 10), dtype=np.uint32)
    places, no_ids = np.arange(3), np.zeros(0, dtype=np.int64)
    none = np.zeros(0, dtype=np.float32)
    sampling: dict[str, Any] = {
        "temperatures": made.choice([0.0, 0.7, 1.3], len(rows)).astype(np.float32),
        "top_ps": made.choice([1.0, 0.8], len(rows)).astype(np.float32),
        "top_ks": made.choice([0, 5], len(rows)),
        "seeds": made.integers(0, 2**60, len(rows), dtype=np.uint64),
        "positions": rows + 1,
        "needs_logprobs": True,
        "masks": TokenMasks(np.array([3, 4, 60, 255, 390]), words),
        "top_counts": made.choice([0, 4], len(rows)),
        "scored": ScoredTokens(np.array([0, 7, 7, 399]), np.array([319, 0, 160, 161])),
        "edits": LogitEdits(
            *(no_ids, no_ids, none, none, none, none),
            *(places, np.array([5, 170, 300]), np.array([9.0, -9.0, 9.0], dtype=np.float32)),
            *(places, np.array([6, 171, 301])),
        ),
    }
    outputs = []
    for runner in (TorchRunner(tmp_path, num_slots=1000, device="cpu", dtype="float32"), peer.load(tmp_path)):
        driver = Driver(runner)
        outputs.append(driver.step([(driver.add(prompt), num)], rows=rows, **sampling))
    alone, divided = outputs
    for field in ("token_ids", "top_ids"):
        np.testing.assert_array_equal(getattr(divided, field), getattr(alone, field))
    for field in ("logprobs", "top_logprobs", "scored_logprobs"):
        np.testing.assert_allclose(getattr(divided, field), getattr(alone, field), atol=2e-4)


@pytest.mark.parametrize("collective", ["shared", "gloo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_and_gathers(collective: str, dtype: str, peer: Peer) -> None:
    """Sums and gathers of no, few and more values than a slot of the shared memory has."""
    ranks, slot = peer.ranks[collective], SLOT_BYTES // getattr(torch, dtype).itemsize
    for count, num_rows, widths in ((1, 1, [1, 2]), (17, 3, [7, 5]), (slot + 33, 5000, [311, 309])):
        peer.send(f"add:{json.dumps([collective, count, dtype, num_rows, widths])}".encode())
        found = ranks.add(numbers(0, count, dtype))
        exact = (numbers(0, count, dtype).float() + numbers(1, count, dtype).float()).to(found.dtype)
        assert torch.equal(found, exact)
        parts = [matrix(rank, num_rows, widths[rank]) for rank in range(2)]
        gathered = ranks.gather(parts[0], widths)
        assert gathered is not None
        assert torch.equal(gathered, torch.cat(parts, dim=1))


def test_a_rank_that_dies_is_a_fault_and_no_rank_is_left(tmp_path: Path) -> None:
    save_model("llama", tmp_path, **EVEN)
    runner = TensorParallelRunner(tmp_path, 2, num_slots=100, device="cpu", dtype="float32")
    (process,) = map(psutil.Process, runner.pids)
    driver = Driver(runner)
    walker = driver.add([5, 6, 7])
    driver.generate([walker], 3)
    process.send_signal(signal.SIGKILL)
    with pytest.raises(AcceleratorFault):  # the first rank may notice it before the runner
        driver.generate([walker], 50)
    runner.close()
    assert not process.is_running()


@pytest.mark.parametrize(
    ("name", "changed", "size"),
    [
        ("llama", {}, 4),
        ("llama", EVEN | {"intermediate_size": 81}, 2),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, 2),
        ("mixtral", EVEN | {"num_key_value_heads": 4}, 65),
        ("olmo2", EVEN, 2),
        ("gpt_oss", EVEN, 2),
        ("deepseek_v2", {}, 2),
        ("gemma3_images", {}, 2),
        ("stablelm_parallel", EVEN, 2),
        ("arcee", EVEN, 2),
    ],
)
def test_models_that_are_not_divided_are_refused_before_a_process_starts(
    name: str, changed: dict[str, Any], size: int, tmp_path: Path
) -> None:
    save_model(name, tmp_path, **changed)
    before = psutil.Process().children()
    with pytest.raises(BadArgument) as refused:
        TensorParallelRunner(tmp_path, size, num_slots=100, device="cpu", dtype="float32")
    assert refused.value.param == "tensor_parallel"
    assert psutil.Process().children() == before
