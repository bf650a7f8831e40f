"""callqueue_simulate: what draining a number of calls under a rule would take."""

from __future__ import annotations

from collections.abc import Set
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandParser

from callqueue import conf, database
from callqueue.ledger import agreement
from callqueue.limits.simulation import simulate
from callqueue.management.base import CallQueueCommand, counted, wrong_use
from callqueue.operations import latency as pacing


class Command(CallQueueCommand):
    help = (
        "Say how long a number of calls under a rule would take, "
        "from an idle start, with workers enough, and what limits them."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--rule", required=True, metavar="R")
        parser.add_argument("--calls", required=True, type=int, metavar="N")
        parser.add_argument(
            "--latency",
            type=float,
            default=0.2,
            metavar="0.2",
            help="seconds that the API takes to answer",
        )
        parser.add_argument(
            "--keys", type=int, default=1, metavar="N", help="spread over so many keys (default: 1)"
        )
        parser.add_argument(
            "--cost",
            default="1",
            metavar="1",
            help="of each call: calls, or unit=n, as in tokens=1500",
        )
        parser.add_argument("--json", action="store_true", help="one JSON document")

    def run(self, using: str, options: dict[str, Any]) -> None:
        rule, calls, latency = options["rule"], options["calls"], options["latency"]
        if not 0 <= calls <= 10_000_000 or not 0 <= latency <= 86400 or options["keys"] < 1:
            raise wrong_use(
                "--calls is from 0 to 10,000,000, "
                "--latency from 0 to 86400 seconds, --keys at least 1"
            )
        conf.current().rule(rule)
        book = agreement.book_in_force(using)
        units = {budget.limit.unit for budget in book.budgets.get(rule, ())}
        start = database.to_us(database.clock(using))
        delivery, notice = pacing.observed(using)
        try:
            found = simulate(
                book,
                rule,
                calls,
                latency=latency,
                start=start,
                cost=_cost(options["cost"], units),
                keys=options["keys"],
                delivery=delivery,
                notice=notice,
            )
        except ValueError as error:
            raise wrong_use(f"--cost: {error}") from None
        if options["json"]:
            seconds = round(found.seconds, 3)
            self.say_json(
                {
                    "rule": rule,
                    "calls": calls,
                    "seconds": seconds,
                    "binding_limit": found.binding_limit,
                }
            )
            return
        binds = (
            f"the limit that binds is {found.binding_limit}"
            if found.binding_limit
            else "no limit binds"
        )
        takes = "takes" if calls == 1 else "take"
        self.say(f"{counted(calls)} under {rule} {takes} {_length(found.seconds)}; {binds}")


def _length(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{timedelta(seconds=round(seconds))} (h:mm:ss)"


def _cost(text: str, units: Set[str]) -> Any:
    unit, _, amount = text.rpartition("=")
    if not amount.isdecimal():
        raise ValueError(f"{text!r} is neither a whole number nor unit=n")
    if unit and unit not in units:
        raise ValueError(f"no limit of the rule counts {unit!r}")
    return {unit: int(amount)} if unit else int(amount)
