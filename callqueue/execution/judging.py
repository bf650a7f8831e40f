"""Judges what came back of a call: by the rule's own `classify`, else by the default verdict.

In: a job and its answer, or what its handler returned, or what went wrong. Out: the result that is
recorded, with the hold that the provider asked for and what the attempt costs after all. Writes
nothing; what a rule's hooks raise is a note.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from callqueue import clocks, conf, events, outcome, texts, transitions
from callqueue.execution import claim, provider_limits, starvation
from callqueue.execution.wire import Answer
from callqueue.handlers import IDEMPOTENT
from callqueue.limits.budgets import key_part
from callqueue.limits.rules import backoff
from callqueue.outcome import GiveUp, HoldUntil, Outcome, RetryLater, Succeeded
from callqueue.sending.validation import check_cost
from callqueue.transitions import Job, Result

ELSEWHERE = timedelta(seconds=10)  # until a call is released again that workers here cannot make


def of_answer(job: Job, answer: Answer) -> Result:
    """The result of an HTTP request, however far it got."""
    ended_at, ended_mono = job.now(), clocks.monotonic()
    sent_at = None
    if answer.sent_at is not None:
        sent_at = min(ended_at, job.shown_at(job.arrived_by(answer.sent_at, ended_mono)))
    if answer.sent and job.first_sent_dt is None:
        job.first_sent_dt = sent_at or ended_at
    return _of_answer(job, answer, ended_at).at(ended_at, ended_mono, sent_at)


def of_value(job: Job, value: object) -> Result:
    """The result of what a handler returned: an outcome, or what is kept of a success."""
    ended_at, ended_mono = job.now(), clocks.monotonic()
    verdict = value if isinstance(value, outcome.OUTCOMES) else Succeeded(value)
    return _judged(job, verdict, ended_at).at(ended_at, ended_mono)


def failed(job: Job, why: str) -> Result:
    """Nothing was sent, or a handler failed: retried under the rule's Retry."""
    ended_at, ended_mono = job.now(), clocks.monotonic()
    return transitions.after_failure(job, job.rule, why, ended_at).at(ended_at, ended_mono)


def lost(job: Job, why: str) -> Result:
    """Sent, and no answer: the rule's `on_lost` decides."""
    ended_at, ended_mono = job.now(), clocks.monotonic()
    return transitions.after_loss(job, job.sound_rule, why, ended_at).at(ended_at, ended_mono)


def unfit(job: Job) -> Result:
    """The result of a job that cannot be made any more."""
    if job.unfit == claim.EXPIRED:
        return transitions.after_expiry(job).at(job.now(), 0.0)
    if job.unfit == claim.NEWER:
        return transitions.after_void(job, job.unfit, job.now() + ELSEWHERE)
    if job.unfit == claim.STARVED:
        starvation.pause.begin(claim.STARVED)
        return transitions.after_void(job, claim.STARVED)
    return transitions.after_unfitness(job, job.unfit or "").at(job.now(), 0.0)


def _of_answer(job: Job, answer: Answer, now: datetime) -> Result:
    if answer.dropped and not answer.sent:
        return transitions.after_void(job, answer.error)
    if answer.refused:
        return transitions.after_giving_up(job, answer.error)
    response = answer.response
    if response is not None and not (answer.broken and job.method in IDEMPOTENT):
        result = _of_response(job, response, _cut(answer), now)
    elif answer.sent:
        why = answer.error or "the answer broke off"
        result = transitions.after_loss(job, job.sound_rule, why, now)
    else:
        return transitions.after_failure(job, job.sound_rule, answer.error, now)
    result.response, result.is_whole = response, not (answer.truncated or answer.broken)
    return result


def _of_response(job: Job, response: Any, cut: str, now: datetime) -> Result:
    """The result of an answer, with what it costs after all. `cut`: why the body is not whole."""
    result = _classified(job, response, cut, now)
    result.cost = _settled(job, response)
    return result


def _cut(answer: Answer) -> str:
    """Why the body is not whole; empty where it is."""
    if answer.broken:
        return answer.error or "the body broke off"
    most = conf.current().max_response_bytes
    return (answer.error or f"the body was cut at {most} bytes") if answer.truncated else ""


def _classified(job: Job, response: Any, cut: str, now: datetime) -> Result:
    """The rule's own verdict where it has one; else the default, and a note of what went wrong."""
    note = ""
    if (classify := job.sound_rule.classify) is not None:
        try:
            own = claim.imported(classify)(response)
            if isinstance(own, outcome.OUTCOMES):
                return _judged(job, own, now, cut)
            if own is not None:
                note = f"classify returned {type(own).__name__}, which is no outcome"
        except BaseException as error:
            note = f"classify failed: {texts.worded(error)}"
    return _judged(job, _default(job, response), now, "; ".join(filter(None, [note, cut])))


def _default(job: Job, response: Any) -> Outcome:
    """The verdict of a rule that has none of its own."""
    retry = job.sound_rule.retry
    return provider_limits.verdict(
        response.status_code,
        response.headers,
        retry_statuses=retry.statuses,
        now=job.now(),
        max_hold=retry.max_hold,
    )


def _judged(job: Job, verdict: Outcome, now: datetime, note: str = "") -> Result:
    """The result that a verdict makes."""
    if isinstance(verdict, Succeeded):
        return transitions.after_success(job, verdict.result, note)
    why = "; ".join(text for text in (verdict.why, note) if text not in (None, ""))
    if isinstance(verdict, GiveUp):
        return transitions.after_giving_up(job, why)
    if isinstance(verdict, RetryLater):
        after = verdict.after
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        return transitions.after_failure(job, job.sound_rule, why, now, seconds)
    hold = _hold(job, verdict, now)
    result = transitions.after_throttle(job, job.sound_rule, why, now, hold["until"])
    result.hold = hold
    return result


def _hold(job: Job, verdict: HoldUntil, now: datetime) -> dict[str, Any]:
    """The hold that a verdict asks for, as the arguments of `holds.lay`: at most `max_hold` long. A
    hold that names no time to come lasts for the rule's backoff, and makes none longer that is in
    force.
    """
    retry, seconds = job.sound_rule.retry, _seconds(verdict.until, now)
    is_named = not seconds <= 0  # what is no number fails below: such a verdict is none
    if not is_named:
        seconds = backoff(retry, job.throttled_count + 1, 1.0)
    per, value = _scope(job, verdict.scope)
    return {
        "per": per,
        "value": value,
        "until": now + timedelta(seconds=min(seconds, retry.max_hold)),
        "reason": verdict.why or "",
        "extend": is_named,
    }


def _seconds(until: float | timedelta | datetime | None, now: datetime) -> float:
    """How long it is until then; 0 where that is not said."""
    if isinstance(until, datetime):
        until = (until if until.tzinfo else until.replace(tzinfo=UTC)) - now
    return until.total_seconds() if isinstance(until, timedelta) else until or 0.0


def _scope(job: Job, scope: str | None) -> tuple[str, str]:
    """What a hold covers: the scope named, or the narrowest `per` of the rule that the call has."""
    pers = [scope] if scope else [limit.per for limit in job.sound_rule.limits]
    for per in pers:
        if per not in ("rule", "queue") and (value := key_part(job.key, per)):
            return per, value
    return ("queue", job.queue) if "queue" in pers else ("rule", "")


def _settled(job: Job, response: Any) -> Any:
    """What the attempt is charged after all, as the rule settles it; None: as it was charged."""
    if (settle := job.sound_rule.settle) is None:
        return None
    try:
        cost = claim.imported(settle)(response)
        return None if cost is None else check_cost(cost)
    except BaseException as error:
        why = f"settle failed: {type(error).__name__}"
        events.emit("attempt_failed", call_id=job.pk, reason=why)
        return None
