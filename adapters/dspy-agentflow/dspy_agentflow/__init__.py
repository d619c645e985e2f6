"""agentflow's models for DSPy: ``AgentflowLM``."""

from importlib.util import find_spec

if find_spec("dspy.lm15") is not None:
    from dspy_agentflow.engines import AgentflowEngine, AsyncAgentflowEngine
    from dspy_agentflow.lm import AgentflowLM

__all__ = ["AgentflowEngine", "AgentflowLM", "AsyncAgentflowEngine"]
