"""The sampling parameters in the requests of OpenAI's API and its relatives."""

from __future__ import annotations

from typing import Any, Final

from agentflow.backends.apis.capability_table import ModelFacts
from agentflow.backends.apis.chat.flavours import Flavour
from agentflow.backends.apis.generation.api_format import Call
from agentflow.errors import NotSupported

KEPT_HERE: Final = ("stop", "stop_regex")
"""Parameters that the received text is cut by, whether the server applies them or not."""


class SamplingWriter:
    """Writes the parameters that a program gave, and refuses those that the model does not accept.

    Args:
        model: The model's name.
        flavour: The kind of server.
        facts: The features of the model.
    """

    def __init__(self, model: str, flavour: Flavour, facts: ModelFacts) -> None:
        self._model = model
        self._flavour = flavour
        self._facts = facts

    def fields(self, call: Call, *, is_wrapped: bool = False) -> dict[str, Any]:
        """The fields of a request, without log-probabilities. ``NotSupported`` names the parameter that the
        model does not accept.

        Args:
            call: The generation.
            is_wrapped: Whether the answer is an object around the text.
        """
        fields: dict[str, Any] = {}
        accepted = self._flavour.accepted(self._facts, self.reasons(call))
        for name, value in call.given.items():
            if name == "max_reasoning_tokens" and self._turns_reasoning_off(call):
                fields["reasoning_effort"] = self._facts.reasoning_off
                continue
            if name not in accepted:
                if name in KEPT_HERE:
                    continue
                raise self._refused(name)
            if name == "stop":
                # A stop would cut the object around the text, and has its effect on the text itself.
                value = [] if is_wrapped else list(value)[: self._facts.max_stops]
                if not value:
                    continue
            elif name == "seed":
                value &= (1 << self._flavour.seed_bits) - 1
            elif name == "logit_bias":
                value = dict(value)
            place = self._facts.max_tokens_field if name == "max_tokens" else self._flavour.params[name]
            fields[place] = value
        if call.params.wants_logprobs and "logprobs" not in self._facts.parameters(self.reasons(call)):
            raise self._refused("logprobs")
        return fields

    def reasons(self, call: Call) -> bool | None:
        """Whether the model reasons; None: as it does by default."""
        return False if self._turns_reasoning_off(call) else None

    def _turns_reasoning_off(self, call: Call) -> bool:
        return call.given.get("max_reasoning_tokens") == 0 and bool(self._facts.reasoning_off)

    def _refused(self, name: str) -> NotSupported:
        remedy = "leave it out"
        if self._facts.reasoning_off and name in (*self._flavour.accepted(self._facts, False), "logprobs"):
            remedy = "leave it out, or turn reasoning off with max_reasoning_tokens=0"
        return NotSupported(f"{self._model} does not support {name}: {remedy}", param=name)
