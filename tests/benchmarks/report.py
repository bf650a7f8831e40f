"""What a benchmark says: progress while it runs, a table at the end, and its figures as JSON."""

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


def quantiles(waits: Sequence[float], *shares: float) -> list[float]:
    """The waits that so large shares of them do not exceed; none of none."""
    ordered = sorted(waits)
    return [ordered[min(len(ordered) - 1, int(len(ordered) * one))] for one in shares if ordered]
