"""What a benchmark says: progress while it runs, a table at the end, and files beside it (JSON and
an SVG plot).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_began = time.monotonic()


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.monotonic() - _began:6.1f} s] {text}", file=sys.stderr, flush=True)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], command: str) -> str:
    """A Markdown table, and the command that measures it."""
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (str(c) for c in cells)
        aligned = [
            first.ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True)),
        ]
        return "| " + " | ".join(aligned) + " |"

    rule = "| " + " | ".join("-" * w for w in widths) + " |"
    return "\n".join([f"{title}  (`{command}`)", "", line(head), rule, *map(line, rows), ""])


def save(folder: Path, name: str, found: Any) -> Path:
    """Keep figures as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    return path


def plot(folder: Path, name: str, title: str, bars: Sequence[tuple[str, float]], unit: str) -> Path:
    """Horizontal bars as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    most, height = max((value for _, value in bars), default=1.0), 40 + 34 * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="sans-serif" font-size="14">',
        f'<rect width="720" height="{height}" fill="white"/><text x="12" y="24" font-weight="bold">{title}</text>',
    ]
    for place, (label, value) in enumerate(bars):
        y, width = 40 + 34 * place, 400 * value / most
        colour = "#0b6e4f" if place == 0 else "#9aa5b1"
        parts.append(f'<text x="190" y="{y + 18}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="200" y="{y + 2}" width="{width:.1f}" height="24" fill="{colour}"/>')
        parts.append(f'<text x="{206 + width:.1f}" y="{y + 18}">{value:,.4g} {unit}</text>')
    path = folder / f"{name}.svg"
    path.write_text("\n".join([*parts, "</svg>", ""]))
    return path
