"""What the doctor examines of what the ledger says: what nobody takes back, what nobody can send,
what keeps a rule from its rate, and whether it is as old as the world.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta

from callqueue import conf, database, tables
from callqueue.database import ClockNow
from callqueue.ledger import ready_calls
from callqueue.limits.kinds import SECOND, Limit
from callqueue.look import RuleLook, words
from callqueue.look.doctor.facts import Facts, Wrong
from callqueue.texts import page

STUCK = timedelta(seconds=60)
MOST = 1000  # that are counted
ENOUGH = 0.9  # of what the limits allow: less than that is worth a word
AHEAD = timedelta(seconds=2)  # what lies further ahead than clocks differ lies in the future


def stuck_calls(facts: Facts) -> str:
    """Nothing that was released is past its lease: recovery would have taken it back."""
    overdue = tables.attempts(facts.using).open().filter(lease_until__lt=ClockNow() - STUCK)
    if count := len(overdue.values_list("pk", flat=True)[: MOST + 1]):
        shown = f"more than {MOST}" if count > MOST else str(count)
        raise Wrong(
            f"{shown} attempts are more than a minute past their lease",
            "run a dispenser or the task callqueue.recover_lost_calls; "
            "`manage.py callqueue_cleanup` recovers at once",
        )
    return "none"


def rules(facts: Facts) -> str:
    """No call waits under a rule that is gone."""
    known = conf.current().rules
    if gone := [name for name in ready_calls.rules_of_ready(facts.using) if name not in known]:
        raise Wrong(
            f"calls wait under rules that are gone: {', '.join(map(repr, gone))}",
            "put the rule back into CALLQUEUE['RULES'], or cancel its calls in the admin",
        )
    return "every waiting call has its rule"


def reach(facts: Facts) -> str:
    """No limit of what is in flight, or that waits for answers, keeps a rule from its rate."""
    found = [one for rule in facts.look.rules for one in _out_of_reach(rule)]
    if found:
        raise Wrong("; ".join(why for why, _ in found), "; ".join(todo for _, todo in found))
    return "answers are quick enough for every limit"


def _out_of_reach(rule: RuleLook) -> Iterator[tuple[str, str]]:
    """How little each limit that waits for answers lets through beside the slowest of the rule's
    rates, and what to do.
    """
    listed = [one.budget.limit for one in rule.limits]
    limits = [limit for limit in listed if limit.is_plain]
    rates = [limit.per_second for limit in limits if limit.per_second]
    latency = rule.pace.latency
    if not rates or not latency:
        return
    for limit in limits:
        ages_alone = limit.ages_unanswered and rule.pace.is_stamped
        window = 0.0 if limit.keeps_level else limit.window_us / SECOND
        most = limit.capacity / (window + latency)
        if not (limit.is_calendar or ages_alone) and most < ENOUGH * min(rates):
            why = (
                f"{rule.name}: calls take {words.duration(latency)} each, so {limit.label} lets "
                f"{most:.3g} a second through, and the rates allow {min(rates):.3g}"
            )
            yield why, _remedy(limit, rule.name, math.ceil(min(rates) * latency) + 1)


def _remedy(limit: Limit, name: str, wanted: int) -> str:
    """What to set, to let the rates be reached."""
    if limit.counts_in_flight:
        return f"if the provider allows it, set Concurrency({wanted}) in {name}"
    if limit.keeps_level:
        return f"if the provider allows it, give {limit.label} of {name} a burst of {wanted}"
    if limit.strict:
        return (
            f"leave strict=True out of {limit.label} of {name}, if the provider counts at arrival"
        )
    return f"{limit.label} of {name} waits for answers, without HTTP"


def time(facts: Facts) -> str:
    """The ledger is not older than the world: nothing in it lies ahead, and it knows what workers
    have at hand.

    A database that was put back to an earlier state (a backup, a lagging copy) does not know the
    latest calls, and would make their slots, and some of the calls, a second time.
    """
    if signs := [*_signs_of_the_future(facts.using), *_signs_of_the_past(facts)]:
        raise Wrong(
            "; ".join(signs),
            "run `manage.py callqueue_pause RULE --for` one full window for every rule "
            f"before anything goes out; see {page('how-to/upgrade.md')}",
        )
    return "nothing in it is in the future, and it knows every attempt of the workers"


def _signs_of_the_future(using: str) -> Iterator[str]:
    """What the ledger says has happened later than now."""
    ahead = database.clock(using) + AHEAD
    newest = tables.attempts(using).order_by("-pk").values_list("released_at", flat=True)[:100]
    if any(released_at > ahead for released_at in newest):
        yield "attempts were released in the future: the database's clock has been set back"
    if tables.dispensers(using).filter(seen_at__gt=ahead).exists():
        yield "dispensers were seen in the future: the database's clock has been set back"


def _signs_of_the_past(facts: Facts) -> Iterator[str]:
    """What has happened, and the ledger knows no more."""
    wanted = set(facts.workers.attempt_ids[:MOST])
    known = tables.attempts(facts.using).filter(pk__in=wanted).values_list("pk", flat=True)
    if unknown := wanted - set(known):
        yield (
            f"workers are making {len(unknown)} attempts that the ledger does not know: "
            "it was put back in time"
        )
    lately = ClockNow() - timedelta(hours=1)
    if held := tables.holds(facts.using).filter(source="restored", until__gt=lately).count():
        yield (
            f"a dispenser found its last sign of life gone and held {held} rules: "
            "the ledger was put back in time"
        )
