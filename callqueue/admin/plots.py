"""The dashboard's pictures as numbers: where each bar and each gauge begins and ends. The templates
draw most of them.

Coordinates are SVG user units, y downwards. Nothing here knows colours: those are CSS classes,
light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from callqueue.operations.formatting import count

WIDTH, HEIGHT = 360, 56
GAUGE = 120
TRACE_WIDTH, TRACE_HEIGHT = 180, 36


@dataclass(frozen=True)
class Bar:
    """One minute: the done part from the bottom, the failed part on top of it."""

    x: float
    width: float
    done_y: float
    done_height: float
    failed_y: float
    failed_height: float
    label: str
    is_known: bool


@dataclass(frozen=True)
class Plot:
    """An hour of bars. `top` is the count that the full height stands for; `total_*` are sums;
    `summary` says it in words.

    `drawn` is the bars as SVG: a template that draws hundreds of them takes longer than the rest of
    its page.
    """

    drawn: SafeString
    top: int
    total_done: int
    total_failed: int
    summary: str
    done: str
    failed: str
    most: str
    width: int = WIDTH
    height: int = HEIGHT


@dataclass(frozen=True)
class Gauge:
    """How much of a limit is used: the width of the used part, out of `width`; and what is used and
    free, to be read.
    """

    used_width: float
    kind: str
    percent: int
    used: str
    free: str
    width: int = GAUGE


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


@dataclass(frozen=True)
class Trace:
    """The use of a limit, a line for each stretch that is known, as SVG takes them; and the limit
    as a line at `limit_y`.
    """

    lines: Sequence[str]
    limit_y: float
    over: str
    summary: str
    width: int = TRACE_WIDTH
    height: int = TRACE_HEIGHT


def trace(levels: Sequence[int | None], capacity: int, over: str) -> Trace:
    """The trace of levels at even distances, the present last, against a capacity; None where it is
    not counted yet.
    """
    known = [level for level in levels if level is not None]
    highest = max(known, default=0)
    top = max(capacity, highest) * 1.08 or 1.0
    step = TRACE_WIDTH / max(1, len(levels) - 1)
    lines: list[list[str]] = [[]]
    for place, level in enumerate(levels):
        if level is None:
            lines.append([])
        else:
            lines[-1].append(f"{place * step:.1f},{TRACE_HEIGHT * (1 - level / top):.1f}")
    words = {"over": over, "highest": count(highest), "capacity": count(capacity)}
    if len(known) == len(levels):
        summary = _("Use over the last %(over)s: at most %(highest)s of %(capacity)s") % words
    else:
        summary = (
            _(
                "Use over the last %(over)s, as far as it is counted yet: "
                "at most %(highest)s of %(capacity)s"
            )
            % words
        )
    return Trace(
        [" ".join(line) for line in lines if line],
        round(TRACE_HEIGHT * (1 - capacity / top), 1),
        over,
        summary,
    )


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


def plot(minutes: Sequence[tuple[int, int] | None], *, of_attempts: bool = False) -> Plot:
    """The plot of (done, failed) per minute, oldest first; None where it is not counted yet. They
    are calls, or attempts.
    """
    known = [minute for minute in minutes if minute is not None]
    top = max((done + failed for done, failed in known), default=0)
    done, failed = sum(minute[0] for minute in known), sum(minute[1] for minute in known)
    step = WIDTH / max(1, len(minutes))
    # Of the many small plots of attempts, what a bar says would take longer than all the rest of
    # the page.
    bars = [
        _bar(place, minute, len(minutes), step, max(top, 1), not of_attempts)
        for place, minute in enumerate(minutes)
    ]
    shown = {"done": count(done), "failed": count(failed), "most": count(top)}
    if of_attempts:
        said = _(
            "Attempts per minute over the last hour: %(done)s succeeded and %(failed)s failed, "
            "at most %(most)s in a minute"
        )
    else:
        said = _(
            "Calls per minute over the last hour: %(done)s done and %(failed)s failed, "
            "at most %(most)s in a minute"
        )
    summary = said % shown
    return Plot(
        mark_safe("".join(map(_drawn, bars))),
        top,
        done,
        failed,
        summary,
        shown["done"],
        shown["failed"],
        shown["most"],
    )


def gauge(used: int, free: int, capacity: int) -> Gauge:
    """The gauge of a limit; more than its capacity (an operator lowered it) is shown as full."""
    share = used / capacity if capacity else 1.0
    kind = "full" if share >= 1 else "high" if share >= 0.8 else "some" if used else "none"
    return Gauge(
        round(GAUGE * min(1.0, share), 1), kind, round(100 * share), count(used), count(free)
    )


def _drawn(bar: Bar) -> str:
    if not bar.is_known:
        parts = [("unknown", bar.done_y, bar.done_height)]
    else:
        parts = [("done", bar.done_y, bar.done_height), ("failed", bar.failed_y, bar.failed_height)]
    rects = [
        f'<rect class="cq-bar-{kind}" x="{bar.x}" width="{bar.width}" y="{y}" height="{height}"/>'
        for kind, y, height in parts
        if height
    ]
    drawn = "".join(rects)
    return f"<g><title>{escape(bar.label)}</title>{drawn}</g>" if bar.label else drawn


def _bar(
    place: int, minute: tuple[int, int] | None, bars: int, step: float, top: int, is_labelled: bool
) -> Bar:
    label = _label(bars - 1 - place, minute) if is_labelled else ""
    x, width = round(place * step, 2), round(max(step - 1, 0.5), 2)
    if minute is None:
        return Bar(x, width, HEIGHT - 2, 2, HEIGHT, 0, label, False)
    done, failed = (round(HEIGHT * part / top, 2) for part in minute)
    if minute[1] and failed < 2:
        failed = 2.0  # a failure among ten thousand is to be seen
    done = min(done, HEIGHT - failed)
    return Bar(
        x, width, round(HEIGHT - done, 2), done, round(HEIGHT - done - failed, 2), failed,
        label, True,
    )  # fmt: skip


def _label(ago: int, minute: tuple[int, int] | None) -> str:
    when = _("%d min ago") % ago if ago else _("this minute")
    if minute is None:
        return _("%s: not counted yet") % when
    return _("%(when)s: %(done)s done, %(failed)s failed") % {
        "when": when,
        "done": count(minute[0]),
        "failed": count(minute[1]),
    }
