"""Numbers of examples, Hypothesis's and others, that depend on the profile."""

from hypothesis import settings

_OF_FULL = 100


def examples(number: int) -> settings:
    """Settings for ``number`` examples in ``make test-full``; other profiles have them in proportion,
    ``make test`` a sixth."""
    return settings(max_examples=times(number))


def times(number: int) -> int:
    """The same for a loop."""
    return max(1, number * settings.default.max_examples // _OF_FULL)
