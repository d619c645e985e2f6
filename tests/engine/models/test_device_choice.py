"""The device and the kernels of a model, where a GPU or its kernels cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.random_model import write_random_model
from support.faults import has_param

from agentflow.engine.models import device as model_device
from agentflow.engine.models.device import device_named
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.errors import BadArgument
from agentflow.kernels.platforms import kernels_for

pytestmark = pytest.mark.timeout(60)
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)"


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose driver is older than torch's CUDA needs."""

    def fail() -> None:
        raise RuntimeError(TOO_OLD + ". Please update your GPU driver\nor install another torch")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("agentflow.engine.machine.resources.has_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)


@pytest.mark.usefixtures("old_driver")
def test_a_driver_that_is_too_old_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Once if the model then runs on the CPU; an error if the GPU was asked for; nothing if the CPU was."""
    assert device_named(None) == torch.device("cpu")
    assert [TOO_OLD in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(BadArgument, match="too old", check=has_param("device")):
        device_named("cuda")
    assert device_named("cpu") == torch.device("cpu")
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("old_driver")
@pytest.mark.parametrize("visible", ["", "-1"])
def test_gpus_that_are_hidden_are_not_missed(
    visible: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_named(None) == torch.device("cpu")
    assert not caplog.records


def test_a_machine_without_a_driver_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentflow.engine.machine.resources.has_driver", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_named(None) == torch.device("cpu")
    assert not caplog.records


class TestAttentionThatFails:
    """Attention is compiled for the sizes of a model's heads, which a GPU may have too little memory for."""

    @pytest.fixture(autouse=True)
    def _fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        interpreted = pytest.importorskip(
            "agentflow.kernels.triton_ops.interpreted", reason="triton is for x86-64 and Linux"
        )
        triton_attention = pytest.importorskip(
            "agentflow.kernels.triton_ops.attention.triton_attention", reason="triton is for x86-64 and Linux"
        )
        if not interpreted.IS_INTERPRETED.value:
            pytest.skip("a compiled kernel needs a GPU")
        real = triton_attention.attend

        def attend(q: torch.Tensor, *args: object) -> torch.Tensor:
            if q.shape[2] > 8:
                raise RuntimeError("out of resource: shared memory")
            found: torch.Tensor = real(q, *args)
            return found

        monkeypatch.setattr(triton_attention, "attend", attend)
        monkeypatch.setenv("AGENTFLOW_KERNELS", "triton")

    def test_the_model_runs_on_torch_and_says_so_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        wide = write_random_model(tmp_path / "wide", head_dim=16)
        narrow = write_random_model(tmp_path / "narrow", head_dim=8)
        chosen = kernels_for(torch.device("cpu"))
        monkeypatch.delenv("AGENTFLOW_KERNELS")
        monkeypatch.setattr(model_device, "kernels_for", lambda device: chosen)
        names = [
            TorchRunner(folder, num_slots=40, device="cpu", dtype="float32").info.kernels
            for folder in (wide, narrow)
        ]
        assert names == ["torch", "triton"]
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert ["shared memory" in warning for warning in warnings] == [True]
        with pytest.raises(BadArgument, check=has_param("quantize")):
            TorchRunner(wide, num_slots=40, device="cpu", dtype="float32", quantize="int8")

    def test_kernels_that_are_forced_are_an_error(self, tmp_path: Path) -> None:
        folder = write_random_model(tmp_path / "wide", head_dim=16)
        with pytest.raises(BadArgument, match="shared memory", check=has_param("AGENTFLOW_KERNELS")):
            TorchRunner(folder, num_slots=40, device="cpu", dtype="float32")
