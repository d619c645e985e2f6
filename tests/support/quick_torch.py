"""Makes seeding torch's generator faster, where it is the only one."""

from __future__ import annotations

import sys
from typing import Any


def quicken_seeds() -> None:
    """Lets ``torch.manual_seed`` seed the CPU's generator alone if there is no GPU. Otherwise it prepares the
    seeds of three kinds of devices, each with a text of the whole stack, which takes longer than most tensors
    of tests."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        torch.manual_seed = torch.default_generator.manual_seed
