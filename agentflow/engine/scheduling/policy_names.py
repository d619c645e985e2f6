"""The names of the policies. Apart from them, because they need numpy and a bare install reads the names."""

from typing import Final, Literal

PolicyName = Literal["fair-lpm", "lpm", "dfs-weight", "fcfs", "random"]
DEFAULT_POLICY: Final = "fair-lpm"
