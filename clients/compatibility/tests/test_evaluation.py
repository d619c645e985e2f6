"""Evaluation harnesses."""

from __future__ import annotations

from typing import Any

import inspect_ai
import inspect_ai.dataset
import inspect_ai.model
import inspect_ai.scorer
import inspect_ai.solver
import inspect_ai.tool
import pytest
from conftest import Server
from subjects import ANSWER, MODEL, weather


@inspect_ai.tool.tool(name="weather")
def weather_tool() -> inspect_ai.tool.Tool:
    async def execute(city: str) -> str:
        """Returns the weather.

        Args:
            city: The name of the city.
        """
        return weather(city)

    return execute


@pytest.mark.client("inspect-ai")
class TestInspect:
    @pytest.mark.parametrize("responses", [True, False])
    def test_tools(self, server: Server, responses: bool, tmp_path: Any) -> None:
        model = inspect_ai.model.get_model(
            f"openai/{MODEL}", base_url=server.v1, api_key="no-key", responses_api=responses, memoize=False
        )
        task = inspect_ai.Task(
            dataset=[inspect_ai.dataset.Sample("Hello there", target=ANSWER)],
            solver=[inspect_ai.solver.use_tools(weather_tool()), inspect_ai.solver.generate()],
            scorer=inspect_ai.scorer.match(location="exact"),
        )
        [log] = inspect_ai.eval(task, model, log_dir=str(tmp_path), display="none")
        assert log.status == "success", log.error
        assert log.results is not None
        assert log.results.scores[0].metrics["accuracy"].value == 1
