"""Makes calls: begin (the fence), the wire, the verdict, record (the fence again).

In: the ids of released attempts. Out: their ends, in the database. Whatever else happens, an attempt is begun by one worker
only, and what a worker records counts only while the attempt is still its own. Never retries by itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import DatabaseError, InterfaceError, connections

from callqueue import (
    beginning,
    breaker,
    callcheck,
    clockwork,
    conf,
    crew,
    database,
    endings,
    events,
    feedback,
    holds,
    outcome,
    recording,
    secrets,
    states,
    tracing,
)
from callqueue.backoff import delay
from callqueue.beginning import Job
from callqueue.budgets import key_part, with_redirects
from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.handlers import HTTP_METHODS, Context, find, wire
from callqueue.outcome import GiveUp, HoldUntil, Outcome, RetryLater, Succeeded
from callqueue.recording import Report
from callqueue.rules import Rule

SLOW = 1.0  # seconds that the first answer of a rule is expected to take, before this process knows better
SOON = 0.02  # seconds within which the calls of a message should all be sent, those that are due


def execute(using: str, attempt_ids: Sequence[int], *, inline: bool = False) -> int:
    """Make the calls of these attempts, those that are still to be begun; the count of them.

    HTTP calls run side by side unless `inline`; others one after the other in this thread, which may use the ORM.
    """
    jobs = beginning.begin(using, attempt_ids)
    sound = [job for job in jobs if job.unfit is None]
    reports = [_unfit(job) for job in jobs if job.unfit is not None]
    if reports:
        _record(using, reports)
    make = tracing.traced(_make)
    wired = [job for job in sound if job.method in HTTP_METHODS]
    if wired and not inline:
        for ended in crew.run(wired, make, hands=_hands(wired)):
            _record(using, ended)
    for job in sound:
        if inline or job.method not in HTTP_METHODS:
            _record(using, [make(job)])
    return len(jobs)


_waits: dict[str, float] = {}  # by rule: seconds from the last request of this process to its answer


def _hands(jobs: Sequence[Job]) -> int:
    """How many threads begin: one for each call that has an instant of its own, connected and waiting when it comes, and enough
    for the others to be sent within a few milliseconds, as long as answers take as long as the last ones.
    """
    timed = [job for job in jobs if job.send_at is not None]
    waits = sum(_waits.get(job.rule_name, SLOW) for job in jobs if job.send_at is None)
    return len(timed) + round(waits / SOON)


class SlotGate(wire.Gate):
    """The last door before the socket: waits for the instant to send at, and lets nothing through past the lease."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def wait(self) -> None:
        """Sleep until the slot opens, on the database's clock, erring late."""
        job = self._job
        if job.send_at is not None:
            while (left := job.clock.monotonic_at(job.send_at) - clockwork.monotonic()) > 0:
                time.sleep(left)
        if clockwork.monotonic() >= job.lease_ends:
            raise wire.Dropped("the lease had ended before the first byte was sent")


def _make(job: Job) -> Report:
    """Make one call, and say what came of it. Never raises."""
    try:
        params, values = _resolved(job)
    except (InvalidCall, NotAllowed) as error:
        return Report(job, endings.after_giving_up(job, str(error), _now(job)), states.GAVE_UP, error=str(error))
    except Exception as error:
        return _failed(job, str(error))
    gate = SlotGate(job)
    try:
        report = _request(job, params, gate) if job.method in HTTP_METHODS else _handle(job, params, gate)
    except wire.Dropped as dropped:
        return Report(job, endings.after_void(job, _now(job)), states.VOIDED, error=str(dropped))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        report = _lost(job, why) if gate.sent_at is not None else _failed(job, why)
    return recording.scrubbed(report, values)


def _resolved(job: Job) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The call's params with its secrets in place, checked once more where there are any, and the secrets' values."""
    settings = conf.current()
    params, values = secrets.resolve(job.params, settings.secrets)
    if values:
        callcheck.check_params(
            job.method, params, allowed_hosts=settings.allowed_hosts, allowed_networks=settings.allowed_networks
        )
    return dict(params), values


def _failed(job: Job, why: str, **seen: Any) -> Report:
    """Nothing was sent, or a handler failed: retried under the rule's Retry."""
    now = seen.get("ended_at") or _now(job)
    return Report(job, endings.after_failure(job, job.rule, why, now), states.ERRORED, error=why, **seen)


def _lost(job: Job, why: str, **seen: Any) -> Report:
    """Sent, and no answer: `on_lost` decides."""
    ending = endings.after_loss(job, job.sound_rule, why, seen.get("ended_at") or _now(job))
    told = states.LOST if ending.status == states.UNKNOWN else states.ERRORED
    return Report(job, ending, told, error=why, **seen)


def _request(job: Job, params: dict[str, Any], gate: SlotGate) -> Report:
    """Make an HTTP call within the rule's timeouts."""
    rule, settings = job.sound_rule, conf.current()
    if rule.idempotency_header and job.method in ("post", "put", "patch", "delete"):
        headers = dict(params.get("headers") or {})
        headers.setdefault(rule.idempotency_header, job.idempotency_key)
        params["headers"] = headers
    policy = wire.Policy(
        allowed_hosts=settings.allowed_hosts,
        allowed_networks=settings.allowed_networks,
        verify=rule.verify,
        redirects=job.redirects,
        closed_hosts=settings.book.closed_hosts(job.rule_name) if job.redirects else (),
        max_response_bytes=settings.max_response_bytes,
    )
    timeouts = wire.Timeouts(connect=rule.connect_timeout, read=rule.read_timeout, total=rule.total_timeout)
    answer = wire.request(job.method, params, policy=policy, timeouts=timeouts, gate=gate)
    report = _report_of(job, rule, answer)
    if answer.redirects and report.cost is None:
        report.cost = with_redirects(job.cost, answer.redirects)
    return report


def _report_of(job: Job, rule: Rule, answer: wire.Answer) -> Report:
    ended_at = job.clock.latest(clockwork.monotonic())
    sent_at = None if answer.sent_at is None else min(ended_at, job.clock.latest(answer.sent_at))
    seen: dict[str, Any] = {"sent_at": sent_at, "ended_at": ended_at, "ended_mono": clockwork.monotonic()}
    if answer.sent_at is not None:
        _waits[job.rule_name] = seen["ended_mono"] - answer.sent_at
    if answer.sent and job.first_sent_dt is None:
        job.first_sent_dt = sent_at or ended_at
    if answer.dropped and not answer.sent:
        return Report(job, endings.after_void(job, ended_at), states.VOIDED, error=answer.error, **seen)
    if answer.refused:
        return Report(job, endings.after_giving_up(job, answer.error, ended_at), states.GAVE_UP, error=answer.error, **seen)
    response = answer.response
    if response is None or (answer.broken and endings.is_idempotent(job.method)):
        if answer.sent:
            return _lost(job, answer.error or "the answer broke off", response=response, **seen)
        return _failed(job, answer.error, **seen)
    verdict, note = _verdict(job, rule, response)
    if answer.broken:
        note = "; ".join(filter(None, [note, answer.error or "the body broke off"]))
    elif answer.truncated:
        note = "; ".join(filter(None, [note, f"the body was cut at {conf.current().max_response_bytes} bytes"]))
    report = _judged(job, rule, verdict, ended_at, **seen, response=response, note=note)
    report.cost = _settled(job, rule, response)
    if not isinstance(verdict, HoldUntil):
        advice = feedback.tightening(response.status_code, response.headers, now=ended_at, max_hold=rule.retry.max_hold)
        if advice is not None:
            report.hold = _hold(job, rule, advice, ended_at)
    return report


def _handle(job: Job, params: Mapping[str, Any], gate: SlotGate) -> Report:
    """Let the method's handler make the call. What it returns is kept as the attempt's response body."""
    gate.wait()
    context = Context(
        call_id=job.pk,
        rule=job.rule_name,
        key=job.key,
        attempt=job.number,
        idempotency_key=job.idempotency_key,
        deadline=datetime.now(UTC) + timedelta(seconds=max(0.0, job.lease_ends - clockwork.monotonic())),
        is_last=job.failed_count + 1 >= job.sound_rule.retry.max_attempts,
    )
    if job.first_sent_dt is None:
        job.first_sent_dt = job.clock.latest(clockwork.monotonic())
    result = find(job.method)(params, context)
    ended_at = job.clock.latest(clockwork.monotonic())
    verdict = result if isinstance(result, outcome.OUTCOMES) else Succeeded(result)
    return _judged(job, job.sound_rule, verdict, ended_at, ended_at=ended_at, ended_mono=clockwork.monotonic())


def _verdict(job: Job, rule: Rule, response: Any) -> tuple[Outcome, str]:
    """The rule's own verdict, where it has one, else the default; and a note where `classify` went wrong."""
    note = ""
    if rule.classify is not None:
        try:
            own = beginning.imported(rule.classify)(response)
            if isinstance(own, outcome.OUTCOMES):
                return own, ""
            if own is not None:
                note = f"classify returned {type(own).__name__}, which is no outcome"
        except Exception as error:
            note = f"classify failed: {type(error).__name__}: {error}"
    verdict = feedback.verdict(
        response.status_code,
        response.headers,
        response.content[:4096] if response.content else b"",
        retry_statuses=rule.retry.statuses,
        now=job.clock.latest(clockwork.monotonic()),
        max_hold=rule.retry.max_hold,
        method=job.method,
    )
    return verdict, note


def _judged(job: Job, rule: Rule, verdict: Outcome, now: datetime, note: str = "", **seen: Any) -> Report:
    """The report that a verdict makes."""
    if isinstance(verdict, Succeeded):
        return Report(job, endings.after_success(job, now), states.SUCCEEDED, result=verdict.result, error=note, **seen)
    why = "; ".join(filter(None, [verdict.why, note]))
    if isinstance(verdict, GiveUp):
        return Report(job, endings.after_giving_up(job, why, now), states.GAVE_UP, error=why, **seen)
    if isinstance(verdict, RetryLater):
        after = verdict.after.total_seconds() if isinstance(verdict.after, timedelta) else verdict.after
        return Report(job, endings.after_failure(job, rule, why, now, after), states.ERRORED, error=why, **seen)
    hold = _hold(job, rule, verdict, now)
    ending = endings.after_throttle(job, rule, why, now, hold.until)
    return Report(job, ending, states.THROTTLED, error=why, hold=hold, **seen)


def _hold(job: Job, rule: Rule, verdict: HoldUntil, now: datetime) -> recording.HoldOrder:
    """The hold a verdict asks for: until when, at most `max_hold`, and over which scope."""
    most = timedelta(seconds=rule.retry.max_hold)
    until, named = verdict.until, True
    if until is None:
        retry, named = rule.retry, False
        backoff = delay(
            job.throttled_count + 1, base=retry.base, factor=retry.factor, cap=retry.cap, jitter=retry.jitter, rand=1.0
        )
        until = timedelta(seconds=backoff)
    if isinstance(until, int | float):
        until = timedelta(seconds=until)
    if isinstance(until, timedelta):
        until = now + min(max(until, timedelta(0)), most)
    until = min(until if until.tzinfo else until.replace(tzinfo=UTC), now + most)
    per, value = _scope(job, rule, verdict.scope)
    return recording.HoldOrder(_sharers(job, per), per, value, until, verdict.why, extend=named)


def _scope(job: Job, rule: Rule, scope: str | None) -> tuple[str, str]:
    """What a hold covers: the scope named, or the narrowest that one of the rule's limits is per and the call has."""
    pers = [scope] if scope else [limit.per for limit in rule.limits]
    for per in pers:
        if per not in ("rule", "queue") and (value := key_part(job.key, per)):
            return per, value
    if "queue" in pers:
        return "queue", job.queue
    return "rule", ""


def _sharers(job: Job, per: str) -> tuple[str, ...]:
    """The rules that a hold concerns: those that share a budget of that scope with the call's rule."""
    budgets = conf.current().book.budgets.get(job.rule_name, ())
    sharing = {rule for b in budgets if b.limit.per == per and b.limit.name for rule in b.rules}
    return tuple(sorted(sharing | {job.rule_name}))


def _settled(job: Job, rule: Rule, response: Any) -> Any:
    """What the attempt is charged after all, where the rule settles; None to leave the charge as it is."""
    if rule.settle is None:
        return None
    from callqueue.callcheck import check_cost

    try:
        cost = beginning.imported(rule.settle)(response)
        return None if cost is None else check_cost(cost)
    except Exception as error:
        events.tell("attempt_failed", call_id=job.pk, reason=f"settle failed: {type(error).__name__}")
        return None


def _unfit(job: Job) -> Report:
    """The report of an attempt that cannot be executed any more."""
    now = job.clock.latest(clockwork.monotonic())
    if job.unfit == beginning.EXPIRED:
        return Report(job, endings.after_expiry(job, now), states.VOIDED, error="expired", ended_at=now)
    why = job.unfit or ""
    return Report(job, endings.after_giving_up(job, why, now), states.VOIDED, error=why, ended_at=now)


def _record(using: str, reports: Sequence[Report]) -> None:
    """Record, and keep trying while the database is away and a lease still runs: the answers are in hand."""
    pause = 0.05
    while True:
        try:
            for report in reports:
                if report.hold is not None:
                    order = report.hold
                    holds.lay(
                        using,
                        order.rules,
                        order.per,
                        order.value,
                        order.until,
                        order.reason,
                        source="provider",
                        extend=order.extend,
                    )
                    report.hold = None
            recording.record(using, reports)
            break
        except (DatabaseError, InterfaceError) as error:
            if database.in_transaction(using):  # a test's: what broke it stays broken, and its connection is not ours to close
                raise
            if clockwork.monotonic() + pause >= max(report.job.lease_ends for report in reports):
                events.tell("database_away", during="record", error=type(error).__name__, calls=len(reports))
                raise
            events.tell("record_delayed", calls=len(reports), error=type(error).__name__)
            connections[using].close()
            time.sleep(pause)
            pause = min(2.0, pause * 2)
    breaker.observe(using, reports)


def _now(job: Job) -> datetime:
    return job.clock.latest(clockwork.monotonic())
