"""The health line: whether all is well, in one sentence after the other, each with a link to what
it speaks of.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from django.urls import reverse
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from callqueue.database import from_us, to_us
from callqueue.limits.kinds import SECOND
from callqueue.operations import formatting
from callqueue.operations.board import Board
from callqueue.operations.standing import Standing

NAMED = 3  # rules that a sentence names
MARK = "="  # begins an address in which a rule's name is written in other letters
SILENT_AFTER = 60 * SECOND  # what is counted no further is said


@dataclass(frozen=True)
class Said:
    """A sentence, where it leads, and how bad it is: "bad", "odd" or "well"."""

    text: str
    kind: str = "well"
    url: str = ""


def said(board: Board) -> list[Said]:
    """What there is to say."""
    return list(_said(board))


def dispenser_trouble(board: Board) -> list[Said]:
    """What there is to say about dispensers that is not well."""
    return [one for one in _dispensers(board) if one.kind == "bad"]


def clock_time(at: datetime, now: datetime) -> str:
    """A clock time with its zone; with its date where that is another day than today."""
    local, today = timezone.localtime(at), timezone.localtime(now)
    shown = f"{local:%H:%M:%S}" if at <= now else f"{local:%H:%M}"
    return (
        f"{local:%Y-%m-%d} {shown} {local:%Z}"
        if local.date() != today.date()
        else (f"{shown} {local:%Z}")
    )


def rule_url(name: str) -> str:
    """The page of a rule. A name that browsers or servers would change in an address is written in
    other letters.
    """
    parts = name.split("/")
    is_plain = not ({"", ".", ".."} & set(parts) or "\\" in name or name.startswith(MARK))
    told = name if is_plain else MARK + urlsafe_b64encode(name.encode()).decode()
    return reverse("admin:callqueue_rule", args=[told])


def rule_named(told: str) -> str:
    """The name of a rule, as its address has it."""
    if not told.startswith(MARK):
        return told
    try:
        return urlsafe_b64decode(told.removeprefix(MARK)).decode()
    except ValueError:
        return ""


def number(rate: float) -> str:
    """A rate a second: "7.9", "1,234"."""
    if rate >= 100 or rate == int(rate):
        return formatting.count(rate)
    digits = 1 if rate >= 0.1 else 2
    return str(number_format(round(rate, digits), decimal_pos=digits))


def _said(board: Board) -> Iterator[Said]:
    yield from _dispensers(board)
    rate = sum(rule.rate for rule in board.rules)
    if rate or board.is_counting:
        yield Said(_("Sending %s a second.") % number(rate))
    yield from _troubles(board)
    yield from _failures(board)
    yield from _workers(board)
    if board.disagreements:
        count = len(board.disagreements)
        text = ngettext("Dispensers differ in %d limit.", "Dispensers differ in %d limits.", count)
        yield Said(text % count, "odd", "#cq-differ")
    yield _end(board)


def _dispensers(board: Board) -> Iterator[Said]:
    now = from_us(board.now)
    if board.dispensers:
        count = len(board.dispensers)
        text = ngettext(
            "%(count)d dispenser, seen %(when)s.", "%(count)d dispensers, seen %(when)s.", count
        )
        ago = formatting.from_now(-max(0.0, (now - board.dispensers[0][1]).total_seconds()))
        yield Said(text % {"count": count, "when": ago})
    elif board.last_seen is None:
        yield Said(
            _("No dispenser has been seen yet: nothing is sent until one runs "
              "(callqueue_dispenser)."),
            "bad",
        )  # fmt: skip
    else:
        ago = formatting.from_now(-(now - board.last_seen).total_seconds())
        yield Said(
            _("No dispenser runs: the last one was seen %(when)s, at %(at)s. "
              "Nothing is sent until one runs.")
            % {"when": ago, "at": clock_time(board.last_seen, now)},
            "bad",
        )  # fmt: skip
    behind = board.now - board.counted_until
    if board.counted_until and behind > SILENT_AFTER:
        at = clock_time(from_us(board.counted_until), now)
        yield Said(_("What was sent is counted up to %s.") % at, "odd")


def _troubles(board: Board) -> Iterator[Said]:
    """The rules that are not well, by what ails them."""
    by_state: dict[str, list[Standing]] = {}
    for rule in board.rules:
        by_state.setdefault(rule.state, []).append(rule)
    if held := by_state.get("held"):
        text = ngettext("%(count)d rule held (%(names)s).", "%(count)d rules held (%(names)s).",
                        len(held))  # fmt: skip
        yield _about(text, held, _held_names(held))
    keys = [r for r in board.rules if r.state != "held" and r.holds]
    if keys:
        count = sum(len(rule.holds) for rule in keys)
        text = ngettext("%(count)d key or queue held (%(names)s).",
                        "%(count)d keys or queues held (%(names)s).", count)  # fmt: skip
        yield Said(text % {"count": count, "names": _names(keys)}, "odd", rule_url(keys[0].name))
    if stalled := by_state.get("no_workers"):
        text = ngettext("%(count)d rule has no workers (%(names)s).",
                        "%(count)d rules have no workers (%(names)s).", len(stalled))  # fmt: skip
        yield _about(text, stalled, _names(stalled))
    if failing := by_state.get("failing"):
        text = ngettext("%(count)d rule is failing (%(names)s).",
                        "%(count)d rules are failing (%(names)s).", len(failing))  # fmt: skip
        yield _about(text, failing, _names(failing))
    if stuck := by_state.get("stuck"):
        text = ngettext("Nothing is sent of %(count)d rule, though calls are due (%(names)s).",
                        "Nothing is sent of %(count)d rules, though calls are due (%(names)s).",
                        len(stuck))  # fmt: skip
        yield _about(text, stuck, _names(stuck))


def _about(text: str, rules: list[Standing], names: str) -> Said:
    return Said(text % {"count": len(rules), "names": names}, "bad", rule_url(rules[0].name))


def _held_names(rules: list[Standing]) -> str:
    """Each with who laid the hold, and how many calls wait."""
    named = []
    for rule in rules[:NAMED]:
        hold = rule.hold
        who = {
            "breaker": _("by its breaker"),
            "operator": _("by an operator"),
            "provider": _("by the provider"),
        }.get(hold.source if hold else "", "")
        waiting = formatting.count(rule.backlog.waiting)
        named.append(_("%(rule)s %(who)s, %(count)s waiting") % {
            "rule": rule.name, "who": who, "count": waiting
        })  # fmt: skip
    return "; ".join([*named, *(["…"] if len(rules) > NAMED else [])])


def _names(rules: list[Standing]) -> str:
    return ", ".join([*(r.name for r in rules[:NAMED]), *(["…"] if len(rules) > NAMED else [])])


def _failures(board: Board) -> Iterator[Said]:
    failed = sum(rule.lately.hour.failed for rule in board.rules)
    throttled = sum(rule.lately.hour.throttled for rule in board.rules)
    if not failed and not throttled:
        if board.is_counting:
            yield Said(_("Nothing failed and nothing was throttled in the last hour."))
        return
    worst = max(board.rules, key=lambda r: r.lately.hour.failed + r.lately.hour.throttled)
    values = {"failed": formatting.count(failed), "throttled": formatting.count(throttled)}
    text = _("%(failed)s attempts failed and %(throttled)s were throttled in the last hour.")
    yield Said(text % values, "odd", rule_url(worst.name) + "#errors")


def _workers(board: Board) -> Iterator[Said]:
    count = len(board.workers)
    if not count:
        if any(rule.in_flight.count for rule in board.rules):
            yield Said(_("No worker has begun a call in the last 5 minutes."), "bad")
        return
    ago = (from_us(board.now) - board.workers[0][1]).total_seconds()
    text = ngettext(
        "%(count)d worker in the last 5 minutes, the last call begun %(when)s.",
        "%(count)d workers in the last 5 minutes, the last call begun %(when)s.",
        count,
    )
    yield Said(text % {"count": count, "when": formatting.from_now(-max(0.0, ago))})


def _end(board: Board) -> Said:
    """When all is done."""
    waiting = [rule for rule in board.rules if rule.backlog.ready]
    if not waiting:
        return Said(_("Nothing waits."))
    unknown = [rule for rule in waiting if rule.drained_s is None]
    if unknown:
        return Said(
            (_("When all is done cannot be said: %s.") % _names(unknown)).replace("….", "…"), "odd",
            rule_url(unknown[0].name),
        )  # fmt: skip
    last = max(waiting, key=lambda rule: rule.drained_s or 0)
    at = done_by(board.now, last.drained_s or 0)
    return Said(
        _("All that is due is done by %(at)s (%(rule)s last).") % {"at": at, "rule": last.name},
        url=rule_url(last.name) + "#draining",
    )


def done_by(now: int, seconds: float) -> str:
    """The clock time after so many seconds; without end, that it is far."""
    if seconds > formatting.LONGEST:
        return formatting.from_now(seconds)
    ends = from_us(now + round(seconds * SECOND))
    return clock_time(max(ends, from_us(to_us(from_us(now)) + SECOND)), from_us(now))
