"""What is compiled for AMX, as it is, on a processor without: the instructions that it lacks are trapped and
carried out (``trapped_tiles.cpp``). With AMX the other files test the processor's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentflow.kernels.native_library import AVX512_BF16, LEVELS, cpu_flags

HERE = Path(__file__).parent
TESTED = (
    "attention/test_attention.py",
    "attention/test_masked_attention.py",
    "linear/test_quantised_weights.py",
    "native_ops/test_native_forward.py",
    "test_row_kernels.py",
)
# Products in float32 use no tiles: what they are compiled to, the level below has too.
FLOAT32 = (
    "float32",
    "test_masked_attention",
    "test_scores_of_any_size",
    "test_a_row_of_infinite_keys",
    "test_many_rows_over_one_prefix",
    "test_arrays_of_any_stride",
    "test_large_trees",
    "test_many_rows_use_experts",
)
REPEATED = ("embeddings_are_given", "test_tokens_are_those_of_the_logits", "2048-1500", "40-inf")
"""These have products that others have, too: of whole models, of more blocks of keys, and of infinite rows,
which take the way of rows that are not numbers."""


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trap") / "trapped_tiles.so"
    flags = ["-std=c++20", "-O3", "-mavx2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, str(HERE / "trapped_tiles.cpp"), "-o", str(made)], check=True)
    return made


@pytest.mark.timeout(600)
@pytest.mark.skipif(cpu_flags().issuperset(LEVELS["amx"]), reason="this processor has tiles")
@pytest.mark.skipif(not cpu_flags().issuperset(AVX512_BF16), reason="code compiled for AMX needs AVX-512")
def test_the_kernels_for_amx_pass_their_tests(trap: Path) -> None:
    inner = [sys.executable, "-m", "pytest", "-p", "no:faulthandler", "-p", "no:cacheprovider"]
    left_out = [] if "FULL_KERNELS" in os.environ else [f"not {name}" for name in (*FLOAT32, *REPEATED)]
    chosen = ["-k", " and ".join(["native-amx", *left_out])]
    chosen += [str(HERE.parent / path) for path in TESTED]
    environment = os.environ | {
        "LD_PRELOAD": str(trap),
        "PYTHONFAULTHANDLER": "",
        "HYPOTHESIS_PROFILE": "few",
    }
    run = subprocess.run([*inner, *chosen], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert re.search(r"\b\d\d+ passed", run.stdout)
    assert int(re.findall(r"trapped tiles: (\d+) products", run.stderr)[-1]) > 1000
