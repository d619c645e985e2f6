"""The formats of JSON schema that the engine enforces."""

from __future__ import annotations

from typing import Final

_LEAP_YEAR: Final = (
    "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])"  # every fourth year except centuries
    "|(?:1[26]|[2468][048]|[3579][26])00)"  # and every fourth century
)
_DAY_OF_MONTH: Final = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE: Final = f"(?:[1-9][0-9]{{3}}-{_DAY_OF_MONTH}|{_LEAP_YEAR}-02-29)"
_CLOCK: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_OFFSET: Final = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_SECONDS: Final = "[0-9]{1,4}S"
_MINUTES: Final = f"[0-9]{{1,4}}M(?:{_SECONDS})?"
_HOURS: Final = f"[0-9]{{1,4}}H(?:{_MINUTES}|{_SECONDS})?"
_CLOCK_TIME: Final = f"T(?:{_HOURS}|{_MINUTES}|{_SECONDS})"


def _uuid(version: str = "[0-9a-f]", variant: str = "[89ab]") -> str:
    return f"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-{variant}[0-9a-f]{{3}}-[0-9a-f]{{12}}"


PATTERN_OF_FORMAT: Final = {
    "date": _DATE,
    "time": _CLOCK + _OFFSET,
    "date-time": f"{_DATE}T{_CLOCK}{_OFFSET}",
    "duration": f"P(?:[0-9]{{1,4}}D(?:{_CLOCK_TIME})?|{_CLOCK_TIME})",
    "uuid": _uuid(variant="[0-9a-f]"),
    **{f"uuid{version}": _uuid(version) for version in "1345678"},
}
"""What strings of a ``format`` of JSON schema match as a whole. Narrower than the format where parsers
differ: years are 1000 to 9999, days exist in their month, seconds are below 60, durations have no weeks."""

FORMATS: Final = frozenset([*PATTERN_OF_FORMAT, "email", "hostname", "ipv4", "ipv6", "uri"])
"""All of them. llguidance has grammars of its own for those without a pattern here."""
