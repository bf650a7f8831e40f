"""Makes calls: begin (the fence), the wire, the verdict, record (the fence again).

In: the ids of released attempts. Out: their ends, in the database. Whatever else happens, an
attempt is begun by one worker only, and what a worker records counts only while the attempt is
still its own. Never retries by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.db import DatabaseError, InterfaceError, connections

from callqueue import clocks, conf, database, events, outcome, states, telemetry, texts, transitions
from callqueue.exceptions import CallQueueError, InvalidCall, NotAllowed
from callqueue.execution import claim, provider_limits, results, thread_pool
from callqueue.execution.claim import Job
from callqueue.execution.http import client
from callqueue.execution.results import Report
from callqueue.handlers import HTTP_METHODS, SAFE, Context, find
from callqueue.limits.backoff import delay
from callqueue.limits.budgets import key_part, with_redirects
from callqueue.limits.rules import Rule
from callqueue.maintenance import breaker
from callqueue.outcome import GiveUp, HoldUntil, Outcome, RetryLater, Succeeded
from callqueue.security.log_scrubbing import at_work
from callqueue.sending import disclosure

# seconds that the first answer of a rule is expected to take, before this process knows better
SLOW = 1.0
LOCKED = (0.05, 0.1, 0.2, 0.4, 0.8)  # seconds between looks at attempts that somebody has locked
# seconds that a worker that is told to go at once stays for what has just been answered
LEAVING = 1.0
LEFT = "the worker was stopped before the first byte was sent"
SOON = 0.02  # seconds within which the calls of a message should all be sent, those that are due


def execute(
    using: str, attempt_ids: Sequence[int], *, inline: bool = False, interruptible: bool = False
) -> int:
    """Make the calls of these attempts, those that are still to be begun; the count of them.

    HTTP calls run side by side unless `inline`; others one after the other in this thread, which
    may use the ORM. In a thread that is `interruptible`, by a time limit, no HTTP call runs.
    Whatever is raised in this thread, what has been sent is recorded and what has not is given
    back; then it is raised again.
    """
    message = _Message(using, attempt_ids)
    try:
        return message.make(inline, interruptible)
    except BaseException as struck:
        message.leave(struck)
        striker = _striker(struck)
        if striker is not None and striker is not struck:
            raise striker from struck
        raise


class _Message:
    """The calls of one message, in this worker: some are made in this thread, the others are the
    crew's.
    """

    def __init__(self, using: str, attempt_ids: Sequence[int]) -> None:
        self.using, self.attempt_ids, self.worker = using, attempt_ids, claim.name_worker()
        self.jobs: list[Job] | None = None
        self.owed: list[Report] = []
        self.shift: thread_pool.Shift[Job, Report] | None = None

    def make(self, inline: bool, interruptible: bool) -> int:
        """Begin, make and record them; the count of those begun."""
        self.jobs = jobs = claim.begin(self.using, self.attempt_ids, self.worker)
        sound = [job for job in jobs if job.unfit is None]
        wired = [job for job in sound if job.method in HTTP_METHODS and not inline]
        apart = wired if len(wired) > 1 or interruptible else []
        make = telemetry.traced(_make)
        self.shift = thread_pool.Shift(apart, make)
        self.owed = [_unfit(job) for job in jobs if job.unfit is not None]
        self._record_owed()
        for ended in self.shift.run(_hands(apart)):
            _record(self.using, ended)
        for job in sound:
            if not apart or job.method not in HTTP_METHODS:
                self.owed = [make(job)]
                self._record_owed()
        if len(jobs) < len(self.attempt_ids):
            _give_back(self.using, self.attempt_ids)
        return len(jobs)

    def leave(self, struck: BaseException) -> None:
        """Give back what was not sent, and record what was: all of it where the process lives on,
        else what ends in a moment.
        """
        database.close_all()  # what struck may have done so in the middle of an answer
        striker = _striker(struck)
        if self.jobs is None and striker is not None:
            self.jobs = claim.begin(self.using, self.attempt_ids, self.worker)
        for job in self.jobs or ():
            job.is_left = True
        ended = self.shift.ended if self.shift else []
        back = {job.attempt_id for job in self.jobs or () if not job.is_through} - {
            r.job.attempt_id for r in self.owed + ended
        }
        self.owed += [_left(job) for job in self.jobs or () if job.attempt_id in back]
        with suppress(DatabaseError, InterfaceError):
            self._record_owed()
        until = (
            time.monotonic() + LEAVING
            if isinstance(striker, SystemExit | KeyboardInterrupt)
            else math.inf
        )
        for some in self.shift.run(until=until) if self.shift else ():
            self.owed = [report for report in some if report.job.attempt_id not in back]
            with suppress(DatabaseError, InterfaceError):
                self._record_owed()

    def _record_owed(self) -> None:
        if self.owed:
            _record(self.using, self.owed)
            self.owed = []


def _striker(raised: BaseException | None) -> BaseException | None:
    """The time limit or signal that was raised, even if something went wrong because of it; None
    where this thread failed by itself, and would again.
    """
    while (
        raised is not None
        and isinstance(raised, Exception)
        and not isinstance(raised, SoftTimeLimitExceeded)
    ):
        raised = raised.__context__
    return raised


def _left(job: Job) -> Report:
    return Report(job, transitions.after_void(job, _now(job)), states.VOIDED, error=LEFT)


_waits: dict[
    str, float
] = {}  # by rule: seconds from the last request of this process to its answer


def _hands(jobs: Sequence[Job]) -> int:
    """How many threads begin: one for each call that has an instant of its own, connected and
    waiting when it comes, and enough for the others to be sent within a few milliseconds, as long
    as answers take as long as the last ones.
    """
    timed = [job for job in jobs if job.send_at is not None]
    waits = sum(_waits.get(job.rule_name, SLOW) for job in jobs if job.send_at is None)
    return len(timed) + round(waits / SOON)


class SlotGate(client.Gate):
    """The last door before the socket: waits for the instant to send at, and lets nothing through
    that may outlive the lease.
    """

    def __init__(self, job: Job) -> None:
        self._job, self.ends = job, job.lease_ends

    def wait(self) -> None:
        """Sleep until the slot opens, on the database's clock, erring late."""
        job = self._job
        if job.send_at is not None:
            while (left := job.clock.monotonic_at(job.send_at) - clocks.monotonic()) > 0:
                time.sleep(left)
        was_through, job.is_through = (
            job.is_through,
            True,
        )  # before it asks: who leaves says so first, and asks then
        if job.is_left and not was_through:
            job.is_through = False
            raise client.Dropped(LEFT)
        left = job.lease_ends - clocks.monotonic()
        if left <= 0:
            raise client.Dropped("the lease had ended before the first byte was sent")
        if self.sent_at is None and left < min(
            job.sound_rule.total_timeout, _waits.get(job.rule_name, SLOW)
        ):
            raise client.Dropped(
                "too little was left of the lease for an answer before the first byte was sent"
            )


def _make(job: Job) -> Report:
    """Make one call, and say what came of it. Never raises: what a hook or a handler raises,
    SystemExit too, is its call's.
    """
    try:
        disclosed = disclosure.disclose(job.method, job.params, rule=job.rule_name, key=job.key)
    except (InvalidCall, NotAllowed) as error:
        return Report(
            job,
            transitions.after_giving_up(job, str(error), _now(job)),
            states.GAVE_UP,
            error=str(error),
        )
    except BaseException as error:
        return _failed(
            job, str(error) if isinstance(error, CallQueueError) else texts.worded(error)
        )
    with at_work(disclosed.values, job.method, None if job.method in HTTP_METHODS else job.params):
        return results.scrubbed(_made(job, disclosed), disclosed.values)


def _made(job: Job, disclosed: disclosure.Disclosed) -> Report:
    gate = SlotGate(job)
    try:
        if job.method in HTTP_METHODS:
            return _request(job, disclosed, gate)
        return _handle(job, dict(disclosed.params), gate)
    except client.Dropped as dropped:
        return Report(
            job, transitions.after_void(job, _now(job)), states.VOIDED, error=str(dropped)
        )
    except BaseException as error:
        why = texts.worded(error)
        return _lost(job, why) if gate.sent_at is not None else _failed(job, why)


def _failed(job: Job, why: str, **seen: Any) -> Report:
    """Nothing was sent, or a handler failed: retried under the rule's Retry."""
    seen = seen or _ended(job)
    return Report(
        job,
        transitions.after_failure(job, job.rule, why, seen["ended_at"]),
        states.ERRORED,
        error=why,
        **seen,
    )


def _lost(job: Job, why: str, **seen: Any) -> Report:
    """Sent, and no answer: `on_lost` decides."""
    seen = seen or _ended(job)
    ending = transitions.after_loss(job, job.sound_rule, why, seen["ended_at"])
    told = states.LOST if ending.status == states.UNKNOWN else states.ERRORED
    return Report(job, ending, told, error=why, **seen)


def _request(job: Job, disclosed: disclosure.Disclosed, gate: SlotGate) -> Report:
    """Make an HTTP call within the rule's timeouts."""
    rule, settings, params = job.sound_rule, conf.current(), dict(disclosed.params)
    if rule.idempotency_header and job.method not in SAFE:
        headers = dict(params.get("headers") or {})
        headers.setdefault(rule.idempotency_header, job.idempotency_key)
        params["headers"] = headers
    policy = client.Policy(
        allowed_hosts=settings.allowed_hosts,
        allowed_networks=settings.allowed_networks,
        verify=rule.verify,
        redirects=job.redirects,
        closed_hosts=settings.book.closed_hosts(job.rule_name) if job.redirects else (),
        max_response_bytes=settings.max_response_bytes,
        secrets=disclosed.values,
        is_bound=disclosed.is_bound,
    )
    timeouts = client.Timeouts(
        connect=rule.connect_timeout, read=rule.read_timeout, total=rule.total_timeout
    )
    answer = client.request(job.method, params, policy=policy, timeouts=timeouts, gate=gate)
    report = _report_of(job, rule, answer)
    if answer.redirects and report.cost is None:
        report.cost = with_redirects(job.cost, answer.redirects)
    return report


def _report_of(job: Job, rule: Rule, answer: client.Answer) -> Report:
    seen = _ended(job)
    ended_at = seen["ended_at"]
    sent_at = seen["sent_at"] = (
        None if answer.sent_at is None else min(ended_at, job.clock.latest(answer.sent_at))
    )
    if answer.sent_at is not None:
        _waits[job.rule_name] = seen["ended_mono"] - answer.sent_at
    if answer.sent and job.first_sent_dt is None:
        job.first_sent_dt = sent_at or ended_at
    if answer.dropped and not answer.sent:
        return Report(
            job, transitions.after_void(job, ended_at), states.VOIDED, error=answer.error, **seen
        )
    if answer.refused:
        return Report(
            job,
            transitions.after_giving_up(job, answer.error, ended_at),
            states.GAVE_UP,
            error=answer.error,
            **seen,
        )
    response = answer.response
    if response is None or (answer.broken and transitions.is_idempotent(job.method)):
        if answer.sent:
            return _lost(job, answer.error or "the answer broke off", response=response, **seen)
        return _failed(job, answer.error, **seen)
    report = _answered(job, rule, ended_at, _cut(answer), **seen, response=response)
    report.cost = _settled(job, rule, response)
    if report.hold is None:
        advice = provider_limits.tightening(
            response.status_code, response.headers, now=ended_at, max_hold=rule.retry.max_hold
        )
        if advice is not None:
            report.hold = _hold(job, rule, advice, ended_at)
    return report


def _handle(job: Job, params: Mapping[str, Any], gate: SlotGate) -> Report:
    """Let the method's handler make the call. What it returns is kept as the attempt's response
    body.
    """
    gate.wait()
    context = Context(
        call_id=job.pk,
        rule=job.rule_name,
        key=job.key,
        attempt=job.number,
        idempotency_key=job.idempotency_key,
        deadline=datetime.now(UTC)
        + timedelta(seconds=max(0.0, job.lease_ends - clocks.monotonic())),
        is_last=job.failed_count + 1 >= job.sound_rule.retry.max_attempts,
    )
    if job.first_sent_dt is None:
        job.first_sent_dt = job.clock.latest(clocks.monotonic())
    result = find(job.method)(params, context)
    seen = _ended(job)
    verdict = result if isinstance(result, outcome.OUTCOMES) else Succeeded(result)
    return _judged(job, job.sound_rule, verdict, seen["ended_at"], **seen)


def _cut(answer: client.Answer) -> str:
    """Why the body is not whole; empty where it is."""
    if answer.broken:
        return answer.error or "the body broke off"
    return (
        (answer.error or f"the body was cut at {conf.current().max_response_bytes} bytes")
        if answer.truncated
        else ""
    )


def _answered(
    job: Job, rule: Rule, now: datetime, cut: str, *, response: Any, **seen: Any
) -> Report:
    """The report on an answer: by the rule's own verdict where that is one, else by the default and
    a note of what went wrong.
    """
    seen |= {"response": response}
    note = ""
    if rule.classify is not None:
        try:
            own = claim.imported(rule.classify)(response)
            if isinstance(own, outcome.OUTCOMES):
                return _judged(job, rule, own, now, note=cut, **seen)
            if own is not None:
                note = f"classify returned {type(own).__name__}, which is no outcome"
        except BaseException as error:
            note = f"classify failed: {texts.worded(error)}"
    return _judged(
        job,
        rule,
        _default(job, rule, response),
        now,
        note="; ".join(filter(None, [note, cut])),
        **seen,
    )


def _default(job: Job, rule: Rule, response: Any) -> Outcome:
    """The verdict of a rule that has none of its own."""
    return provider_limits.verdict(
        response.status_code,
        response.headers,
        response.content[:4096] if response.content else b"",
        retry_statuses=rule.retry.statuses,
        now=_now(job),
        max_hold=rule.retry.max_hold,
        method=job.method,
    )


def _judged(
    job: Job, rule: Rule, verdict: Outcome, now: datetime, note: str = "", **seen: Any
) -> Report:
    """The report that a verdict makes."""
    if isinstance(verdict, Succeeded):
        return Report(
            job,
            transitions.after_success(job, now),
            states.SUCCEEDED,
            result=verdict.result,
            error=note,
            **seen,
        )
    why = "; ".join(text for text in (verdict.why, note) if text not in (None, ""))
    if isinstance(verdict, GiveUp):
        return Report(
            job, transitions.after_giving_up(job, why, now), states.GAVE_UP, error=why, **seen
        )
    if isinstance(verdict, RetryLater):
        after = (
            verdict.after.total_seconds() if isinstance(verdict.after, timedelta) else verdict.after
        )
        return Report(
            job,
            transitions.after_failure(job, rule, why, now, after),
            states.ERRORED,
            error=why,
            **seen,
        )
    hold = _hold(job, rule, verdict, now)
    ending = transitions.after_throttle(job, rule, why, now, hold.until)
    return Report(job, ending, states.THROTTLED, error=why, hold=hold, **seen)


def _hold(job: Job, rule: Rule, verdict: HoldUntil, now: datetime) -> results.HoldOrder:
    """The hold a verdict asks for: until when, at most `max_hold`, and over which scope."""
    most = timedelta(seconds=rule.retry.max_hold)
    until, named = verdict.until, True
    if until is None:
        retry, named = rule.retry, False
        backoff = delay(
            job.throttled_count + 1,
            base=retry.base,
            factor=retry.factor,
            cap=retry.cap,
            jitter=retry.jitter,
            rand=1.0,
        )
        until = timedelta(seconds=backoff)
    if isinstance(until, int | float):
        until = timedelta(seconds=until)
    if isinstance(until, timedelta):
        until = now + min(max(until, timedelta(0)), most)
    until = min(until if until.tzinfo else until.replace(tzinfo=UTC), now + most)
    per, value = _scope(job, rule, verdict.scope)
    return results.HoldOrder(_sharers(job, per), per, value, until, verdict.why or "", extend=named)


def _scope(job: Job, rule: Rule, scope: str | None) -> tuple[str, str]:
    """What a hold covers: the scope named, or the narrowest that one of the rule's limits is per
    and the call has.
    """
    pers = [scope] if scope else [limit.per for limit in rule.limits]
    for per in pers:
        if per not in ("rule", "queue") and (value := key_part(job.key, per)):
            return per, value
    if "queue" in pers:
        return "queue", job.queue
    return "rule", ""


def _sharers(job: Job, per: str) -> tuple[str, ...]:
    """The rules that a hold concerns: those that share a budget of that scope with the call's
    rule.
    """
    budgets = conf.current().book.budgets.get(job.rule_name, ())
    sharing = {rule for b in budgets if b.limit.per == per and b.limit.name for rule in b.rules}
    return tuple(sorted(sharing | {job.rule_name}))


def _settled(job: Job, rule: Rule, response: Any) -> Any:
    """What the attempt is charged after all, where the rule settles; None to leave the charge as it
    is.
    """
    if rule.settle is None:
        return None
    from callqueue.sending.validation import check_cost

    try:
        cost = claim.imported(rule.settle)(response)
        return None if cost is None else check_cost(cost)
    except BaseException as error:
        events.tell(
            "attempt_failed", call_id=job.pk, reason=f"settle failed: {type(error).__name__}"
        )
        return None


def _unfit(job: Job) -> Report:
    """The report of an attempt that cannot be executed any more."""
    now = job.clock.latest(clocks.monotonic())
    if job.unfit == claim.EXPIRED:
        return Report(
            job, transitions.after_expiry(job, now), states.VOIDED, error="expired", ended_at=now
        )
    why = job.unfit or ""
    return Report(
        job, transitions.after_giving_up(job, why, now), states.VOIDED, error=why, ended_at=now
    )


def _record(using: str, reports: Sequence[Report]) -> None:
    """Record, and keep trying while the database is away and a lease still runs: the answers are in
    hand.

    A report that cannot be stored keeps none of the others from it.
    """
    pause = 0.05
    while True:
        try:
            _lay_holds(using, reports)
            results.record(using, reports)
            break
        except Exception as error:
            if _striker(error) is not None:
                raise
            if not database.may_pass(error):
                return _record_apart(using, reports, error)
            if database.in_transaction(
                using
            ):  # a test's: what broke it stays broken, and its connection is not ours to close
                raise
            if clocks.monotonic() + pause >= max(report.job.lease_ends for report in reports):
                events.tell(
                    "database_away", during="record", error=type(error).__name__, calls=len(reports)
                )
                raise
            events.tell("record_delayed", calls=len(reports), error=type(error).__name__)
            connections[using].close()
            time.sleep(pause)
            pause = min(2.0, pause * 2)
    breaker.observe(using, reports)


def _lay_holds(using: str, reports: Sequence[Report]) -> None:
    for report in reports:
        if report.hold is not None:
            results.lay(using, report, report.hold)
            report.hold = None


def _record_apart(using: str, reports: Sequence[Report], error: Exception) -> None:
    """Record each report by itself, and one that cannot be stored without its texts."""
    if len(reports) > 1:
        for report in reports:
            _record(using, [report])
    elif not reports[0].is_bare:
        _record(using, [results.without_texts(reports[0], error)])
    else:  # its lease decides
        job = reports[0].job
        events.tell(
            "record_failed",
            call_id=job.pk,
            rule=job.rule_name,
            attempt=job.number,
            error=type(error).__name__,
        )


def _give_back(using: str, attempt_ids: Sequence[int]) -> None:
    """Give back what somebody had locked when the others were begun, if it is free soon; else
    recovery does, past its lease.
    """
    for pause in LOCKED:
        if not database.persist(
            using, partial(claim.give_back, using, attempt_ids), during="begin"
        ):
            return
        time.sleep(pause)


def _now(job: Job) -> datetime:
    return job.clock.latest(clocks.monotonic())


def _ended(job: Job) -> dict[str, Any]:
    """That it has ended just now: on the database's clock as begin read it, and by this process's
    own.
    """
    return {"ended_at": _now(job), "ended_mono": clocks.monotonic()}
