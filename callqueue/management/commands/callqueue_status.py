"""callqueue_status: where every rule stands, once or as a table that follows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from django.core.management.base import CommandParser
from django.utils import timezone

from callqueue import states
from callqueue.management.base import CallQueueCommand, wrong_use
from callqueue.management.table import table
from callqueue.models import CallQueue
from callqueue.operations import formatting
from callqueue.operations.status_report import overview
from callqueue.security.redaction import printable

EVERY = 1.0
CLEAR = "\x1b[H\x1b[J"  # the cursor to the corner, and everything below it gone
HEADING = ("rule", "waiting", "in flight", "a second", "oldest due", "drained", "held")


class Command(CallQueueCommand):
    help = (
        "Say per rule what waits, what is in flight, "
        "what is used and free of every limit, holds, and the drain time."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="one JSON document")
        parser.add_argument(
            "--watch", action="store_true", help="show it again every second, until Ctrl-C"
        )
        parser.add_argument(
            "--call", type=int, metavar="ID", help="why this call waits, and for how long"
        )

    def run(self, using: str, options: dict[str, Any]) -> None:
        if options["watch"] and options["json"]:
            raise wrong_use("--watch and --json cannot go together")
        if options["call"] is not None:
            self._forecast(using, options["call"], options["json"])
        elif options["json"]:
            self.say_json(overview(using))
        elif options["watch"]:
            self._watch(using)
        else:
            self._show(using)

    def _watch(self, using: str) -> None:
        try:
            while True:
                lines = [f"{timezone.localtime():%H:%M:%S}", *_lines(overview(using))]
                clear = CLEAR if self.stdout.isatty() else ""
                self.write(clear + "\n".join(map(printable, lines)))
                time.sleep(EVERY)
        except KeyboardInterrupt:
            return

    def _show(self, using: str) -> None:
        for line in _lines(overview(using)):
            self.say(line)

    def _forecast(self, using: str, pk: int, as_json: bool) -> None:
        call = CallQueue.objects.using(using).filter(pk=pk).first()
        if call is None:
            raise wrong_use(f"--call: there is no call {pk}")
        if call.status in states.FINAL and not as_json:
            self.say(_ended(call))
            return
        found = call.forecast()
        if as_json:
            release_at = found.release_at.isoformat() if found.release_at else None
            self.say_json(
                {
                    "call": pk,
                    "reason": found.reason,
                    "position": found.position,
                    "release_at": release_at,
                }
            )
            return
        place = f", number {found.position} in its rule" if found.position else ""
        goes = f"; it goes {_when(found.release_at)}" if call.status in states.WAITING else ""
        self.say(f"call {pk}{place}: {found.reason}{goes}")


def _ended(call: CallQueue) -> str:
    """What became of a call: its state, since when, the last answer's status, and why."""
    last = call.attempts.order_by("-number").values_list("number", "response_status").first()
    number, status = last or (0, None)
    counted = f"attempt {number}" + (f", answered {status}" if status else "") if last else ""
    facts = [f"{call.get_status_display()} {_at(call.finished_at_dt)}".strip()]
    facts += [f"({counted})"] if counted else []
    why = f": {call.error_message}" if call.error_message else ""
    return f"call {call.pk}: {' '.join(facts)}{why}"


def _lines(seen: Mapping[str, Any]) -> Iterator[str]:
    rows: list[list[str]] = []
    limits: dict[int, list[str]] = {}
    for name, rule in seen["rules"].items():
        rows.append([name, *_figures(rule)])
        limits[len(rows)] = [_limit(limit) for limit in rule["limits"]]
        limits[len(rows)] += _not_queued(rule["not_queued"])
    for number, line in enumerate(table(HEADING, rows, right={1, 2, 3})):
        yield line
        yield from limits.get(number, ())
    if not seen["dispensers"]:
        yield _silence(seen["last_dispenser_seen"])
    yield from map(_disagreement, seen["disagreements"])


def _silence(last: str | None) -> str:
    if last is None:
        return "no dispenser has been seen yet: nothing is sent until one runs"
    at = datetime.fromisoformat(last)
    ago = formatting.from_now((at - timezone.now()).total_seconds())
    return f"no dispenser runs (the last was seen {ago}): nothing is sent until one does"


def _disagreement(one: Mapping[str, Any]) -> str:
    said = "; ".join(f"{what} says {', '.join(who)}" for what, who in one["said"].items())
    return f"dispensers differ in limit {one['limit']} (all that any says holds): {said}"


def _figures(rule: Mapping[str, Any]) -> list[str]:
    return [
        f"{rule['waiting']}",
        f"{rule['in_flight']}",
        "" if rule["rate_per_s"] is None else f"{rule['rate_per_s']:.1f}",
        _ago(rule["oldest_due_s"]),
        _in(rule["drain_s"]) if rule["waiting"] else "",
        _held(rule),
    ]


def _limit(limit: Mapping[str, Any]) -> str:
    per = (
        f" per {limit['per']}"
        if limit["per"] != "rule" and f"per {limit['per']}" not in limit["name"]
        else ""
    )
    rate = f" {limit['rate']}" if str(limit["rate"]) not in limit["name"] else ""
    note = f", {limit['note']}" if limit["note"] else ""
    return f"    {limit['name']}{rate}{per}: {limit['used']} used, {limit['free']} free{note}"


def _not_queued(permits: Mapping[str, Any]) -> list[str]:
    """The calls that are not queued, where there are any."""
    if not permits["in_flight"] and not permits["waiting"]:
        return []
    labels = ", ".join(sorted(filter(None, permits["labels"])))
    told = f"    not queued: {permits['in_flight']} in flight, {permits['waiting']} waiting"
    return [f"{told} ({labels})" if labels else told]


def _held(rule: Mapping[str, Any]) -> str:
    """The hold on the whole rule; else those on keys and queues, the longest by its name."""
    if rule["hold"] is not None:
        return _until(rule["hold"])
    if not rule["holds"]:
        return ""
    longest = max(rule["holds"], key=lambda hold: hold["until"] or "~")
    more = f", and {len(rule['holds']) - 1} more" if len(rule["holds"]) > 1 else ""
    return f"{longest['per']} {longest['value']}{more} {_until(longest)}"


def _until(hold: Mapping[str, Any]) -> str:
    if not hold["until"]:
        return f"until resumed: {hold['reason']}"
    ends = datetime.fromisoformat(hold["until"])
    left = formatting.from_now((ends - timezone.now()).total_seconds())
    return f"until {_stamp(ends)} ({left}): {hold['reason']}"


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else formatting.from_now(-seconds)


def _in(seconds: float | None) -> str:
    return "no estimate" if seconds is None else formatting.from_now(seconds)


def _when(instant: datetime | None) -> str:
    if instant is None:
        return "at a time that cannot be estimated"
    seconds = (instant - timezone.now()).total_seconds()
    return "now" if seconds <= 0 else f"{formatting.from_now(seconds)} ({_stamp(instant)})"


def _at(instant: datetime | None) -> str:
    return f"at {_stamp(instant)}" if instant else ""


def _stamp(instant: datetime) -> str:
    return f"{timezone.localtime(instant):%Y-%m-%d %H:%M:%S %Z}"
