"""The memory that loading a model takes in addition to the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import run_python
from support.engine.family_models import save_model
from support.engine.gguf_models import write_gguf

from agentflow.kernels.native_library import NoNativeKernels
from agentflow.kernels.native_ops import team

MEASURED = """
import json, sys
from pathlib import Path
from agentflow.engine.models.torch_runner import TorchRunner

def resident(name):
    [line] = [line for line in open("/proc/self/status") if line.startswith(name)]
    return 1024 * int(line.split()[1])

for file in sys.argv[1:]:
    TorchRunner(Path(file), num_slots=8, device="cpu", num_threads=1).close()
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins again
    runner = TorchRunner(Path(file), num_slots=8, device="cpu", num_threads=1)
    print(json.dumps([resident("VmHWM"), resident("VmRSS"), runner.info.weight_bytes]))
    runner.close()
    del runner
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which nearly all is the embedding."""
    made = tmp_path_factory.mktemp("large")
    sizes = {"vocab_size": 24_000, "hidden_size": 1024, "intermediate_size": 256, "num_hidden_layers": 1}
    save_model("llama_tied", made, **sizes, num_attention_heads=4)
    return made


MOST_OF_WEIGHTS = {"Q8_0": 0.6, "F16": 1.3}


def test_f42m_a_large_embedding_takes_little_more_than_its_panels(folder: Path, tmp_path: Path) -> None:
    """Pages of the file are released during packing, or conversion: a dense matrix is converted as a whole
    before it is packed."""
    try:
        team.library()
    except NoNativeKernels as error:
        pytest.skip(str(error))
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system does not tell the peak")
    files = [tmp_path / f"{kind}.gguf" for kind in MOST_OF_WEIGHTS]
    for file in files:
        write_gguf(folder, file, file.stem)
    done = run_python("-c", MEASURED, *files)
    assert done.returncode == 0, done.stderr
    for line, most in zip(done.stdout.splitlines(), MOST_OF_WEIGHTS.values(), strict=True):
        peak, after, weights = json.loads(line)
        assert weights > 24e6
        assert peak - after < most * weights
