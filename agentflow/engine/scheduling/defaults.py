"""The scheduler's defaults, in a module that needs no numpy: the commands of a bare install print them."""

from typing import Final, Literal, get_args

PolicyName = Literal["fair-lpm", "lpm", "fcfs", "random"]
DEFAULT_POLICY: Final = "fair-lpm"
MAX_RUNNING: Final = 64
"""Requests in one batch."""
CPU_BATCH_SIZE: Final = 16
"""Requests that decode together on a CPU before the products cost more than reading the weights."""
CPU_TOKEN_BUDGET: Final = 256
GPU_TOKEN_BUDGET: Final = 4096
"""Scheduled tokens of one forward pass."""
SIMULATED_CONTEXT: Final = 8192
"""Tokens of one request in a simulation."""
SIMULATED_POLICY_NAMES: Final = (*get_args(PolicyName), "dfs-weight")
