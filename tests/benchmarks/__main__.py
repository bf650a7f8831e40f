"""`python -m tests.benchmarks [what ...]`: measures, prints tables with ratios, and writes JSON and
a plot into bench-out/.
"""

from __future__ import annotations

import argparse
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.stage import OUT


def main() -> None:
    """Parse, measure what was asked for, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "what", nargs="*", help=f"of {', '.join(EXPERIMENTS)}; by default {', '.join(USUAL)}"
    )
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument(
        "--sends", type=int, default=100, help="calls sent one at a time for the latency table"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--waiting", type=int, default=1_000_000, help="calls waiting, for the table of flatness"
    )
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument(
        "--counted", type=int, default=300_000, help="attempts in a window of a day"
    )
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="calls, and as many attempts, for `dashboard`"
    )
    parser.add_argument("--share", type=float, default=0.1, help="of the full size of `million`")
    parser.add_argument(
        "--drain", type=float, default=20, help="seconds that each backlog of `exact` takes"
    )
    parser.add_argument(
        "--only", nargs="*", help="contestants of the throughput table, rows of `slots`"
    )
    options = parser.parse_args()
    if unknown := set(options.what) - EXPERIMENTS.keys():
        parser.error(
            f"there is no {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}"
        )
    for what in options.what or USUAL:
        EXPERIMENTS[what](options)


def throughput(options: argparse.Namespace) -> None:
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
    _show("throughput", "Throughput", head, rows, found)
    report.plot(
        OUT,
        "throughput",
        "Calls per second, end to end",
        [(o["name"], o["rate"]) for o in found.values()],
        "calls/s",
    )


def latency(options: argparse.Namespace) -> None:
    from tests.benchmarks import latency as room
    from tests.benchmarks.contestants import ALL

    found = room.measure(options.sends, options.only or list(ALL))
    rows = [
        [one["name"], f"{one['median']:.1f}", f"{one['p95']:.1f}", f"{one['worst']:.1f}"]
        for one in found.values()
    ]
    head = ["from send to the wire, idle", "median ms", "p95 ms", "worst ms"]
    _show("latency", "Latency", head, rows, found)


def flat(options: argparse.Namespace) -> None:
    from tests.benchmarks import flat as room

    found = room.measure(options.waiting, options.keys, options.counted)
    rows = [
        [
            one["what"],
            f"{one['small_ms']:.2f}",
            f"{one['large_ms']:.2f}",
            f"{one['large_ms'] / one['small_ms']:.2f}",
            f"{one['small_statements']:.0f} and {one['large_statements']:.0f}",
        ]
        for one in found.values()
    ]
    head = ["a pass, median", "small ms", "large ms", "ratio", "statements"]
    _show("flat", "Flat", head, rows, found)


def sending(options: argparse.Namespace) -> None:
    from tests.benchmarks import sending as room

    found = room.measure()
    rows = [
        [
            f"{ours} against {theirs}",
            f"{found[theirs]:.3f}",
            f"{found[ours]:.3f}",
            f"{found[ours] / found[theirs]:.2f}",
        ]
        for ours, theirs in (("send", "create"), ("send_many", "bulk_create"))
    ]
    _show("sending", "Sending", ["", "Django's ms", "ours ms", "ratio"], rows, found)
    print(f"send_many: {1000 / found['send_many']:,.0f} rows/s\n")


def parts(options: argparse.Namespace) -> None:
    from tests.benchmarks import parts as room

    found = room.measure(options.calls)
    figures = {"cpu_ms": "{:.3f}", "wall_ms": "{:.3f}", "functions": "{:.0f}", "modules": "{:.0f}"}
    rows = [
        [name, *(form.format(one[of]) if of in one else "" for of, form in figures.items())]
        for name, one in found.items()
    ]
    shares = [room.share_of_counting(found, of) for of in list(figures)[:3]]
    rows.append(["counting's share of a call", *(f"{share:.1%}" for share in shares), ""])
    heads = ["one process, full messages", "CPU ms", "wall ms", "functions called", "modules"]
    _show("parts", "Parts of a call", heads, rows, found)


def exact(options: argparse.Namespace) -> None:
    from tests.benchmarks import exact as room

    found = room.measure(options.drain)
    rows = [
        [
            one["name"],
            f"{one['highest']} of {one['limit']}",
            f"{one['share']:.3f}",
            f"{one['goal']:.2f}",
            f"{one['of_bound']:.3f}",
            f"{one['requests'] / one['calls']:.3g}",
            f"{one['tasks_per_call']:.2f}",
        ]
        for one in found
    ]
    head = [
        "a backlog",
        "most in a window",
        "share used",
        "goal",
        "of W/(W + jitter)",
        "requests a call",
        "messages a call",
    ]
    _show("exact", "Exact", head, rows, found, f"--drain {options.drain:g}")


def slots(options: argparse.Namespace) -> None:
    from tests.benchmarks import slots as room

    found = room.measure(options.only)
    rows = [
        [
            one["name"],
            f"{one['sent']:,}",
            f"{one['in_flight']:,}",
            _three(one["slot_ms"]),
            _three(one["to_wire_ms"]),
            f"{one['fast_alone_p95_ms']:,.0f}",
            f"{one['fast_beside_p95_ms']:,.0f}",
            str(one["memory_mb"]),
            str(one["connections"]),
            f"{one['cpu_share']:.0%}",
        ]
        for one in found
    ]
    head = [
        "four slots",
        "slow calls sent",
        "most in flight",
        "wait for a slot, ms",
        "send to wire, ms",
        "fast alone, p95 ms",
        "beside, p95 ms",
        "memory, MB",
        "connections",
        "CPU of a core",
    ]
    _show("slots", "Slow answers (p50, p95, most)", head, rows, found)


def _three(values: list[float] | None) -> str:
    return "" if values is None else ", ".join(f"{value:,.0f}" for value in values)


def dashboard(options: argparse.Namespace) -> None:
    from tests.benchmarks import dashboard as room

    found = room.measure(options.rows)
    rows = [
        [
            one["what"],
            f"{one['median_ms']:.0f}",
            f"{one['worst_ms']:.0f}",
            f"{one['database_ms']:.0f}",
            f"{one['statements']:.0f}",
            f"{one['bytes'] / 1000:.0f}" if one["bytes"] else "",
        ]
        for one in found.values()
    ]
    head = [
        f"{options.rows:,} calls, as many attempts, 250 rules",
        "median ms",
        "worst ms",
        "of it the database",
        "statements",
        "kB",
    ]
    _show("dashboard", "Dashboard", head, rows, found, f"--rows {options.rows}")


def million(options: argparse.Namespace) -> None:
    from tests.benchmarks import scale

    found = scale.million(options.share)
    size, after, second = (
        sum(found[name].values()) / 1e6 for name in ("sizes", "sizes_after_cleanup", "sizes_second")
    )
    rows = [
        *_of_drain(found["first"]),
        [
            "tables, MB: after the run, cleaned and vacuumed, after as many again",
            f"{size:,.0f}, {after:,.0f}, {second:,.0f}",
        ],
        ["growth by the second run", f"{found['growth']:.2f}"],
        [
            "cleanup, rows a second, while calls went on",
            f"{found['cleanup']['rows_per_second']:,.0f}",
        ],
        [
            "p95 of a call before and during cleanup, ms",
            "{p95_before_ms:.0f}, {p95_meanwhile_ms:.0f}".format(**found["cleanup"]),
        ],
    ]
    title = f"{found['calls']:,} calls through 24 rules of {found['rate']}/s on 24 queues"
    _show("million", title, ["", ""], rows, found, f"--share {options.share}")


def _show(
    what: str, title: str, head: list[str], rows: list[list[str]], found: Any, arguments: str = ""
) -> None:
    """Print the table, with the command that measures it, and keep the figures."""
    command = f"python -m tests.benchmarks {what} {arguments}".rstrip()
    print(report.table(title, head, rows, command))
    report.save(OUT, what, found)


def _of_drain(found: dict[str, Any]) -> list[list[str]]:
    memory = found["memory_mb"]
    flat = (
        ", ".join(f"{name} {memory[0][name]:.0f} to {memory[-1][name]:.0f}" for name in memory[0])
        if memory
        else "too short"
    )
    return [
        ["seconds, calls a second", f"{found['seconds']:.0f}, {found['rate']:,.0f}"],
        ["the most calls of a rule in any second", str(found["highest_in_a_second"])],
        ["CPU ms a call", ", ".join(f"{role} {ms:.2f}" for role, ms in found["cpu_ms"].items())],
        ["PostgreSQL's share of one core", f"{found['postgresql_cpu_share']:.0%}"],
        ["memory, MB", flat],
    ]


def permits(options: argparse.Namespace) -> None:
    from tests.benchmarks import permits as room

    found, waits = room.measure()
    rows = [
        [name, f"{one['median']:.3f}", f"{one['p95']:.3f}", f"{one['worst']:.2f}"]
        for name, one in found.items()
    ]
    _show("permits", "Permits", ["until it may go", "median ms", "p95 ms", "worst ms"], rows, found)
    rows = [[name, f"{one['asked']:.1f}", f"{one['granted']:.1f}"] for name, one in waits.items()]
    head = ["", "statements a second of each", "granted a second"]
    _show("permits", "Permits that wait", head, rows, {**found, "waits": waits})


EXPERIMENTS = {
    "throughput": throughput,
    "latency": latency,
    "flat": flat,
    "sending": sending,
    "parts": parts,
    "exact": exact,
    "slots": slots,
    "dashboard": dashboard,
    "million": million,
    "permits": permits,
}
USUAL = ["throughput", "latency", "flat", "sending"]

if __name__ == "__main__":
    main()
