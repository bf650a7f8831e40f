"""callqueue_simulate: what draining a number of calls under a rule would take."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from callqueue import conf
from callqueue.clocks import Us
from callqueue.ledger import ledger_time, settings
from callqueue.ledger.tallies import is_tallied
from callqueue.limits.budgets import Budget, Cost
from callqueue.look import estimate, words
from callqueue.look.estimate import Gate
from callqueue.management.base import CallQueueCommand, with_noun, wrong_use


class Command(CallQueueCommand):
    help = (
        "Say how long a number of calls under a rule would take, "
        "from an idle start, with workers enough, and what limits them."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        add("--rule", required=True, metavar="R")
        add("--calls", required=True, type=int, metavar="N")
        add("--latency", type=float, default=0.2, help="seconds that the API takes to answer")
        add("--keys", type=int, default=1, metavar="N", help="spread over so many (default: 1)")
        add("--cost", default="1", help="of each call: calls, or unit=n, as in tokens=1500")
        add("--json", action="store_true", help="one JSON document")

    def run(self, using: str, options: dict[str, Any]) -> None:
        rule, calls, latency = options["rule"], options["calls"], options["latency"]
        if not 0 <= calls <= 10_000_000 or not 0 <= latency <= 86400 or options["keys"] < 1:
            raise wrong_use(
                "--calls is from 0 to 10,000,000, "
                "--latency from 0 to 86400 seconds, --keys at least 1"
            )
        conf.current().rule(rule)
        now, gates = _idle_gates(using, options)
        passed = estimate.seconds_to_pass(gates, calls, now) or 0.0
        place = estimate.place_of_slowest(gates, calls, now)
        binding = None if place is None else gates[place].limit.label
        seconds = round(passed + estimate.WAY_S + latency, 3) if calls else 0.0
        if options["json"]:
            found = {"rule": rule, "calls": calls, "seconds": seconds, "binding_limit": binding}
            self.say_json(found)
            return
        binds = f"the limit that binds is {binding}" if binding else "no limit binds"
        takes = "takes" if calls == 1 else "take"
        self.say(f"{with_noun(calls)} under {rule} {takes} {words.duration(seconds)}; {binds}")


def _idle_gates(using: str, options: dict[str, Any]) -> tuple[Us, list[Gate]]:
    """Now, and the rule's limits as if nothing was ever sent."""
    rule, calls, keys = options["rule"], options["calls"], options["keys"]
    reading = ledger_time.read(using)
    book = settings.book_in_force(using).moved_by(reading.moved)
    budgets, queues = book.budgets[rule], book.rules[rule].queue_names
    cost, sizes = _parse_cost(budgets, options["cost"]), [(-(-calls // keys), keys)]
    return reading.at, [
        Gate(
            limit := budget.limit,
            limit.meter_with(limit.capacity, reading.at),
            sizes=sizes if limit.is_keyed else (),
            lanes=len(queues) if limit.is_per_queue else 1,
            cost=charge,
            charged_s=estimate.seconds_charged(
                limit, options["latency"], is_told=not is_tallied(limit)
            ),
        )
        for budget in budgets
        if (charge := budget.charge_of(cost))
    ]


def _parse_cost(budgets: tuple[Budget, ...], text: str) -> Cost:
    unit, _, amount = text.rpartition("=")
    if not amount.isdecimal():
        raise wrong_use(f"--cost: {text!r} is neither a whole number nor unit=n")
    if unit and unit not in {budget.limit.unit for budget in budgets}:
        raise wrong_use(f"--cost: no limit of the rule counts {unit!r}")
    cost: Cost = {unit: int(amount)} if unit else int(amount)
    for budget in budgets:
        if (charge := budget.charge_of(cost)) > budget.limit.capacity:
            allowed = f"{budget.limit.label} allows {budget.limit.capacity}"
            raise wrong_use(f"--cost: {charge} could never be admitted: {allowed}")
    return cost
