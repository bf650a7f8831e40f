"""`python -m tests.benchmarks [what ...]`: measures, prints tables with ratios, and writes JSON into
bench-out/.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.stage import OUT

Rows = list[list[str]]
Measured = tuple[str, list[str], Rows, Any]  # title, head, rows, and the figures to keep


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
        measure, *own = EXPERIMENTS[what]
        title, head, rows, found = measure(options)
        given = "".join(f" --{name} {getattr(options, name):g}" for name in own)
        print(report.table(title, head, rows, f"python -m tests.benchmarks {what}{given}"))
        report.save(OUT, what, found)


def _of(one: dict[str, Any], **forms: str) -> list[str]:
    return [format(one[name], form) for name, form in forms.items()]


def throughput(options: argparse.Namespace) -> Measured:
    from tests.benchmarks import throughput as room
    from tests.benchmarks.contestants import ALL

    found: dict[str, Any] = room.measure(options.calls, options.rounds, options.only or list(ALL))
    ours = found.get("callqueue", {}).get("rate")
    rows = [
        [
            one["name"],
            f"{one['rate']:,.0f}",
            f"{ours / one['rate']:.2f}" if ours else "",
            f"{one['cpu_ms']:.2f}",
            ", ".join(f"{role} {ms:.2f}" for role, ms in one["cpu_parts"].items()),
            f"{one['api_cpu_ms']:.2f}",
        ]
        for one in found.values()
    ]
    head = ["", "calls/s", "callqueue is x", "CPU ms a call", "of which", "the API's CPU ms"]
    return "Throughput", head, rows, found


def latency(options: argparse.Namespace) -> Measured:
    from tests.benchmarks import latency as room
    from tests.benchmarks.contestants import ALL

    found = room.measure(options.sends, options.only or list(ALL))
    rows = [_of(one, name="", median=".1f", p95=".1f", worst=".1f") for one in found.values()]
    head = ["from send to the wire, idle", "median ms", "p95 ms", "worst ms"]
    return "Latency", head, rows, found


def flat(options: argparse.Namespace) -> Measured:
    from tests.benchmarks import flat as room

    found = room.measure(options.waiting, options.keys, options.counted)
    rows = [
        [
            *_of(one, what="", small_ms=".2f", large_ms=".2f"),
            f"{one['large_ms'] / one['small_ms']:.2f}",
            " and ".join(_of(one, small_statements=".0f", large_statements=".0f")),
        ]
        for one in found.values()
    ]
    return "Flat", ["a pass, median", "small ms", "large ms", "ratio", "statements"], rows, found


def parts(options: argparse.Namespace) -> Measured:
    from tests.benchmarks import parts as room

    found = room.measure(options.calls)
    figures = {"cpu_ms": "{:.3f}", "wall_ms": "{:.3f}", "functions": "{:.0f}", "modules": "{:.0f}"}
    rows = [
        [name, *(form.format(one[of]) if of in one else "" for of, form in figures.items())]
        for name, one in found.items()
    ]
    head = ["one process, full messages", "CPU ms", "wall ms", "functions called", "modules"]
    return "Parts of a call", head, rows, found


def exact(options: argparse.Namespace) -> Measured:
    from tests.benchmarks import exact as room

    found = room.measure(options.drain)
    rows = [
        [
            one["name"],
            f"{one['highest']} of {one['limit']}",
            *_of(one, share=".3f", goal=".2f", of_bound=".3f"),
            f"{one['requests'] / one['calls']:.3g}",
            f"{one['tasks_per_call']:.2f}",
        ]
        for one in found
    ]
    head = ["a backlog", "most in a window", "share used", "goal", "of W/(W + jitter)"]
    return "Exact", [*head, "requests a call", "messages a call"], rows, found


def slots(options: argparse.Namespace) -> Measured:
    from tests.benchmarks import slots as room

    def three(values: list[float] | None) -> str:
        return "" if values is None else ", ".join(f"{value:,.0f}" for value in values)

    found = room.measure(options.only)
    rows = [
        [
            *_of(one, name="", sent=",", in_flight=","),
            three(one["slot_ms"]),
            three(one["to_wire_ms"]),
            *_of(one, fast_alone_p95_ms=",.0f", fast_beside_p95_ms=",.0f"),
            *_of(one, memory_mb="", connections="", cpu_share=".0%"),
        ]
        for one in found
    ]
    head = ["four slots", "slow calls sent", "most in flight", "wait for a slot, ms"]
    head += ["send to wire, ms", "fast alone, p95 ms", "beside, p95 ms", "memory, MB"]
    head += ["connections", "CPU of a core"]
    return "Slow answers (p50, p95, most)", head, rows, found


def dashboard(options: argparse.Namespace) -> Measured:
    from tests.benchmarks import dashboard as room

    found = room.measure(options.rows)
    rows = [
        [
            *_of(
                one, what="", median_ms=".0f", worst_ms=".0f", database_ms=".0f", statements=".0f"
            ),
            f"{one['bytes'] / 1000:.0f}" if one["bytes"] else "",
        ]
        for one in found.values()
    ]
    size = f"{options.rows:,} calls, as many attempts, 250 rules"
    head = [size, "median ms", "worst ms", "of it the database", "statements", "kB"]
    return "Dashboard", head, rows, found


def permits(options: argparse.Namespace) -> Measured:
    from tests.benchmarks import permits as room

    found = room.measure()
    rows = [[name, *_of(one, median=".3f", p95=".3f", worst=".2f")] for name, one in found.items()]
    head = ["until it may go", "median ms", "p95 ms", "worst ms"]
    return "Permits", head, rows, found


# each with the options that its command is told with
EXPERIMENTS: dict[str, tuple[Callable[[argparse.Namespace], Measured], *tuple[str, ...]]] = {
    "throughput": (throughput,),
    "latency": (latency,),
    "flat": (flat,),
    "parts": (parts,),
    "exact": (exact, "drain"),
    "slots": (slots,),
    "dashboard": (dashboard, "rows"),
    "permits": (permits,),
}
USUAL = ["throughput", "latency", "flat"]

if __name__ == "__main__":
    main()
