"""`python -m tests.benchmarks [what ...]` prints the tables of docs/explanation/performance.md."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pkgutil import resolve_name

PLACES = {
    "throughput": "rates",
    "latency": "rates",
    "flat": "tables",
    "dashboard": "tables",
    "parts": "costs",
    "permits": "costs",
    "exact": "answers",
    "slots": "answers",
}
USUAL = ["throughput", "latency", "flat"]
OPTIONS = [
    ("calls", 10_000, "of `throughput` and `parts`"),
    ("sends", 100, "calls sent one at a time for `latency`"),
    ("rounds", 3, "of `throughput`"),
    ("waiting", 1_000_000, "calls waiting, for `flat`"),
    ("keys", 10_000, "of calls waiting, for `flat`"),
    ("counted", 300_000, "attempts in a window of a day, for `flat`"),
    ("rows", 1_000_000, "calls, and as many attempts, for `dashboard`"),
    ("drain", 20.0, "seconds that each backlog of `exact` takes"),
]


def main() -> None:
    """Parse, measure what was asked for, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    usual = f"of {', '.join(PLACES)}; by default {', '.join(USUAL)}"
    parser.add_argument("what", nargs="*", help=usual)
    for name, value, told in OPTIONS:
        parser.add_argument(f"--{name}", type=type(value), default=value, help=told)
    parser.add_argument("--only", nargs="*", help="contestants of `throughput`, rows of `slots`")
    options = parser.parse_args()
    if unknown := set(options.what) - PLACES.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; it is {usual}")
    for what in options.what or USUAL:
        measure = resolve_name(f"tests.benchmarks.{PLACES[what]}:{what}")
        print(f"{what}\n\n{table(measure(options))}\n")


def table(rows: Sequence[Sequence[str]]) -> str:
    """In Markdown, the first row as its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in [rows[0], ["-" * width for width in widths], *rows[1:]]:
        aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *aligned])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
