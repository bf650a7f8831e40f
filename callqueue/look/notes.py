"""What an operator should be told, worst first: one list of judgements for every door."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from django.utils.translation import gettext as _
from django.utils.translation import ngettext, ngettext_lazy

from callqueue.limits.kinds import SECOND
from callqueue.look import words
from callqueue.look.model import Look, RuleLook

BEHIND_S = 120  # sums that end longer ago say nothing of the last hour
LONG_S = 60  # a limit that opens later than that is worth a sentence

BAD, ODD, WELL = "bad", "odd", "well"
TROUBLES = {
    "held": ngettext_lazy(
        "%(count)d rule held (%(names)s).", "%(count)d rules held (%(names)s).", "count"
    ),
    "failing": ngettext_lazy(
        "%(count)d rule is failing (%(names)s).",
        "%(count)d rules are failing (%(names)s).",
        "count",
    ),
    "stuck": ngettext_lazy(
        "Nothing is sent of %(count)d rule, though calls are due (%(names)s).",
        "Nothing is sent of %(count)d rules, though calls are due (%(names)s).",
        "count",
    ),
}


@dataclass(frozen=True)
class Note:
    """A sentence: how bad it is, what it is about, and the rule that it speaks of first."""

    kind: str
    what: str
    text: str
    rule: str = ""


def notes(look: Look, *, tells_who: bool = True) -> list[Note]:
    """The notes, worst first. That a rule is held is always said; by whom, only if `tells_who`."""
    order = (BAD, ODD, WELL)
    return sorted(_unsorted_notes(look, tells_who), key=lambda note: order.index(note.kind))


def _unsorted_notes(look: Look, tells_who: bool) -> Iterator[Note]:
    yield _note_on_dispensers(look)
    yield from _notes_on_stalls(look)
    yield from _notes_on_troubles(look, tells_who)
    yield from _notes_on_limits(look)
    yield from _notes_on_failures(look)
    if count := len(look.differences):
        text = ngettext("Dispensers differ in %d limit.", "Dispensers differ in %d limits.", count)
        yield Note(ODD, "differ", text % count)
    yield from _notes_on_workers(look)
    if look.dispensers:
        rate = sum(rule.pace.per_second for rule in look.rules)
        yield Note(WELL, "sending", _("Sending %s a second.") % words.rate(rate))
    yield _note_on_end(look)


def _note_on_dispensers(look: Look) -> Note:
    now = look.wall_time
    if running := look.dispensers:
        text = ngettext(
            "%(count)d dispenser, seen %(when)s.",
            "%(count)d dispensers, seen %(when)s.",
            len(running),
        )
        values = {"count": len(running), "when": words.ago(running[0].at, now)}
        return Note(WELL, "dispenser", text % values)
    if not look.signs:
        text = _(
            "No dispenser has been seen yet: nothing is sent until one runs (callqueue_dispenser)."
        )
        return Note(BAD, "dispenser", text)
    last = look.signs[0]
    host, colon, pid = last.name.rpartition(":")
    text = _(
        "No dispenser runs: the last one was seen %(when)s, at %(at)s, on %(where)s. "
        "Nothing is sent until one runs."
    )
    values = {
        "when": words.ago(last.at, now),
        "at": words.clock_time(last.at, now),
        "where": f"{host} (pid {pid})" if colon else last.name,
    }
    return Note(BAD, "dispenser", text % values)


def _notes_on_stalls(look: Look) -> Iterator[Note]:
    names = {rule.name for rule in look.rules}
    stalls = [one for one in look.stalls if names.intersection(one.rules)]
    if not stalls:
        return
    rules = sorted({rule for one in stalls for rule in one.rules})
    calls = sum(one.calls for one in stalls)
    since = look.to_wall(min(one.since for one in stalls))
    text = ngettext(
        "Nobody takes calls from %(queues)s since %(since)s: %(count)s call of %(rules)s is "
        "released, and no worker has begun it.",
        "Nobody takes calls from %(queues)s since %(since)s: %(count)s calls of %(rules)s are "
        "released, and no worker has begun them.",
        calls,
    )
    values = {
        "queues": words.join_names([one.queue or _("the default queue") for one in stalls], 10),
        "since": words.clock_time(since, look.wall_time),
        "count": words.count(calls),
        "rules": words.join_names(rules),
    }
    yield Note(BAD, "workers", text % values, rules[0])


def _notes_on_troubles(look: Look, tells_who: bool) -> Iterator[Note]:
    for trouble, sentence in TROUBLES.items():
        if ill := [rule for rule in look.rules if trouble in rule.troubles]:
            is_long = trouble == "held"
            said = [_held_rule_in_words(rule, tells_who) if is_long else rule.name for rule in ill]
            listed = words.join_names(said, between="; " if is_long else ", ")
            values = {"count": len(ill), "names": listed}
            yield Note(BAD, trouble, sentence % values, ill[0].name)
    if keyed := [rule for rule in look.rules if rule.keys_held and rule.hold is None]:
        count = sum(rule.keys_held for rule in keyed)
        text = ngettext(
            "%(count)d key held (%(names)s).", "%(count)d keys held (%(names)s).", count
        )
        values = {"count": count, "names": words.join_names([rule.name for rule in keyed])}
        yield Note(ODD, "keys", text % values, keyed[0].name)
    if growing := [rule for rule in look.rules if rule.is_growing and not rule.troubles]:
        listed = words.join_names([_flow_in_words(rule) for rule in growing], between="; ")
        yield Note(ODD, "growing", _("The backlog grows: %s.") % listed, growing[0].name)


def _held_rule_in_words(rule: RuleLook, tells_who: bool) -> str:
    count = words.count(rule.waits.calls)
    if not tells_who:
        return _("%(rule)s, %(count)s waiting") % {"rule": rule.name, "count": count}
    who = {
        "breaker": _("by its breaker"),
        "operator": _("by an operator"),
        "provider": _("by the provider"),
        "restored": _("since the database was restored"),
    }.get(rule.hold.source if rule.hold else "", "")
    values = {"rule": rule.name, "who": who, "count": count}
    return _("%(rule)s %(who)s, %(count)s waiting") % values


def _flow_in_words(rule: RuleLook) -> str:
    values = {
        "rule": rule.name,
        "in": words.rate(rule.incoming),
        "out": words.rate(rule.pace.per_second),
    }
    return _("%(rule)s, %(in)s a second in and %(out)s out") % values


def _notes_on_limits(look: Look) -> Iterator[Note]:
    told: set[str] = set()
    for rule in look.rules:
        limit = rule.binding
        if rule.state != "at_limit" or limit is None or limit.budget.id in told:
            continue
        told.add(limit.budget.id)
        if limit.opens_at is None or limit.opens_at - look.now < LONG_S * SECOND:
            continue
        at = words.clock_time(look.to_wall(limit.opens_at), look.wall_time)
        text = _("%(rule)s: %(limit)s is used up, and opens at %(at)s.")
        values = {"rule": rule.name, "limit": limit.name, "at": at}
        yield Note(ODD, "limit", text % values, rule.name)


def _notes_on_failures(look: Look) -> Iterator[Note]:
    failed = sum(rule.recent.hour.failed for rule in look.rules)
    throttled = sum(rule.recent.hour.throttled for rule in look.rules)
    is_behind = 0 < look.summed_until < look.now - BEHIND_S * SECOND
    if is_behind:
        at = words.clock_time(look.to_wall(look.summed_until), look.wall_time)
        yield Note(ODD, "behind", _("What was sent is counted up to %s.") % at)
    if failed or throttled:
        values = {"failed": words.count(failed), "throttled": words.count(throttled)}
        text = _("%(failed)s attempts failed and %(throttled)s were throttled in the last hour.")
        yield Note(ODD, "failures", text % values)
    elif look.summed_until and not is_behind:
        text = _("Nothing failed and nothing was throttled in the last hour.")
        yield Note(WELL, "failures", text)


def _notes_on_workers(look: Look) -> Iterator[Note]:
    if count := len(look.workers):
        text = ngettext(
            "%(count)d process took calls in the last 5 minutes, the last %(when)s.",
            "%(count)d processes took calls in the last 5 minutes, the last %(when)s.",
            count,
        )
        when = words.ago(look.to_wall(look.workers[0]), look.wall_time)
        yield Note(WELL, "workers", text % {"count": count, "when": when})


def _note_on_end(look: Look) -> Note:
    ends = {rule.name: rule.drain_s() for rule in look.rules if rule.waits.ready}
    if not ends:
        return Note(WELL, "done", _("Nothing waits."))
    if unknown := [name for name, seconds in ends.items() if seconds is None]:
        text = _("When all is done cannot be said: %s.") % words.join_names(unknown)
        return Note(ODD, "done", text.replace("….", "…"), unknown[0])
    last = max(ends, key=lambda name: ends[name] or 0.0)
    values = {"at": words.clock_time_in(look.wall_time, ends[last] or 0.0), "rule": last}
    text = _("All that is due is done by %(at)s (%(rule)s last).")
    return Note(WELL, "done", text % values, last)
