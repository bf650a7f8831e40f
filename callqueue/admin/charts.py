"""One chart: stacked bars over stretches of time, as SVG. The same numbers stand in a table beside
it.

Coordinates are SVG user units, y downwards. Colours are CSS classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from django.utils import timezone
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from callqueue.look import words

WIDTH, HEIGHT = 620, 130
LEFT, TOP, BOTTOM = 56, 10, 22  # room for the axes
EVERY = 16  # stretches from one time on the axis to the next


def bars(starts: Sequence[int], values: Mapping[str, Sequence[int]], says: str) -> SafeString:
    """A bar for each stretch, by when it begins in seconds since the epoch. `values`: by CSS class,
    from below.
    """
    most = max(map(sum, zip(*values.values(), strict=True))) or 1
    step, room = (WIDTH - LEFT) / len(starts), HEIGHT - TOP - BOTTOM
    drawn = []
    for y, label in ((TOP, words.count(most)), (TOP + room, "0")):
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="{LEFT - 5}" y="{y + 4}" text-anchor="end">{label}</text>')
    for place in range(0, len(starts) - EVERY // 3, EVERY):
        x = LEFT + place * step
        drawn.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}">{time_of(starts[place])}</text>')
    for place in range(len(starts)):
        low, x = float(TOP + room), LEFT + place * step
        for kind, counts in values.items():
            if counts[place]:
                height = max(1.0, room * counts[place] / most)
                low -= height
                drawn.append(
                    f'<rect class="cq-{kind}" x="{x:.1f}" width="{step - 1:.1f}" y="{low:.1f}" '
                    f'height="{height:.1f}"/>'
                )
    return mark_safe(
        f'<svg class="cq-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(says)}">{"".join(drawn)}</svg>'
    )


def time_of(start: int) -> str:
    """When a stretch begins, in the reader's time zone."""
    return f"{timezone.localtime(datetime.fromtimestamp(start, UTC)):%H:%M}"
