"""Judges what came back of a call: by the rule's own `classify`, else by the default verdict, with
what a provider says of its limits in headers: Retry-After, `...RateLimit...-Remaining` and
`-Reset`. Writes nothing. What a rule's hooks raise is a note. What a provider says may only tighten
what the limits say, lasts at most `max_hold`, and never raises. Only a refusal is a reason to hold:
a success with which nothing remains says what the limits know.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, NamedTuple

from callqueue import clocks, conf, events, outcome, states, texts, transitions
from callqueue.clocks import Mono
from callqueue.execution import claim, starvation
from callqueue.execution.wire import Answer
from callqueue.handlers import IDEMPOTENT
from callqueue.limits.budgets import key_part, larger_cost
from callqueue.limits.rules import backoff
from callqueue.outcome import GiveUp, HoldUntil, Outcome, RetryLater, Succeeded
from callqueue.security.redaction import redact_url
from callqueue.sending.validation import check_cost
from callqueue.transitions import Job, Result

ELSEWHERE = timedelta(seconds=10)  # until a call is released again that workers here cannot make


def result_of_answer(job: Job, answer: Answer) -> Result:
    """Of an answer, judged, with its times; sets when the call was first sent."""
    ended_at, ended_mono = job.ledger_time_now(), clocks.monotonic()
    sent_at, arrived = None, answer.sent_at
    if arrived is not None and job.gate is not None:
        arrived = job.gate.latest_arrival(arrived, ended_mono)
    if arrived is not None:
        sent_at = min(ended_at, job.ledger_time_at(arrived))
    if answer.sent and job.call.first_sent_dt is None:
        job.call.first_sent_dt = job.to_wall(sent_at or ended_at)
    return _unstamped_result(job, answer, job.to_wall(ended_at)).stamp(
        ended_at, ended_mono, sent_at
    )


def result_of_value(job: Job, value: object) -> Result:
    """Of what a handler returned: an outcome, or anything else, with which it succeeded."""
    ended_at, ended_mono = job.ledger_time_now(), clocks.monotonic()
    verdict = value if isinstance(value, outcome.OUTCOMES) else Succeeded(value)
    return _result_of_verdict(job, verdict, job.to_wall(ended_at)).stamp(ended_at, ended_mono)


def result_of_failure(job: Job, why: str) -> Result:
    """Nothing was sent, or a handler failed: retried as the rule's Retry says."""
    ended_at, ended_mono = job.ledger_time_now(), clocks.monotonic()
    return transitions.after_failure(job, why, job.to_wall(ended_at)).stamp(ended_at, ended_mono)


def result_of_loss(job: Job, why: str) -> Result:
    """Sent, and no answer: the rule's `on_lost` decides."""
    ended_at, ended_mono = job.ledger_time_now(), clocks.monotonic()
    return transitions.after_loss(job, why, job.to_wall(ended_at)).stamp(ended_at, ended_mono)


def result_of_unfit(job: Job) -> Result:
    """EXPIRED; void if NEWER, or if STARVED, which begins a shortage; FAILED if unfit otherwise."""
    if job.unfit == claim.EXPIRED:
        return transitions.after_expiry(job).stamp(job.ledger_time_now(), Mono(0.0))
    if job.unfit == claim.NEWER:
        return transitions.after_void(
            job, job.unfit, job.to_wall(job.ledger_time_now()) + ELSEWHERE
        )
    if job.unfit == claim.STARVED:
        starvation.shortage.begin(claim.STARVED)
        return transitions.after_void(job, claim.STARVED)
    given_up = transitions.after_giving_up(job, job.unfit or "", states.VOIDED)
    return given_up.stamp(job.ledger_time_now(), Mono(0.0))


def _unstamped_result(job: Job, answer: Answer, now: datetime) -> Result:
    """What came of the job, by how far its request got; the times are still to be stamped."""
    if answer.dropped and not answer.sent:
        return transitions.after_void(job, answer.error)
    if answer.refused:
        return transitions.after_giving_up(job, answer.error)
    response = answer.response
    if response is not None and not (answer.broken and job.call.method in IDEMPOTENT):
        result = _result_of_response(job, response, _cut_note(answer), now)
    elif answer.sent:
        why = answer.error or "the answer broke off"
        result = transitions.after_loss(job, why, now)
    else:
        return transitions.after_failure(job, answer.error, now)
    result.response, result.is_whole = response, not (answer.truncated or answer.broken)
    return result


def _result_of_response(job: Job, response: Any, cut_note: str, now: datetime) -> Result:
    result = _result_by_classify(job, response, cut_note, now)
    result.cost = _cost_by_hook(job, response, cut_note)
    return result


def _cut_note(answer: Answer) -> str:
    if answer.broken:
        return answer.error or "the body broke off"
    most = conf.current().max_response_bytes
    return (answer.error or f"the body was cut at {most} bytes") if answer.truncated else ""


def _result_by_classify(job: Job, response: Any, cut_note: str, now: datetime) -> Result:
    """By the rule's `classify`; by the default verdict where it has none, fails or says nothing."""
    note = ""
    if (classify := job.sound_rule.classify) is not None:
        try:
            own = claim.imported_hook(classify)(response)
            if isinstance(own, outcome.OUTCOMES):
                return _result_of_verdict(job, own, now, cut_note)
            if own is not None:
                note = f"classify returned {type(own).__name__}, which is no outcome"
        except BaseException as error:
            note = f"classify failed: {texts.worded(error)}"
    return _result_of_verdict(
        job, _default_verdict_of(job, response), now, "; ".join(filter(None, [note, cut_note]))
    )


def _default_verdict_of(job: Job, response: Any) -> Outcome:
    retry = job.sound_rule.retry
    return default_verdict(
        response.status_code,
        response.headers,
        retry_statuses=retry.statuses,
        now=job.to_wall(job.ledger_time_now()),
        max_hold=retry.max_hold,
    )


def _result_of_verdict(job: Job, verdict: Outcome, now: datetime, note: str = "") -> Result:
    if isinstance(verdict, Succeeded):
        return transitions.after_success(job, verdict.result, note)
    why = "; ".join(filter(None, [verdict.why, note]))
    if isinstance(verdict, GiveUp):
        return transitions.after_giving_up(job, why)
    if isinstance(verdict, RetryLater):
        after = verdict.after
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        return transitions.after_failure(job, why, now, seconds)
    hold = _arguments_of_hold(job, verdict, now)
    result = transitions.after_throttle(job, why, now, hold["until"])
    result.hold = hold
    return result


def _arguments_of_hold(job: Job, verdict: HoldUntil, now: datetime) -> dict[str, Any]:
    """The hold that a verdict asks for, as the arguments of `holds.lay`: at most `max_hold` long.
    One that names no time to come lasts for the rule's backoff, and extends none in force.
    """
    retry, seconds = job.sound_rule.retry, _seconds_until(verdict.until, now)
    is_named = not seconds <= 0  # NaN fails below, so such a verdict counts for none
    if not is_named:
        seconds = backoff(retry, job.call.throttled_count + 1, 1.0)
    per, value = _scope_of_hold(job, verdict.scope)
    return {
        "per": per,
        "value": value,
        "until": now + timedelta(seconds=min(seconds, retry.max_hold)),
        "reason": verdict.why,
        "extend": is_named,
    }


def _seconds_until(until: float | timedelta | datetime | None, now: datetime) -> float:
    if isinstance(until, datetime):
        until = _aware(until) - now
    return until.total_seconds() if isinstance(until, timedelta) else until or 0.0


def _scope_of_hold(job: Job, scope: str | None) -> tuple[str, str]:
    """`scope` (None: the first key that limits are per, else queue), its value; else the rule."""
    pers = [scope] if scope else [limit.per for limit in job.sound_rule.limits]
    for per in pers:
        if per not in ("rule", "queue") and (value := key_part(job.call.key, per)):
            return per, value
    return ("queue", job.attempt.queue) if "queue" in pers else ("rule", "")


def _cost_by_hook(job: Job, response: Any, cut_note: str) -> Any:
    """The cost by `settle`, of a cut answer at least as charged; None: as charged, or it failed."""
    if (settle := job.sound_rule.settle) is None:
        return None
    try:
        cost = claim.imported_hook(settle)(response)
        cost = None if cost is None else check_cost(cost)
        return larger_cost(cost, job.attempt.cost) if cut_note and cost is not None else cost
    except BaseException as error:
        why = f"settle failed: {type(error).__name__}"
        events.emit("attempt_failed", **job.facts, reason=why)
        return None


_LONGEST_LOCATION = 200  # characters that a reason names
_CLOCKS_APART = 86400.0  # seconds beyond which an answer's Date tells nothing of its clock
_EPOCHS_FROM, _MILLISECONDS_FROM = 1e9, 1e12  # a reset from here on is no wait, but a moment
_LONGEST, _LONGEST_DATE = 2000, 100  # characters of a value that are read
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_FAMILY = re.compile(r"rate-?limit")


class Advice(NamedTuple):
    """What the headers say."""

    until_s: float | None = None  # seconds from now for which nothing is to go; None: not said
    note: str = ""  # what was unusable or clamped, in no words of theirs


def default_verdict(
    status: int,
    headers: Mapping[str, str],
    *,
    retry_statuses: Collection[int],
    now: datetime,
    max_hold: float,
) -> Outcome:
    """Success, a hold, a retry or the end, where no hook has a verdict. A throttled answer is a
    429 (RFC 6585 section 4), or a 503 with Retry-After (RFC 9110 section 15.6.4). Without a usable
    time the hold's `until` is None: the rule's backoff.
    """
    if 200 <= status < 300:
        return Succeeded()
    plain, why = _plain_headers(headers), _status_phrase(status)
    if _is_throttled(status, plain):
        return _hold_by_headers(why, headers, now=now, max_hold=max_hold)
    if status in retry_statuses:
        return RetryLater(why)
    if 300 <= status < 400 and (location := plain.get("location")):
        return GiveUp(f"{why}; a redirect to {_shown_location(location)}, which is not followed")
    return GiveUp(why)


def advice_of_retry_after(headers: Mapping[str, str], *, now: datetime, max_hold: float) -> Advice:
    """Retry-After (RFC 9110 section 10.2.3): seconds, or an HTTP date, by the provider's clock."""
    plain = _plain_headers(headers)
    if not (value := plain.get("retry-after")):
        return Advice()
    wait = _parse_number(value)
    if wait is None and (date := _parse_date(value)) is not None:
        wait = (date - _their_clock(plain, now)).total_seconds()
    return (
        Advice(note="its Retry-After is unusable")
        if wait is None
        else _clamped_advice(wait, max_hold)
    )


def advice_of_rate_limits(headers: Mapping[str, str], *, now: datetime, max_hold: float) -> Advice:
    """The RateLimit families of a refusal: nothing is to go until the latest reset of those that
    are used up, or of all where none says what remains.
    A family is the headers that differ only in remaining or reset: X-RateLimit-*, RateLimit-*,
    x-ratelimit-*-tokens. A reset is seconds, an epoch or a date.
    """
    plain = _plain_headers(headers)
    is_used_up, resets = dict[str, bool](), dict[str, float]()
    for name, value in plain.items():
        if not _FAMILY.search(name):
            continue
        if "remaining" in name and (count := _parse_number(value)) is not None:
            is_used_up[name.replace("remaining", "")] = count < 1
        elif (
            "reset" in name
            and (wait := _seconds_to_reset(value, _their_clock(plain, now))) is not None
        ):
            resets[name.replace("reset", "")] = wait
    waits = [wait for name, wait in resets.items() if not is_used_up or is_used_up.get(name)]
    return _clamped_advice(max(waits), max_hold) if waits else Advice()


def _plain_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {str(name).lower(): str(value).strip()[:_LONGEST] for name, value in headers.items()}


def _is_throttled(status: int, plain: Mapping[str, str]) -> bool:
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return bool(plain.get("retry-after"))
    return status == HTTPStatus.TOO_MANY_REQUESTS


def _hold_by_headers(
    why: str, headers: Mapping[str, str], *, now: datetime, max_hold: float
) -> HoldUntil:
    """Until Retry-After, else until a reset; None (backoff) if neither names a time to come."""
    for read, name in ((advice_of_retry_after, "Retry-After"), (advice_of_rate_limits, "reset in")):
        until_s, note = read(headers, now=now, max_hold=max_hold)
        if until_s:
            seconds = f"{round(until_s, 3):.12g} s" + (f" ({note})" if note else "")
            return HoldUntil(until_s, f"{why}; {name} {seconds}")
        if until_s == 0:
            note = f"its {name.removesuffix(' in')} is already past"
        why = f"{why}; {note}" if note else why
    return HoldUntil(None, why)


def _clamped_advice(seconds: float, max_hold: float) -> Advice:
    if seconds <= max_hold:
        return Advice(max(0.0, seconds))
    return Advice(float(max_hold), note=f"clamped; it named {seconds:.12g} s")


def _seconds_to_reset(value: str, clock: datetime) -> float | None:
    number = _parse_number(value)
    if number is None:
        date = _parse_date(value)
        return None if date is None else (date - clock).total_seconds()
    if number < _EPOCHS_FROM:
        return number
    return (number if number < _MILLISECONDS_FROM else number / 1000) - clock.timestamp()


def _parse_number(value: str) -> float | None:
    return float(value) if _NUMBER.fullmatch(value) else None


def _their_clock(plain: Mapping[str, str], now: datetime) -> datetime:
    """The provider's clock by the answer's Date; ours if that is absent or over a day from it."""
    now, date = _aware(now), _parse_date(plain.get("date", ""))
    return date if date is not None and abs((date - now).total_seconds()) <= _CLOCKS_APART else now


def _parse_date(text: str) -> datetime | None:
    """An HTTP date, or one of RFC 3339; UTC without a zone."""
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        with suppress(Exception):  # many: these parsers were not written for what strangers send
            return _aware(parse(text[:_LONGEST_DATE]))
    return None


def _aware(moment: datetime) -> datetime:
    return moment if moment.utcoffset() is not None else moment.replace(tzinfo=UTC)


def _shown_location(location: str) -> str:
    """A Location, as it may be shown: HTTP reads its bytes as Latin-1, and servers write UTF-8."""
    with suppress(ValueError):
        location = location.encode("latin-1").decode()
    text = "".join(char if char.isprintable() else "?" for char in redact_url(location))
    return text if len(text) <= _LONGEST_LOCATION else f"{text[:_LONGEST_LOCATION]}..."


def _status_phrase(status: int) -> str:
    with suppress(ValueError):
        return f"{status} {HTTPStatus(status).phrase}"
    return str(status)
