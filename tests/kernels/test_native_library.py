"""Finding, compiling and keeping the native kernels, and the results where they are not available."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from kernel_cases import quick_flags

from agentflow.kernels import native_library, platforms
from agentflow.kernels.native_library import NoNativeKernels, load_best, load_library, native_level
from agentflow.kernels.native_ops import team
from agentflow.kernels.platforms import NATIVE, TORCH

CPU = torch.device("cpu")
PRESENT = native_library.cpu_flags()


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The processor's features, to be changed. Libraries are loaded again, and not kept."""
    made: set[str] = set()
    monkeypatch.setattr(team, "_library_allowed", team._library_allowed.__wrapped__)
    monkeypatch.setattr(native_library, "cpu_flags", lambda: frozenset(made))
    return made


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty source, which compiles immediately, and an empty cache."""
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    monkeypatch.setattr(native_library, "SOURCES", sources)
    made = sources / "entry.cpp"
    made.touch()
    return made


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache in which nothing is, and a compiler that fails."""
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(native_library, "compiler", lambda: ("false",))
    monkeypatch.setattr(team, "library", lambda: load_library("avx2"))


@pytest.mark.parametrize(
    ("there", "wanted", "level"),
    [
        (native_library.AVX2, "", "avx2"),
        (native_library.AVX512, "", "avx512"),
        (native_library.AVX512, "avx512_bf16", "avx512"),
        (native_library.AVX512, "avx2", "avx2"),
        ((*native_library.AVX512_VNNI, "avx512_bf16"), "", "avx512_bf16"),
        ((*native_library.AVX512_VNNI, "avx512_bf16"), "avx512", "avx512"),
        ((*native_library.AVX2, "avx512_bf16"), "", "avx2"),
        (native_library.LEVELS["amx"], "", "amx"),
        (native_library.AVX512_BF16, "amx", "avx512_bf16"),
    ],
)
def test_the_best_level_that_is_there_and_allowed(
    flags: set[str], there: tuple[str, ...], wanted: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags.update(there)
    monkeypatch.setenv("AGENTFLOW_CPU", wanted)
    assert native_level() == level


def test_an_old_processor_has_none(flags: set[str]) -> None:
    flags.add("sse4_2")
    with pytest.raises(NoNativeKernels, match="AVX2"):
        native_level()


def test_another_architecture_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library.platform, "machine", lambda: "aarch64")
    with pytest.raises(NoNativeKernels, match="aarch64"):
        native_level()


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_CPU", "sse9")
    with pytest.raises(ValueError, match=r"AGENTFLOW_CPU.*'sse9'.*avx2, avx512"):
        platforms.kernels_for(CPU)


@pytest.mark.usefixtures("source")
def test_the_kernels_are_compiled_once(tmp_path: Path) -> None:
    library = load_library("avx2")
    assert Path(library._name).parent == tmp_path / "cache/kernels"
    made = os.stat(library._name).st_mtime_ns
    assert os.stat(load_library("avx2")._name).st_mtime_ns == made
    assert len(list((tmp_path / "cache/kernels").iterdir())) == 1


def test_other_sources_are_another_library(source: Path) -> None:
    load_library("avx2")
    source.with_name("team.h").write_text("")
    assert not native_library.is_compiled("avx2")
    source.write_text("#error not the same")
    with pytest.raises(NoNativeKernels, match="not the same"):
        load_library("avx2")


def test_equal_sources_are_one_library_wherever_they_are(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library("avx2")
    shutil.copytree(source.parent, tmp_path / "copy")
    monkeypatch.setattr(native_library, "SOURCES", tmp_path / "copy")
    assert native_library.is_compiled("avx2")


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("unknown", "level"), [("-DAGENTFLOW_TILES", "avx512_bf16"), ("-mavx512bf16", "avx512_vnni")]
)
def test_an_old_compiler_costs_the_level_that_it_does_not_know(
    unknown: str,
    level: str,
    flags: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    flags.update(native_library.LEVELS["amx"])
    old = tmp_path / "old-c++"
    real = " ".join(native_library.compiler())
    refuse = 'echo "error: what is that?" >&2; exit 1'
    old.write_text(f'#!/bin/sh\ncase "$*" in *{unknown}*) {refuse};; esac\nexec {real} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setattr(native_library, "compiler", lambda: (str(old),))
    monkeypatch.delenv("AGENTFLOW_CPU", raising=False)
    with caplog.at_level(logging.WARNING):
        library = load_best()
    assert Path(library._name).name.startswith(f"{level}-")
    [record] = caplog.records
    assert f"for {level} instead of amx: the compiler failed: error: what is that?" in record.message


@pytest.mark.usefixtures("source")
def test_kernels_compiled_ahead_need_neither_compiler_nor_cache(
    flags: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = native_library.compile_ahead(tmp_path / "ahead")
    assert [path.name.partition("-")[0] for path in made] == list(native_library.LEVELS)
    monkeypatch.setenv("AGENTFLOW_COMPILED_KERNELS", str(tmp_path / "ahead"))
    monkeypatch.setattr(native_library, "compiler", lambda: ("false",))
    monkeypatch.delenv("AGENTFLOW_CPU", raising=False)
    for path, (level, needed) in zip(made, native_library.LEVELS.items(), strict=True):
        flags.clear()
        flags.update(needed)
        assert native_library.is_compiled(level)
        assert load_best()._name == str(path)
    assert not (tmp_path / "cache").exists()


def test_kernels_compiled_ahead_from_other_sources_are_ignored(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_library.compile_ahead(tmp_path / "ahead")
    monkeypatch.setenv("AGENTFLOW_COMPILED_KERNELS", str(tmp_path / "ahead"))
    source.write_text("int changed;")
    assert native_library.compiled_ahead("avx2") is None
    assert Path(load_library("avx2")._name).parent == tmp_path / "cache/kernels"


def test_a_compiler_without_any_level_is_one_error_without_warnings(
    flags: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flags.update(native_library.LEVELS["amx"])
    monkeypatch.setattr(native_library, "compiler", lambda: ("false",))
    monkeypatch.setenv("AGENTFLOW_CACHE", str(tmp_path))
    monkeypatch.delenv("AGENTFLOW_CPU", raising=False)
    with pytest.raises(NoNativeKernels, match="compiler failed"):
        load_best()
    assert not caplog.records


@pytest.mark.usefixtures("no_compiler")
def test_without_them_a_cpu_runs_on_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("AGENTFLOW_KERNELS", raising=False)
    with caplog.at_level(logging.WARNING):
        assert platforms.kernels_for(CPU) is TORCH
    assert "torch kernels" in caplog.text
    assert "the compiler failed" in caplog.text


@pytest.mark.usefixtures("no_compiler")
def test_requested_kernels_that_cannot_be_compiled_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", "native")
    with pytest.raises(ValueError, match=r"AGENTFLOW_KERNELS.*'native'.*compiler"):
        platforms.kernels_for(CPU)


def test_native_kernels_are_not_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLOW_KERNELS", "native")
    with pytest.raises(ValueError, match=r"AGENTFLOW_KERNELS.*'native'.*cuda"):
        platforms.kernels_for(torch.device("cuda"))


def test_a_cpu_runs_on_them(flags: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "FLAGS", quick_flags("avx2"))
    monkeypatch.delenv("AGENTFLOW_KERNELS", raising=False)
    flags.update(native_library.AVX2)
    assert platforms.kernels_for(CPU) is NATIVE
    assert Path(team.library()._name).name.startswith("avx2-")


@pytest.mark.skipif(not PRESENT.issuperset(native_library.AVX512_BF16), reason="needs AVX-512 with bfloat16")
@pytest.mark.skipif(
    PRESENT.issuperset(native_library.LEVELS["amx"]), reason="here Linux gives the right to tiles"
)
def test_a_linux_that_refuses_tiles_has_products_without(
    flags: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library, "FLAGS", quick_flags("amx"))
    flags.update(native_library.LEVELS["amx"])
    assert Path(team.library()._name).name.startswith("amx-")
    x, weight = torch.randn(40, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    product = NATIVE.linear.multiply(x, NATIVE.linear.pack(weight, None))
    torch.testing.assert_close(product.float(), x.float() @ weight.float().T, rtol=1e-2, atol=0.2)
