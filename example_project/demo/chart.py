"""The picture: how much of each limit was in use over time, by the vendor's own record, as an SVG
file.

In: the vendor's record. Out: SVG text. Three panels share one time axis; a dashed line is the
limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from example_project.demo.calls import CHANNELS

WIDTH, LEFT, RIGHT = 1040, 84, 28
PLOT = WIDTH - LEFT - RIGHT
HEADER, TALL, TITLE, GAP, FOOTER = 92, 150, 44, 26, 60
LANE = 25  # height of a channel's lane
INK, SOFT, GRID, PAPER = "#1f2933", "#66727f", "#e4e8ec", "#ffffff"
BLUE, TEAL, VIOLET, RED = "#3b7dd8", "#1f9e89", "#8a63d2", "#d64545"
FONT = (
    "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, "
    'sans-serif"'
)

Step = tuple[float, int]  # from this second on, so many calls in the window that ends here


def draw(record: Mapping[str, Any]) -> str:
    """The whole picture."""
    arrivals = record["arrivals"]
    start = min((arrival["at"] for arrival in arrivals), default=0.0)
    end = max((arrival["at"] for arrival in arrivals), default=1.0) - start + record["window"]
    axis = Axis(end)
    by_limit = {
        name: [a for a in arrivals if name in a["counts"]]
        for name in {n for a in arrivals for n in a["counts"]}
    }
    height_of_lanes = LANE * len(CHANNELS)
    tops = [
        HEADER,
        HEADER + TITLE + TALL + GAP,
        HEADER + 2 * (TITLE + GAP) + TALL + height_of_lanes,
    ]
    bottom = tops[2] + TITLE + TALL
    limits, window = record["limits"], record["window"]
    parts = [
        _header(arrivals),
        _title(tops[0], "prices", f"at most {limits['prices']} calls in any second"),
        _areas(
            axis,
            tops[0] + TITLE,
            limits["prices"],
            window,
            [(BLUE, by_limit.get("prices", []))],
            start,
        ),
        _title(
            tops[1],
            "messages",
            f"at most {limits['channel']} call in any second of each channel; "
            "a bar is a call and its second",
        ),
        _lanes(axis, tops[1] + TITLE, window, by_limit, start),
        _title(
            tops[2],
            "messages + uploads",
            f"at most {limits['workspace']} calls in any second, together",
        ),
        _areas(
            axis,
            tops[2] + TITLE,
            limits["workspace"],
            window,
            _shared(by_limit.get("workspace", [])),
            start,
        ),
        _legend(tops[2] + 16),
        _seconds(
            axis,
            [
                (top + TITLE, height)
                for top, height in zip(tops, (TALL, height_of_lanes, TALL), strict=True)
            ],
            bottom,
        ),
    ]
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {WIDTH} {bottom + FOOTER}" {FONT} role="img">'
    )
    paper = f'<rect width="{WIDTH}" height="{bottom + FOOTER}" fill="{PAPER}"/>'
    return "\n".join(
        [head, "<title>Calls over time against the limits</title>", paper, *parts, "</svg>", ""]
    )


class Axis:
    """Seconds since the first call to horizontal positions."""

    def __init__(self, seconds: float) -> None:
        self.seconds = max(seconds, 1.0)

    def x(self, second: float) -> float:
        return round(LEFT + PLOT * second / self.seconds, 2)

    def ticks(self) -> Iterable[int]:
        step = next(
            step
            for step in (1, 2, 5, 10, 30, 60, 600, 3600)
            if self.seconds / step <= 12 or step == 3600
        )
        return range(0, int(self.seconds) + 1, step)


def rolling(instants: Sequence[float], window: float) -> list[Step]:
    """How many of the calls lie in the window that ends at each moment, as steps."""
    changes = sorted([(at, 1) for at in instants] + [(at + window, -1) for at in instants])
    steps, count = [], 0
    for at, change in changes:
        count += change
        steps.append((at, count))
    return steps


def _header(arrivals: Sequence[Mapping[str, Any]]) -> str:
    refused = sum(arrival["status"] == 429 for arrival in arrivals)
    told = (
        f"{len(arrivals)} requests, as the vendor recorded their arrival; "
        f"{refused} of them refused with 429"
    )
    return (
        f'<text x="{LEFT}" y="42" font-size="22" font-weight="600" fill="{INK}">'
        "Calls over time against the limits</text>"
        f'<text x="{LEFT}" y="66" font-size="14" fill="{SOFT}">{escape(told)}</text>'
    )


def _title(top: float, name: str, limit: str) -> str:
    return (
        f'<text x="{LEFT}" y="{top + 26}" font-size="15" fill="{INK}">'
        f'<tspan font-weight="600">{escape(name)}</tspan>'
        f'<tspan dx="10" font-size="13" fill="{SOFT}">{escape(limit)}</tspan></text>'
    )


def _shared(arrivals: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    colours = {"messages": TEAL, "uploads": VIOLET}
    return [(colour, [a for a in arrivals if a["api"] == api]) for api, colour in colours.items()]


def _areas(
    axis: Axis,
    top: float,
    limit: int,
    window: float,
    layers: Sequence[tuple[str, Sequence[Mapping[str, Any]]]],
    start: float,
) -> str:
    """Areas of rolling counts, one on the other, under the line of the limit."""
    highest = max(
        [
            limit,
            *[
                count
                for _, count in rolling([a["at"] for _, layer in layers for a in layer], window)
            ],
        ]
    )
    scale = TALL / (highest * 1.18)
    parts = _scale(top, highest, scale)
    below: list[float] = []
    for colour, layer in layers:
        lower, below = list(below), [*below, *[arrival["at"] - start for arrival in layer]]
        path = _outline(axis, top, rolling(below, window), scale) + _outline(
            axis, top, rolling(lower, window), scale
        )
        parts.append(f'<path d="{path}" fill="{colour}" fill-opacity="0.82" fill-rule="evenodd"/>')
    y = top + TALL - limit * scale
    parts.append(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
        f'stroke="{RED}" stroke-width="2" stroke-dasharray="7 5"/>'
        f'<text x="{WIDTH - RIGHT}" y="{y - 6:.1f}" font-size="12" text-anchor="end" '
        f'fill="{RED}">limit {limit}</text>'
    )
    return "\n".join(parts)


def _outline(axis: Axis, top: float, steps: Sequence[Step], scale: float) -> str:
    """The closed outline of a step function over the panel's floor; empty where there are no
    steps.
    """
    if not steps:
        return ""
    floor = top + TALL
    path = [f"M{axis.x(steps[0][0])} {floor:.1f}"]
    for at, count in steps:
        path.append(f"H{axis.x(at)}V{floor - count * scale:.1f}")
    return "".join([*path, f"V{floor:.1f}Z"])


def _scale(top: float, highest: int, scale: float) -> list[str]:
    parts = []
    for count in range(0, highest + 1, 1 if highest <= 6 else 2):
        y = top + TALL - count * scale
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        )
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 4:.1f}" font-size="12" text-anchor="end" '
            f'fill="{SOFT}">{count}</text>'
        )
    return parts


def _lanes(
    axis: Axis,
    top: float,
    window: float,
    by_limit: Mapping[str, Sequence[Mapping[str, Any]]],
    start: float,
) -> str:
    """A lane per channel: bars as wide as the window, which must not overlap."""
    parts = []
    for number, channel in enumerate(CHANNELS):
        y = top + number * LANE
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y + LANE - 3}" y2="{y + LANE - 3}" '
            f'stroke="{GRID}"/>'
            f'<text x="{LEFT - 10}" y="{y + 15}" font-size="12" text-anchor="end" '
            f'fill="{SOFT}">{escape(channel)}</text>'
        )
        for arrival in by_limit.get(f"channel:{channel}", ()):
            x, right = axis.x(arrival["at"] - start), axis.x(arrival["at"] - start + window)
            parts.append(
                f'<rect x="{x}" y="{y + 3}" width="{max(1.0, right - x):.2f}" height="{LANE - 9}" '
                f'rx="2" fill="{TEAL}" fill-opacity="0.82"/>'
                f'<rect x="{x}" y="{y + 3}" width="2" height="{LANE - 9}" fill="#0d5c4f"/>'
            )
    return "\n".join(parts)


def _legend(y: float) -> str:
    parts, x = [], WIDTH - RIGHT - 170
    for colour, name in ((TEAL, "messages"), (VIOLET, "uploads")):
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" '
            f'fill="{colour}" fill-opacity="0.82"/>'
            f'<text x="{x + 18}" y="{y + 11}" font-size="13" fill="{SOFT}">{name}</text>'
        )
        x += 98
    return "".join(parts)


def _seconds(axis: Axis, panels: Sequence[tuple[float, float]], bottom: float) -> str:
    parts = []
    for second in axis.ticks():
        x = axis.x(second)
        for top, height in panels:
            parts.append(
                f'<line x1="{x}" x2="{x}" y1="{top}" y2="{top + height}" '
                f'stroke="{INK}" stroke-opacity="0.06"/>'
            )
        parts.append(
            f'<text x="{x}" y="{bottom + 20}" font-size="12" text-anchor="middle" '
            f'fill="{SOFT}">{second}</text>'
        )
    middle = LEFT + PLOT / 2
    parts.append(
        f'<text x="{middle}" y="{bottom + 42}" font-size="13" text-anchor="middle" '
        f'fill="{SOFT}">seconds since the first call; '
        "the height is the number of calls in the second that ends there</text>"
    )
    return "\n".join(parts)
