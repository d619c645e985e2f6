"""The results for rows without a valid token."""

from __future__ import annotations

from typing import Final

NO_TOKEN: Final = -1
"""No token is allowed: each logit is minus infinity."""
NOT_FINITE: Final = -2
"""An allowed logit is NaN or infinity."""
