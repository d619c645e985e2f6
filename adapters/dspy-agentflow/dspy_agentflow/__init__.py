"""agentflow's models for DSPy: ``AgentflowLM``, ``AgentflowEmbedding``; from DSPy 3.4 on also two engines.

Reading order: ``lm`` (settings, signature), ``engines`` or ``older_lm`` (one for each generation of DSPy's
interface), ``answers`` (calls of the model), ``answer_format``, and data that DSPy does not pass to its
engines: ``call_notes`` (about one call) and ``programs`` (the program of a call). ``embedding`` has the
callable for ``dspy.Embedder``. ``wired_module`` runs programs whose predictors get each other's outputs by
reference; ``call_sites`` finds the places where their code allows it.
"""

import re
from importlib.metadata import version
from typing import TYPE_CHECKING

from dspy_agentflow.call_sites import UnwiredPart
from dspy_agentflow.embedding import AgentflowEmbedding
from dspy_agentflow.wired_module import WiredModule, wired

_DSPY = version("dspy")
_FOUND = tuple(int(number) for number in re.findall(r"\d+", _DSPY)[:2])
if _FOUND < (3, 0):
    raise ImportError(f"dspy-agentflow needs DSPy 3.0 or later, and this is {_DSPY}: pip install -U dspy")

if TYPE_CHECKING or _FOUND >= (3, 4):
    from dspy_agentflow.engines import AgentflowEngine, AgentflowLM, AsyncAgentflowEngine

    __all__ = [
        "AgentflowEmbedding",
        "AgentflowEngine",
        "AgentflowLM",
        "AsyncAgentflowEngine",
        "UnwiredPart",
        "WiredModule",
        "wired",
    ]
else:
    from dspy_agentflow.older_lm import AgentflowLM

    __all__ = ["AgentflowEmbedding", "AgentflowLM", "UnwiredPart", "WiredModule", "wired"]
