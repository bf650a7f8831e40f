"""How long a run is: short ones are many, and every tenth seed is a long one, that goes further."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Length:
    """Of what there is more in a long run. Tuples are drawn from; times are seconds."""

    troubled: float  # for so long misfortunes happen
    quiet: float  # and nothing ends sooner than this after them
    misfortunes: tuple[int, ...]
    kinds: tuple[int, int]  # of misfortunes
    dispensers: tuple[int, ...]
    workers: tuple[int, ...]
    makers: tuple[int, ...]  # where there are any, they are alone in every other run
    senders: tuple[int, ...]  # how many calls one transaction sends
    calls: tuple[int, int]
    permits: tuple[int, ...]
    probed: float  # how often it is asked what a run left behind


LONG = Length(
    troubled=3.5, quiet=1.0, misfortunes=(0, 1, 2, 3, 4, 6, 9), kinds=(1, 5),
    dispensers=(1, 2, 2, 3), workers=(1, 2, 2), makers=(0, 0, 1, 2), senders=(1, 1, 2, 4),
    calls=(4, 10), permits=(0, 0, 1, 2, 4), probed=1.0,
)  # fmt: skip
SHORT = Length(
    troubled=0.8, quiet=0.1, misfortunes=(0, 1, 2, 2), kinds=(1, 2), dispensers=(1, 1, 2, 2),
    workers=(1, 2, 2), makers=(0, 0, 1, 2), senders=(2, 3, 4), calls=(3, 5), permits=(0, 0, 0, 1),
    probed=0.1,
)  # fmt: skip
LONG_ONES = 10


def of(seed: int) -> Length:
    """How long the run of this seed is."""
    return SHORT if seed % LONG_ONES else LONG
