"""The curve of a simulation as numbers: a template draws it.

Coordinates are SVG user units, y downwards. Nothing here knows colours: those are CSS classes,
light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _

from callqueue.operations.formatting import count

WIDTH, HEIGHT = 360, 56


@dataclass(frozen=True)
class Curve:
    """A line from the lower left to the upper right: `points` as SVG takes them. `summary` says it
    in words.
    """

    points: str
    seconds: float
    calls: int
    summary: str
    width: int = WIDTH
    height: int = 2 * HEIGHT


def curve(points: Sequence[tuple[float, int]]) -> Curve:
    """The curve of (seconds, calls sent so far), which both only grow."""
    seconds, calls = points[-1] if points else (0.0, 0)
    height = 2 * HEIGHT
    wide, high = WIDTH / seconds if seconds else 0, height / max(calls, 1)
    drawn = " ".join(
        f"{at * wide if seconds else WIDTH:.1f},{height - sent * high:.1f}" for at, sent in points
    )
    summary = _("%(calls)s calls sent over %(seconds)s seconds") % {
        "calls": count(calls),
        "seconds": count(round(seconds)),
    }
    return Curve(f"0,{height} {drawn}", seconds, calls, summary)
