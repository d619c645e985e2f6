"""What a schema's ``format`` leaves open: the calendar. Its expression takes every 29th of February, leap
seconds and the year 0, which readers of dates do not."""

from __future__ import annotations

from typing import Final

_LEAP_YEAR: Final = (
    r"([1-9][0-9](0[48]|[2468][048]|[13579][26])"  # every fourth, but not the hundreds
    r"|(1[26]|[2468][048]|[3579][26])00)"  # of which every fourth is one
)
_DATE: Final = rf"([1-9][0-9]{{3}}-(0[13-9]|1[0-2]|02-([01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"

CLOSER_PATTERNS: Final = {
    "date": f"^{_DATE}",
    "date-time": rf"^{_DATE}.*[Tt ][0-9][0-9]:[0-9][0-9]:[0-5]",
    "time": r"^[0-9][0-9]:[0-9][0-9]:[0-5]",
    "duration": r"^[^0-9]*([0-9]{1,4}[^0-9]+)+$",  # larger ones overflow what holds them
}
"""Patterns that a text of the format has to match, too: years from 1000 on, days that exist."""
