"""`python -m tests.benchmarks [what ...]`: measures, prints tables with ratios, and writes JSON into
bench-out/.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.stage import OUT


@dataclass(frozen=True)
class Experiment:
    """A room of this package: the options that its `measure` takes, and by the heads of its table the
    figure that stands there, with its format. Its command is told with the options in `told`.
    """

    title: str
    takes: tuple[str, ...]
    columns: dict[str, str]
    told: tuple[str, ...] = ()

    def rows(self, found: Any) -> list[list[str]]:
        if isinstance(found, dict):
            found = [{"name": name, **one} for name, one in found.items()]
        return [[_cell(one, column) for column in self.columns.values()] for one in found]


def _cell(one: dict[str, Any], column: str) -> str:
    name, _, form = column.partition(":")
    value = one.get(name)
    if isinstance(value, dict):
        return ", ".join(f"{part} {format(figure, form)}" for part, figure in value.items())
    return "" if value is None else format(value, form)


MS = {"median ms": "median:.1f", "p95 ms": "p95:.1f", "worst ms": "worst:.1f"}
EXPERIMENTS = {
    "throughput": Experiment("Throughput", ("calls", "rounds", "only"), {
        "": "name", "calls/s": "rate:,.0f", "callqueue is x": "ratio:.2f", "CPU ms a call": "cpu_ms:.2f",
        "of which": "cpu_parts:.2f", "the API's CPU ms": "api_cpu_ms:.2f",
    }),
    "latency": Experiment("Latency", ("sends", "only"), {
        "from send to the wire, idle": "name", **MS,
    }),
    "flat": Experiment("Flat", ("waiting", "keys", "counted"), {
        "a pass, median": "what", "small ms": "small_ms:.2f", "large ms": "large_ms:.2f", "ratio": "ratio:.2f",
    }),
    "parts": Experiment("Parts of a call", ("calls",), {
        "one process, full messages": "name", "CPU ms": "cpu_ms:.3f", "wall ms": "wall_ms:.3f",
    }),
    "exact": Experiment("Exact", ("drain",), {
        "limit": "name", "most in a window": "highest", "of": "limit", "share used": "share:.3f",
    }, ("drain",)),
    "slots": Experiment("Slow answers", ("only",), {
        "four slots": "name", "slow calls sent": "sent:,", "most in flight": "in_flight:,",
        "wait for a slot, p95 ms": "slot_p95_ms:,.0f", "memory, MB": "memory_mb",
    }),
    "dashboard": Experiment("Dashboard", ("rows",), {
        "as many attempts, 250 rules": "what", "median ms": "median_ms:.0f",
    }, ("rows",)),
    "permits": Experiment("Permits", (), {"until it may go": "name", **MS, "median ms": "median:.3f"}),
}  # fmt: skip
USUAL = ["throughput", "latency", "flat"]


def main() -> None:
    """Parse, measure what was asked for, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    usual = f"of {', '.join(EXPERIMENTS)}; by default {', '.join(USUAL)}"
    parser.add_argument("what", nargs="*", help=usual)
    for name, value, told in (
        ("calls", 10_000, "of `throughput` and `parts`"),
        ("sends", 100, "calls sent one at a time for `latency`"),
        ("rounds", 3, "of `throughput`"),
        ("waiting", 1_000_000, "calls waiting, for `flat`"),
        ("keys", 10_000, "of calls waiting, for `flat`"),
        ("counted", 300_000, "attempts in a window of a day, for `flat`"),
        ("rows", 1_000_000, "calls, and as many attempts, for `dashboard`"),
        ("drain", 20.0, "seconds that each backlog of `exact` takes"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=told)
    parser.add_argument("--only", nargs="*", help="contestants of `throughput`, rows of `slots`")
    options = parser.parse_args()
    if unknown := set(options.what) - EXPERIMENTS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; it is {usual}")
    for what in options.what or USUAL:
        made = EXPERIMENTS[what]
        room = import_module(f"tests.benchmarks.{what}")
        found = room.measure(*(getattr(options, name) for name in made.takes))
        given = "".join(f" --{name} {getattr(options, name):g}" for name in made.told)
        command = f"python -m tests.benchmarks {what}{given}"
        print(report.table(made.title, list(made.columns), made.rows(found), command))
        report.save(OUT, what, found)


if __name__ == "__main__":
    main()
