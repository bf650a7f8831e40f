"""Charts with axes, as SVG: bars and lines over stretches of time. What each stretch holds is its
title, which a pointer shows without any script; the same numbers stand in a table beside.

Coordinates are SVG user units, y downwards. Nothing here knows colours: those are CSS classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from django.utils import timezone
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from callqueue.operations import formatting

WIDTH, HEIGHT = 620, 150
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 10, 22  # room for the axes
TICKS = 5  # times on the axis of time, about


class Series(NamedTuple):
    """Values over the stretches, and the CSS class they are drawn in."""

    name: str
    kind: str
    values: Sequence[float | None]


Shown = Callable[[float], str]


def bars(starts: Sequence[int], series: Sequence[Series], says: str, shown: Shown) -> SafeString:
    """Stacked bars, a stretch each, which begin at these seconds since the epoch."""
    tops = [sum(s.values[i] or 0 for s in series) for i in range(len(starts))]
    top, parts = nice(max(tops, default=0)), []
    step = (WIDTH - LEFT - RIGHT) / max(1, len(starts))
    for i, start in enumerate(starts):
        if not tops[i]:
            continue
        x, base, drawn = LEFT + i * step, 0.0, []
        for one in series:
            if value := one.values[i]:
                low, high = _y(base, top), _y(base + value, top)
                height = max(low - high, 1.0)
                drawn.append(
                    f'<rect class="cq-{one.kind}" x="{x:.1f}" width="{max(step - 1, 0.8):.1f}" '
                    f'y="{low - height:.1f}" height="{height:.1f}"/>'
                )
                base += value
        parts.append(f"<g><title>{_title(start, i, series, shown)}</title>{''.join(drawn)}</g>")
    return _svg("".join(parts), starts, top, says, shown)


def lines(
    starts: Sequence[int],
    series: Sequence[Series],
    says: str,
    shown: Shown,
    *,
    limit: float | None = None,
) -> SafeString:
    """A line for each series, broken where there is nothing; `limit` is a dashed one."""
    known = [value for one in series for value in one.values if value is not None]
    top = nice(max([*known, limit or 0], default=0))
    step, parts = (WIDTH - LEFT - RIGHT) / max(1, len(starts)), []
    if limit is not None:
        y = _y(limit, top)
        parts.append(
            f'<line class="cq-limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    for one in series:
        for stretch in _unbroken(one.values):
            points = " ".join(
                f"{LEFT + (i + 0.5) * step:.1f},{_y(one.values[i] or 0, top):.1f}" for i in stretch
            )
            if len(stretch) == 1:  # a line of no length is drawn as a dot
                points = f"{points} {points}"
            kind = "dot" if len(stretch) == 1 else "line"
            parts.append(f'<polyline class="cq-{kind} cq-{one.kind}" points="{points}"/>')
    for i, start in enumerate(starts):
        if any(one.values[i] is not None for one in series):
            parts.append(
                f'<rect class="cq-touch" x="{LEFT + i * step:.1f}" width="{step:.1f}" y="{TOP}" '
                f'height="{HEIGHT - TOP - BOTTOM}">'
                f"<title>{_title(start, i, series, shown)}</title></rect>"
            )
    return _svg("".join(parts), starts, top, says, shown)


def curves(
    listed: Sequence[tuple[str, Sequence[tuple[float, int]]]], now: int, says: str
) -> SafeString:
    """Curves of what is left after so many seconds, from `now` (seconds since the epoch) on: each
    with the CSS class it is drawn in.
    """
    longest = max((points[-1][0] for _, points in listed if points), default=0.0) or 1.0
    top = nice(max((points[0][1] for _, points in listed if points), default=0))
    wide, parts = WIDTH - LEFT - RIGHT, []
    for kind, points in listed:
        drawn = " ".join(
            f"{LEFT + seconds / longest * wide:.1f},{_y(left, top):.1f}" for seconds, left in points
        )
        parts.append(f'<polyline class="cq-line cq-{kind}" points="{drawn}"/>')
    starts = [int(now + longest * i / 60) for i in range(61)]
    return _svg("".join(parts), starts, top, says, formatting.count)


def nice(most: float) -> float:
    """The top of an axis: the next of 1, 2, 4, 5, 8 times a power of ten."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * step for step in (1, 2, 4, 5, 8, 10) if power * step >= most * 0.9999)


def clock_of(start: int, length: int) -> str:
    """When something began (seconds since the epoch), in the reader's time zone: with the day where
    the axis is longer than a day, and with its zone where that is another than now.
    """
    local = timezone.localtime(datetime.fromtimestamp(start, UTC))
    shown = f"{local:%m-%d %H:%M}" if length > 86400 else f"{local:%H:%M}"
    return shown if f"{local:%Z}" == zone() else f"{shown} {local:%Z}"


def zone() -> str:
    """The name of the reader's time zone, as times say it."""
    return f"{timezone.localtime():%Z}"


def _title(start: int, place: int, series: Sequence[Series], shown: Shown) -> str:
    local = timezone.localtime(datetime.fromtimestamp(start, UTC))
    said = [f"{s.name} {shown(v)}" for s in series if (v := s.values[place]) is not None]
    return escape(f"{local:%Y-%m-%d %H:%M %Z}: {', '.join(said)}")


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top)


def _unbroken(values: Sequence[float | None]) -> list[list[int]]:
    """The places of values that follow one another."""
    found: list[list[int]] = [[]]
    for i, value in enumerate(values):
        if value is None:
            found.append([])
        else:
            found[-1].append(i)
    return [stretch for stretch in found if stretch]


def _svg(drawn: str, starts: Sequence[int], top: float, says: str, shown: Shown) -> SafeString:
    """The picture with its axes."""
    axes = []
    for share in (0.0, 0.5, 1.0):
        y = _y(top * share, top)
        axes.append(
            f'<line class="cq-grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">'
            f"{escape(shown(top * share))}</text>"
        )
    length = starts[-1] - starts[0]
    every = max(1, round(len(starts) / TICKS))
    step = (WIDTH - LEFT - RIGHT) / max(1, len(starts))
    for i in range(0, len(starts), every):
        x = LEFT + i * step
        if x > WIDTH - RIGHT - (70 if length > 86400 else 32):
            continue
        axes.append(
            f'<line class="cq-tick" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" '
            f'y2="{HEIGHT - BOTTOM + 4}"/><text x="{x:.1f}" y="{HEIGHT - 6}">'
            f"{clock_of(starts[i], length)}</text>"
        )
    return mark_safe(
        f'<svg class="cq-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(says)}">{"".join(axes)}{drawn}</svg>'
    )
