"""The torch runner on the default model: the same greedy tokens as transformers, however a batch is made."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.engine import gguf_references
from support.engine.runner_driver import Driver
from support.faults import has_param
from tokenizers import Tokenizer

from agentflow.engine.batch import LogitEdits
from agentflow.engine.models.device import device_failure
from agentflow.engine.models.families.registry import read_config
from agentflow.engine.models.kv_pool import KvPool
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.models.weights.loader import WeightFormat, load_model
from agentflow.engine.runner import AcceleratorFault, OutOfMemory
from agentflow.engine.store.gguf.file import reading_once
from agentflow.errors import BadArgument, UnknownModel
from agentflow.kernels.inputs import AttentionBatch, ForwardInput
from agentflow.kernels.platforms import kernels_for

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

CPU = torch.device("cpu")
NUM_TOKENS = 8
PROMPTS = (
    "Once upon a time there was a small dragon who",
    "Water boils at 100 degrees Celsius because",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "La vie est belle et le soleil",
    "<html>\n<head>\n<title>",
    "import numpy as np\n\ndef softmax(x):",
    "x" * 40,
    "It was a dark and stormy night. The rain fell in torrents, and the old house",
)
ARTICLE = (
    "Bees are flying insects closely related to wasps and ants, known for their role in pollination and, in "
    "the case of the best-known bee species, the western honey bee, for producing honey. There are over "
    "20,000 known species of bees in seven recognized biological families. Some species live socially in "
    "colonies while most species are solitary. Bees are found on every continent except for Antarctica, in "
    "every habitat on the planet that contains insect-pollinated flowering plants. "
) * 2


@pytest.fixture(scope="module", autouse=True)
def _file_read_once() -> Iterator[None]:
    with reading_once():
        yield


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return gguf_references.library_tokenizer(model_folder)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text).ids for text in PROMPTS]


@pytest.fixture(scope="module", params=["native", pytest.param("torch", marks=pytest.mark.full)])
def runner(model_folder: Path, request: pytest.FixtureRequest) -> Iterator[TorchRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTFLOW_KERNELS", request.param)
        made = TorchRunner(model_folder, num_slots=8000, device="cpu", dtype="float32")
    yield made
    made.close()


@pytest.fixture
def driver(runner: TorchRunner) -> Driver:
    return Driver(runner)


@pytest.fixture(scope="module")
def transformers_model(model_folder: Path) -> transformers.PreTrainedModel:
    model = gguf_references.transformers_model(model_folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # the runner goes on after an end token: so must this
    return model


@pytest.fixture(scope="module")
def expected(transformers_model: transformers.PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of transformers' generate for each prompt, all in one padded batch."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[2] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    with torch.inference_mode():
        out = transformers_model.generate(
            padded, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=2
        )
    generated: list[list[int]] = out[:, longest:].tolist()
    return generated


def test_the_info_says_what_the_model_is(runner: TorchRunner, model_folder: Path) -> None:
    info = runner.info
    assert (info.vocab_size, info.max_context, info.num_slots) == (49152, 8192, 8000)
    assert info.end_token_ids == (2, 0)
    assert info.kv_bytes_per_token == 2 * 23040
    assert info.model == model_folder.name
    assert info.weight_bytes >= 4 * 134_515_008


@pytest.mark.parametrize("index", [0, *[pytest.param(n, marks=pytest.mark.full) for n in (2, 5, 7)]])
def test_a_prompt_alone_gives_the_tokens_of_generate(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], index: int
) -> None:
    alone = driver.add(prompts[index])
    driver.generate([alone], NUM_TOKENS)
    assert alone.generated == expected[index]


@pytest.mark.parametrize("max_chunk", [4096, 7])
def test_a_batch_of_mixed_lengths_gives_the_tokens_of_generate(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], max_chunk: int
) -> None:
    """Five prompts from the start, in whole or in random chunks, the others joining late."""
    batch = [driver.add(ids) for ids in prompts[:5]]
    driver.generate(batch, 6, max_chunk=max_chunk)
    batch += [driver.add(ids) for ids in prompts[5:]]
    driver.generate(batch, NUM_TOKENS, max_chunk=max_chunk)
    assert [sequence.generated for sequence in batch] == expected


def test_a_prefix_computed_by_another_request_changes_nothing(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A hit at several split points of a prompt, the last of them inside the generated text."""
    tokens = prompts[-1]
    first = driver.add(tokens)
    driver.generate([first], 6)
    splits = [1, 2, len(tokens) // 2, len(tokens) - 1]
    forks = [driver.add(tokens, first, split) for split in splits]
    child = driver.add(first.tokens[:-2], first, len(first.tokens) - 3)
    driver.generate([*forks, child], NUM_TOKENS - 4)
    for fork in forks:
        assert fork.generated == expected[-1][: NUM_TOKENS - 4]
    assert child.tokens[len(tokens) :] == expected[-1]


def test_requests_over_a_long_shared_prefix_give_what_they_give_alone(
    driver: Driver, tokenizer: Tokenizer
) -> None:
    """Eight requests read the prefix once for all; two more hang off a longer branch of it."""
    article = tokenizer.encode(ARTICLE).ids
    trunk = driver.add(article)
    driver.generate([trunk], 1)
    questions = [tokenizer.encode(f"\nQuestion {i}: {text}").ids for i, text in enumerate(PROMPTS[:8])]
    together = [driver.add(article + ids, trunk, len(article) - i) for i, ids in enumerate(questions)]
    driver.generate(together, 2)
    together += [driver.add(together[0].tokens[:-1], together[0], len(article) + 6) for _ in range(2)]
    driver.generate(together, 4)
    for sequence in together[:8:4]:
        alone = driver.add(sequence.tokens[: sequence.prompt_len])
        driver.generate([alone], 4)
        assert sequence.generated == alone.generated
    for late in together[8:]:
        assert late.tokens[: len(together[0].tokens)] == together[0].tokens


@pytest.fixture(scope="module")
def long_text(
    transformers_model: transformers.PreTrainedModel, prompts: list[list[int]]
) -> tuple[list[int], torch.Tensor]:
    """265 tokens, and transformers' log-probabilities after each but the last: more rows than logits are kept
    in memory, which is 256."""
    tokens = (prompts[-1] * 20)[:265]
    with torch.inference_mode():
        return tokens, transformers_model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)


def test_targets_get_the_log_probabilities_of_transformers(
    driver: Driver, long_text: tuple[list[int], torch.Tensor]
) -> None:
    """Scoring 264 tokens in one step."""
    tokens, expected = long_text
    rows = np.arange(264)
    output = driver.step(
        [(driver.add(tokens), 264)], rows=rows, target_ids=np.array(tokens[1:]), needs_logprobs=True
    )
    exact = expected[torch.arange(264), torch.tensor(tokens[1:])]
    assert output.token_ids.tolist() == tokens[1:]
    assert output.logprobs is not None
    np.testing.assert_allclose(output.logprobs, exact, atol=1e-3)


def test_edits_and_likeliest_tokens_are_those_of_their_rows(
    driver: Driver, long_text: tuple[list[int], torch.Tensor]
) -> None:
    """A batch of 264 rows, in several parts: one early and one late row may not take their likeliest token,
    and two others report them."""
    tokens, exact = long_text
    best = exact.topk(3, dim=-1)
    forbidden = np.array([10, 258])
    nothing = np.zeros(0, dtype=np.int64)
    no_numbers = np.zeros(0, dtype=np.float32)
    edits = LogitEdits(
        *(nothing, nothing, no_numbers, no_numbers, no_numbers, no_numbers),
        *(nothing, nothing, no_numbers),
        forbidden_rows=forbidden,
        forbidden_ids=best.indices[forbidden, 0].numpy(),
    )
    top_counts = np.zeros(264, dtype=np.int64)
    top_counts[[5, 262]] = 3
    output = driver.step(
        [(driver.add(tokens[:-1]), 264)],
        rows=np.arange(264),
        target_ids=np.full(264, -1),
        needs_logprobs=True,
        edits=edits,
        top_counts=top_counts,
    )
    place = np.zeros(264, dtype=np.int64)
    place[forbidden] = 1
    expected = best.indices.gather(1, torch.from_numpy(place)[:, None])[:, 0]
    # Where two tokens are as likely to within rounding, either may come first.
    is_clear = (best.values[:, :-1] - best.values[:, 1:] > 1e-3).all(dim=-1)
    assert is_clear[[5, 10, 258, 262]].all()
    assert output.token_ids[is_clear].tolist() == expected[is_clear].tolist()
    for row in (5, 262):
        [top] = output.list_tops(row, row + 1, 3)
        assert [token for token, _ in top] == best.indices[row].tolist()
        np.testing.assert_allclose([value for _, value in top], best.values[row], atol=1e-3)


@pytest.fixture(scope="module")
def beginnings(prompts: list[list[int]]) -> list[list[int]]:
    return [ids[:10] for ids in prompts[:6]]  # of one length: a batch without padding


@pytest.fixture(scope="module")
def eager_and_sdpa(
    transformers_model: transformers.PreTrainedModel, beginnings: list[list[int]]
) -> list[torch.Tensor]:
    """transformers' logits in bfloat16, with either kind of attention."""
    # The parameters, and no buffers: the frequencies stay in float32.
    rounded = {
        id(weight): torch.nn.Parameter(weight.bfloat16()) for weight in transformers_model.parameters()
    }
    model = copy.deepcopy(transformers_model, rounded)
    found = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            found.append(model(torch.tensor(beginnings)).logits.flatten(0, 1).float())
    return found


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.full)])
def test_in_bfloat16_logits_stay_within_the_spread_of_transformers(
    model_folder: Path,
    beginnings: list[list[int]],
    eager_and_sdpa: list[torch.Tensor],
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding differs between any two ways to compute the same; ours is about as near to transformers' sdpa
    attention as its eager attention is: with errors of one size each distance is the same but for chance."""
    monkeypatch.setenv("AGENTFLOW_KERNELS", kernels)
    eager, sdpa = eager_and_sdpa
    ours = _logits_in_bfloat16(model_folder, beginnings)
    spread = (eager - sdpa).abs().mean()
    assert min((ours - eager).abs().mean(), (ours - sdpa).abs().mean()) <= 1.2 * spread


def _logits_in_bfloat16(folder: Path, prompts: list[list[int]]) -> torch.Tensor:
    config = read_config(folder)
    kernels = kernels_for(CPU)
    weights = WeightFormat(torch.bfloat16)
    model = load_model(folder, config, weights=weights, device=CPU, kernels=kernels).model
    pool = KvPool(
        num_layers=config.num_layers,
        num_slots=64,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.bfloat16,
        device=CPU,
    )
    num, size = np.shape(prompts)
    rows, lens = np.arange(num * size), np.full(num, size)
    batch = AttentionBatch(rows.astype(np.int32).reshape(num, size), np.arange(num), lens, lens, None)
    plan = kernels.attention.plan(batch, torch.bfloat16, CPU)
    with torch.inference_mode():
        given = ForwardInput(np.ravel(prompts), rows % size, rows, pool.layers, plan, rows)
        return model.logits(model.forward(given))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="nowhere"):
        TorchRunner(tmp_path / "nowhere", num_slots=10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float8"),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("device", "cuda:99"),
        ("num_slots", 0),
        ("num_slots", 10**12),
    ],
)
def test_arguments_that_make_no_sense(model_folder: Path, name: str, value: object) -> None:
    arguments = {"num_slots": 10, "device": "cpu", "dtype": "bfloat16"} | {name: value}
    with pytest.raises(BadArgument, check=has_param(name)):
        TorchRunner(model_folder, **arguments)


def test_kernels_that_do_not_exist(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", "fastest")
    with pytest.raises(BadArgument, check=has_param("AGENTFLOW_KERNELS")):
        TorchRunner(model_folder, num_slots=10, device="cpu")


def test_device_errors_are_distinguished_from_errors_of_the_batch():
    def error_of(fail) -> RuntimeError | MemoryError:
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            fail()
        return caught.value

    def run_out() -> None:
        torch.empty(2**56)

    def multiply_wrongly() -> None:
        torch.ones(2, 3) @ torch.ones(2, 3)

    assert isinstance(device_failure(error_of(run_out)), OutOfMemory)
    assert isinstance(device_failure(MemoryError("bad_alloc")), OutOfMemory)
    assert isinstance(device_failure(torch.OutOfMemoryError("CUDA out of memory")), OutOfMemory)
    assert isinstance(device_failure(torch.AcceleratorError("device-side assert")), AcceleratorFault)
    launch = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx")
    assert isinstance(device_failure(launch), AcceleratorFault)
    allocate = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    assert isinstance(device_failure(allocate), OutOfMemory)
    assert device_failure(error_of(multiply_wrongly)) is None
