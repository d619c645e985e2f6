"""LMs copied and saved: with where their model is, without the key."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import dspy
import pytest
from dspy_agentflow import AgentflowLM
from dspy_agentflow.lm import is_cache_scope
from scripts import answering, chat, scripted, settings_of

SUGAR = chat(answer="sugar")


def test_copies_and_what_is_saved_reach_the_same_model(tmp_path: Path) -> None:
    lm = AgentflowLM("smollm2-135m", base_url="ws://there", api_key="secret", temperature=0.3, cache_salt="s")
    for other in (copy.deepcopy(lm), lm.copy(temperature=0.3), pickle.loads(pickle.dumps(lm))):
        assert settings_of(other) == settings_of(lm)
        assert other.model == "agentflow/smollm2-135m"
    state = lm.dump_state()
    assert "secret" not in json.dumps(state)
    assert not any(map(is_cache_scope, state))
    program = dspy.Predict("question -> answer")
    program.set_lm(lm)
    program.save(tmp_path / "program.json")
    assert "secret" not in (tmp_path / "program.json").read_text()


@pytest.mark.skipif(dspy.__version__.startswith(("3.0.", "3.1.", "3.2.")), reason="DSPy loads plain LMs only")
def test_a_saved_program_is_loaded_with_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = AgentflowLM("smollm2-135m", base_url="ws://there", api_key="secret", temperature=0.3)
    program = dspy.Predict("question -> answer")
    program.set_lm(lm)
    program.save(tmp_path / "program.json")
    monkeypatch.setenv("AGENTFLOW_API_KEY", "secret")
    loaded = dspy.Predict("question -> answer")
    loaded.load(tmp_path / "program.json", allow_unsafe_lm_state=True)
    assert isinstance(loaded.lm, AgentflowLM)
    assert settings_of(loaded.lm) == settings_of(lm)
    assert loaded.lm.kwargs["temperature"] == 0.3


def test_an_lm_with_a_backend_of_its_own_is_not_saved() -> None:
    lm, _ = scripted(answering(SUGAR))
    with pytest.raises(TypeError, match="set the LM again after loading"):
        lm.dump_state()
