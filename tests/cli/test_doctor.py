"""``agentflow doctor``: the findings of each check, and the command as a whole."""

from __future__ import annotations

import io
import json
import socket
import struct
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from agentflow.cli import doctor
from agentflow.cli.doctor import (
    Check,
    TorchBuild,
    check_compiler,
    check_extra,
    check_memory,
    check_model,
    check_packages,
    check_port,
    check_processor,
    check_python,
    check_torch,
    print_checks,
    summary,
    torch_build,
)
from agentflow.cli.main import main
from agentflow.engine.machine import resources
from agentflow.kernels import native_library

CPU, CUDA = TorchBuild("2.13.0+cpu", None), TorchBuild("2.13.0", "12.8")


@pytest.mark.parametrize(
    ("build", "is_nvidia", "system", "status", "advice"),
    [
        (CPU, False, "Linux", "ok", ""),
        (CUDA, True, "Linux", "ok", ""),
        (CPU, True, "Linux", "warning", "--torch-backend=auto"),
        (CUDA, False, "Linux", "warning", "5 GB"),
        (None, False, "Linux", "warning", "5 GB"),
        (None, True, "Linux", "warning", "[engine]"),
        (None, False, "Darwin", "warning", "[engine]"),
    ],
)
def test_the_build_of_torch_is_compared_with_the_hardware(build, is_nvidia, system, status, advice):
    check = check_torch(build, is_nvidia=is_nvidia, system=system)
    assert check.status == status
    assert advice in check.advice
    assert bool(advice) == bool(check.advice)


def test_the_build_of_torch_is_read_without_importing_it():
    script = "import sys; from agentflow.cli.doctor import *; print(torch_build(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    import torch

    assert done.stdout.strip() == f"{TorchBuild(version('torch'), torch.version.cuda)} False"


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '12.8'", "cuda = '12.8'"])
def test_a_cuda_build_is_recognised(monkeypatch, tmp_path, line):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text(f"__all__ = ['cuda']\n{line}\nhip = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    build = torch_build()
    assert build is not None
    assert build.cuda == "12.8"


@pytest.mark.parametrize(("running", "status"), [("3.12.4", "ok"), ("3.10.1", "error"), ("3.99.0", "error")])
def test_the_version_of_python(running, status):
    assert check_python(running).status == status


BASE = ["rich>=13", "no-such-package>=1; python_version < '3'"]
ENGINE = ["numpy>=2.0; extra == 'engine'", "psutil>=6; extra == 'engine'"]


@pytest.mark.parametrize(
    ("requirements", "extra", "status", "found"),
    [
        (BASE, "", "ok", "1 package"),
        ([*BASE, "rich>=9000"], "", "error", "rich"),
        ([*BASE, "no-such-package>=1"], "", "error", "no-such-package is missing"),
        ([*BASE, *ENGINE], "engine", "ok", "2 packages"),
        ([*ENGINE, "no-such-package; extra == 'engine'"], "engine", "error", "no-such-package is missing"),
        ([*ENGINE, "rich>=9000; extra == 'engine'"], "engine", "error", ">=9000"),
        (["no-such-package; extra == 'engine'"], "engine", "warning", "not installed"),
        (["no-such-package; extra == 'otel'"], "otel", None, ""),
    ],
)
def test_packages_are_compared_with_what_is_declared(requirements, extra, status, found):
    check = check_extra(requirements, extra)
    assert (check and check.status) == status
    assert check is None or found in check.found
    assert check is None or check.status == "ok" or "pip install" in check.advice


API = ["psutil>=6; extra == 'api'", "anyio>=4; extra == 'api'", "no-such-package; extra == 'api'"]


def test_f37_an_extra_whose_packages_other_extras_need_is_not_installed():
    shared = [*ENGINE, "anyio>=4; extra == 'server'"]
    assert check_extra([*shared, *API], "api") is None
    assert check_extra([*shared, *API, "no-such-package; extra == 'dev'"], "api") is None
    assert check_extra([*ENGINE, *API], "engine").status == "ok"


def test_the_packages_of_this_environment_fit():
    found = {check.name: check.status for check in check_packages()}
    assert found["packages"] == found["[engine]"] == found["[server]"] == "ok"
    assert not {"[dev]", "[docs]", "[examples]"} & set(found)


@pytest.fixture
def amx(monkeypatch, tmp_path):
    """A processor with AMX, and nothing compiled."""
    native_library.compiler.cache_clear()
    flags = {*native_library.LEVELS["amx"], "avx512_vnni"}
    monkeypatch.setattr(native_library, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(native_library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native_library.platform, "system", lambda: "Linux")
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path))
    for name in ("AGENTFLOW_CPU", "AGENTFLOW_KERNELS", "AGENTFLOW_COMPILED_KERNELS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    yield
    native_library.compiler.cache_clear()


@pytest.mark.usefixtures("amx")
def test_the_instructions_of_the_processor(monkeypatch):
    check = check_processor()
    assert check.status == "ok"
    assert all(name in check.found for name in ("AVX2", "AVX-512", "VNNI", "AMX", "kernels for amx"))
    monkeypatch.setenv("AGENTFLOW_CPU", "avx2")
    assert "kernels for avx2" in check_processor().found
    monkeypatch.setenv("AGENTFLOW_CPU", "mmx")
    assert check_processor().status == "error"


@pytest.mark.usefixtures("amx")
def test_a_processor_without_native_kernels(monkeypatch):
    monkeypatch.setattr(native_library, "cpu_flags", lambda: frozenset({"sse2"}))
    assert check_processor().status == "warning"
    assert (check_compiler().status, check_compiler().advice) == ("ok", "")


@pytest.mark.usefixtures("amx")
def test_the_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", sys.executable)  # it has a --version, too
    check = check_compiler()
    assert check.status == "ok"
    assert sys.executable in check.found
    assert list(tmp_path.iterdir()) == []  # nothing was compiled
    native_library.compiler.cache_clear()
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert check_compiler().status == "warning"
    assert "g++" in check_compiler().advice
    monkeypatch.setenv("AGENTFLOW_COMPILED_KERNELS", str(tmp_path))
    assert check_compiler().status == "warning"
    (tmp_path / native_library._ahead_name("amx")).touch()
    assert (check_compiler().status, check_compiler().advice) == ("ok", "")
    monkeypatch.setenv("AGENTFLOW_KERNELS", "torch")
    assert check_compiler().status == "ok"


@pytest.mark.usefixtures("amx")
def test_f37_unknown_kernels_and_a_cache_that_cannot_be_written_are_found(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "file"))
    assert (check_compiler().status, "AGENTFLOW_CACHE" in check_compiler().advice) == ("warning", True)
    monkeypatch.setenv("AGENTFLOW_KERNELS", "fast")
    assert check_compiler().status == "error"


def test_a_model_that_is_not_pulled(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path))
    (missing,) = check_model("smollm2-135m", CPU, is_nvidia=False)
    assert (missing.status, missing.advice) == ("error", "agentflow pull smollm2-135m")
    (unneeded,) = check_model("smollm2-135m", None, is_nvidia=False)
    assert unneeded.status == "warning"
    (unknown,) = check_model("no-such-model", CPU, is_nvidia=False)
    assert unknown.status == "error"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    """A folder with a config, and the header of 1,000,000 weights."""
    config = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps(
        {"w": {"shape": [1000, 1000], "dtype": "BF16", "data_offsets": [0, 2_000_000]}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return tmp_path


@pytest.mark.parametrize(("free_bytes", "status"), [(4_000_000_000, "ok"), (500_100_000, "error")])
def test_the_memory_is_compared_with_the_model(monkeypatch, small_model, free_bytes, status):
    monkeypatch.setattr(resources, "free_host_bytes", lambda: free_bytes)
    check = check_memory("small", small_model, asks_gpu=False)
    assert (check.status, bool(check.advice)) == (status, status == "error")


def test_f37_a_damaged_model_is_a_failed_check(tmp_path):
    file = tmp_path / "truncated.gguf"
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 272, 0))  # without the tensors that the header counts
    (check,) = check_model(str(file), CPU, is_nvidia=False)
    assert (check.name, check.status) == ("model", "error")
    assert "truncated or damaged" in check.found


def test_a_port_in_use_is_found():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert check_port("127.0.0.1", port).status == "warning"
    assert check_port("127.0.0.1", port).status == "ok"
    assert check_port("127.0.0.1", 70_000).status == "warning"


FOUND = [
    Check("one", "ok", "fine"),
    Check("two", "warning", "slow", "do this"),
    Check("three", "error", "gone"),
]


@pytest.mark.parametrize(("encoding", "marks"), [("utf-8", "✓ ! ✗"), ("ascii", "ok ! x")])
def test_the_table_has_a_mark_and_the_advice(encoding, marks):
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, write_through=True) as file:
        print_checks(FOUND, Console(file=file, width=60))
        text = raw.getvalue().decode(encoding)
    assert all(mark in text for mark in marks.split())
    assert "do this" in text


def test_the_summary_counts():
    assert "1 of 3" in summary(FOUND)
    assert "1 warning" in summary(FOUND[:2])
    assert summary(FOUND[:1]) == "agentflow is ready."


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("error", 1)])
def test_the_exit_status_says_whether_it_is_usable(monkeypatch, capsys, status, code):
    monkeypatch.setattr(doctor, "checks", lambda *_: iter([Check("it", status, "is", "do")]))
    assert main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "ready": code == 0,
        "checks": [{"name": "it", "status": status, "found": "is", "advice": "do"}],
    }
    assert main(["doctor"]) == code
    assert "it" in capsys.readouterr().out


def test_the_command_checks_this_machine(capsys, model_folder):
    assert main(["doctor", "--port", "0"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("Python", "[engine]", "torch", "processor", "smollm2-135m", "port"))
