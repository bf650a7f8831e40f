"""callqueue_status: where every rule stands, once or as a table that follows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.core.management.base import CommandParser
from django.utils import timezone

from callqueue import states
from callqueue.look import HoldLook, Look, RuleLook, look, notes, words
from callqueue.look.limits import LimitLook
from callqueue.management.base import CallQueueCommand, printable, table, wrong_use
from callqueue.models import CallQueue

EVERY_S = 1.0
CLEAR = "\x1b[H\x1b[J"  # the cursor to the corner, and everything below it gone
HEADING = ("rule", "waiting", "in flight", "a second", "oldest due", "drained", "held")


class Command(CallQueueCommand):
    help = (
        "Say per rule what waits, what is in flight, "
        "what is used and free of every limit, holds, and the drain time."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        add("--json", action="store_true", help="one JSON document")
        add("--watch", action="store_true", help="show it again every second, until Ctrl-C")
        add("--call", type=int, metavar="ID", help="why this call waits, and for how long")

    def run(self, using: str, options: dict[str, Any]) -> None:
        if options["watch"] and options["json"]:
            raise wrong_use("--watch and --json cannot go together")
        if options["call"] is not None:
            self._say_call(using, options["call"], options["json"])
        elif options["json"]:
            self.say_json(as_json(look(using)))
        elif options["watch"]:
            self._watch(using)
        else:
            for line in _text_lines(look(using)):
                self.say(line)

    def _watch(self, using: str) -> None:
        try:
            while True:
                lines = [f"{timezone.localtime():%H:%M:%S}", *_text_lines(look(using))]
                clear = CLEAR if self.stdout.isatty() else ""
                self.write(clear + "\n".join(map(printable, lines)))
                time.sleep(EVERY_S)
        except KeyboardInterrupt:
            return

    def _say_call(self, using: str, pk: int, as_json: bool) -> None:
        call = CallQueue.objects.using(using).filter(pk=pk).first()
        if call is None:
            raise wrong_use(f"--call: there is no call {pk}")
        found, now = call.forecast(), timezone.now()
        if as_json:
            document = {"call": pk, "reason": found.reason, "position": found.position}
            self.say_json({**document, "release_at": _iso(found.release_at)})
        elif call.status in states.FINAL:
            ended = words.instant(call.finished_at_dt or now)
            answered = f", answered {call.answer.status}" if call.answer else ""
            why = f": {call.error_message}" if call.error_message else ""
            self.say(f"call {pk}: {call.get_status_display()} at {ended}{answered}{why}")
        else:
            place = f", number {found.position} in its rule" if found.position else ""
            is_waiting = call.status in states.WAITING
            goes = f"; it goes {_instant_in_words(found.release_at, now)}" if is_waiting else ""
            self.say(f"call {pk}{place}: {found.reason}{goes}")


# --- as JSON


def as_json(seen: Look) -> dict[str, Any]:
    return {
        "rules": {rule.name: _rule_as_json(rule) for rule in seen.rules},
        "dispensers": len(seen.dispensers),
        "last_dispenser_seen": _iso(seen.signs[0].at) if seen.signs else None,
        "disagreements": [
            {"limit": one.limit, "rules": list(one.rules), "said": {**one.said}}
            for one in seen.differences
        ],
        "notes": [{"kind": one.kind, "rule": one.rule, "text": one.text} for one in notes(seen)],
    }


def _rule_as_json(rule: RuleLook) -> dict[str, Any]:
    others = [one for one in rule.holds if one.per != "rule"]
    return {
        "state": rule.state,
        "waiting": rule.waits.calls,
        "in_flight": rule.flight.count,
        "oldest_due_s": _rounded(rule.oldest_due_s),
        "drain_s": _rounded(rule.drain_s()),
        "rate_per_s": round(rule.pace.per_second, 3),
        "incoming_per_s": round(rule.incoming, 3),
        "hold": _hold_as_json(rule.hold) if rule.hold and rule.hold.per == "rule" else None,
        "holds": [{"per": one.per, "value": one.value, **_hold_as_json(one)} for one in others],
        "keys_held": rule.keys_held,
        "limits": [_limit_as_json(one, rule) for one in rule.limits],
    }


def _limit_as_json(limit: LimitLook, rule: RuleLook) -> dict[str, Any]:
    return {
        "name": limit.name,
        "per": limit.budget.limit.per,
        "rate": limit.budget.limit.rate_text,
        "used": limit.used,
        "free": limit.free,
        "opens_at": None if limit.opens_at is None else _iso(rule.to_wall(limit.opens_at)),
        "note": limit.in_flight_note(rule.pace.latency),
    }


def _hold_as_json(hold: HoldLook) -> dict[str, str | None]:
    return {"until": _iso(hold.until), "reason": hold.reason}


def _iso(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


# --- as text


def _text_lines(seen: Look) -> Iterator[str]:
    heading, *rows = table(HEADING, [_rule_row(rule) for rule in seen.rules], right={1, 2, 3})
    yield heading
    for rule, row in zip(seen.rules, rows, strict=True):
        yield row
        yield from (_limit_line(one, rule.pace.latency) for one in rule.limits)
    yield from (note.text for note in notes(seen) if note.kind != "well")
    yield from (f"{difference}; all that any says holds" for difference in seen.differences)


def _rule_row(rule: RuleLook) -> list[str]:
    oldest, left = rule.oldest_due_s, rule.drain_s()
    drained = "no estimate" if left is None else words.from_now(left)
    return [
        rule.name,
        f"{rule.waits.calls}",
        f"{rule.flight.count}",
        f"{rule.pace.per_second:.1f}",
        "" if oldest is None else words.from_now(-oldest),
        drained if rule.waits.calls else "",
        _hold_in_words(rule),
    ]


def _limit_line(limit: LimitLook, latency: float) -> str:
    kind, told = limit.budget.limit, limit.in_flight_note(latency)
    rate = f" {kind.rate_text}" if kind.rate_text not in limit.name else ""
    per = f" per {kind.per}" if kind.per != "rule" and f"per {kind.per}" not in limit.name else ""
    note = f", {told}" if told else ""
    return f"    {limit.name}{rate}{per}: {limit.used} used, {limit.free} free{note}"


def _hold_in_words(rule: RuleLook) -> str:
    """The hold on the whole rule; else of those on keys and queues the longest, and how many."""
    hold = rule.hold or max(rule.holds, key=rule.seconds_left_of, default=None)
    if hold is None:
        return ""
    end = "resumed"
    if hold.until is not None:
        end = f"{words.instant(hold.until)} ({words.from_now(rule.seconds_left_of(hold))})"
    until = f"until {end}: {hold.reason}"
    if hold is rule.hold:
        return until
    count = max(len(rule.holds), rule.keys_held)
    more = f", and {count - 1} more" if count > 1 else ""
    return f"{hold.per} {hold.value}{more} {until}"


def _instant_in_words(instant: datetime | None, now: datetime) -> str:
    if instant is None:
        return "at a time that cannot be estimated"
    left = (instant - now).total_seconds()
    return "now" if left <= 0 else f"{words.from_now(left)} ({words.instant(instant)})"
