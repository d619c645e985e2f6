"""Numbers of Hypothesis's examples where the profile's own are too few."""

from hypothesis import settings

_OF_FULL = 100


def examples(number: int) -> settings:
    """Settings for ``number`` examples in ``make test-full``; other profiles have them in proportion,
    ``make test`` a quarter."""
    return settings(max_examples=number * settings.default.max_examples // _OF_FULL)
