"""Makes one call: its HTTP request, or what its method's handler does, once its slot has opened.

In: a job that is fit. Out: its result, with nothing secret in its texts. Never retries by itself,
and never raises: whatever a hook or a handler raises is that call's failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from callqueue import clocks, conf, texts, transitions
from callqueue.exceptions import CallQueueError, InvalidCall, NotAllowed
from callqueue.execution import judging, starvation, wire
from callqueue.execution.recorder import scrubbed
from callqueue.execution.starvation import starved
from callqueue.execution.trip import Starved
from callqueue.handlers import HTTP_METHODS, SAFE, Context, find
from callqueue.security.withholding import at_work
from callqueue.sending import disclosure
from callqueue.sending.disclosure import Disclosed
from callqueue.transitions import Job, Result

# seconds that the first answer of a rule is expected to take, before this process knows better
SLOW = 1.0
LEFT = "the worker was stopped before the first byte was sent"
# by rule: seconds from the last request of this process to its answer
_waits: dict[str, float] = {}


def expected_wait(rule: str) -> float:
    """For how many seconds an answer is waited for, as long as it takes as long as the last one."""
    return _waits.get(rule, SLOW)


class SlotGate(wire.Gate):
    """The last door before the socket: waits for the instant to send at, and lets nothing through
    that may outlive the lease.
    """

    def __init__(self, job: Job) -> None:
        self._job, self.ends = job, job.lease_ends

    def wait(self) -> None:
        """Sleep until the slot opens, on the database's clock, erring late."""
        self._sleep()
        self._job.is_through = True
        left = self._job.lease_ends - clocks.monotonic()
        if left <= 0:
            raise wire.Dropped("the lease had ended before the first byte was sent")
        if left < self._needed():
            raise wire.Dropped(
                "too little was left of the lease for an answer before the first byte was sent"
            )

    def _sleep(self) -> None:
        opens = self._job.slot_opens()
        if opens is not None:
            while (left := opens - clocks.monotonic()) > 0:
                time.sleep(left)

    def _needed(self) -> float:
        job = self._job
        return min(job.sound_rule.total_timeout, expected_wait(job.rule_name))


def make(job: Job) -> Result:
    """Make one call, and say what came of it. Never raises: what a hook or a handler raises,
    SystemExit too, is its call's.
    """
    try:
        disclosed = disclosure.disclose(job.method, job.params, rule=job.rule_name, key=job.key)
    except (InvalidCall, NotAllowed) as error:
        return scrubbed(transitions.after_giving_up(job, str(error)), ())
    except BaseException as error:
        if want := starved(error):
            return _given_back(job, Starved(want))
        is_own = isinstance(error, CallQueueError)
        why = str(error) if is_own else texts.worded(error)
        return scrubbed(judging.failed(job, why), ())
    with at_work(disclosed.values, job.method, job.params):
        return scrubbed(_made(job, disclosed), disclosed.values)


def _made(job: Job, disclosed: Disclosed) -> Result:
    gate = SlotGate(job)
    try:
        if job.method in HTTP_METHODS:
            return judging.of_answer(job, _requested(job, disclosed, gate))
        return judging.of_value(job, _handled(job, dict(disclosed.params), gate))
    except wire.Dropped as dropped:
        return _given_back(job, dropped)
    except BaseException as error:
        if not job.is_through and (want := starved(error)):
            return _given_back(job, Starved(want))
        why = texts.worded(error)
        return judging.lost(job, why) if gate.sent_at is not None else judging.failed(job, why)


def _given_back(job: Job, dropped: wire.Dropped) -> Result:
    """Nothing was sent. Where this process is to blame, it takes no other call for a while."""
    if isinstance(dropped, Starved):
        starvation.pause.begin(str(dropped))
    return transitions.after_void(job, str(dropped))


def _requested(job: Job, disclosed: Disclosed, gate: SlotGate) -> wire.Answer:
    """Make an HTTP call within the rule's timeouts."""
    rule = job.sound_rule
    timeouts = wire.Timeouts(
        connect=rule.connect_timeout, read=rule.read_timeout, total=rule.total_timeout
    )
    params, policy = _with_idempotency_key(job, disclosed.params), _policy(job)
    job.gate = gate
    answer = wire.request(job.method, params, policy=policy, timeouts=timeouts, gate=gate)
    if answer.starved:
        starvation.pause.begin(answer.error)
    if answer.sent_at is not None:
        _waits[job.rule_name] = clocks.monotonic() - answer.sent_at
    return answer


def _with_idempotency_key(job: Job, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, with the rule's idempotency header where the method changes something and the
    call names no such header itself, in whatever case.
    """
    params, header = dict(given), job.sound_rule.idempotency_header
    own = params.get("headers") or {}
    if header and job.method not in SAFE and header.lower() not in map(str.lower, own):
        params["headers"] = {**own, header: job.idempotency_key}
    return params


def _policy(job: Job) -> wire.Policy:
    settings = conf.current()
    return wire.Policy(
        allowed_hosts=settings.allowed_hosts,
        allowed_networks=settings.allowed_networks,
        verify=job.sound_rule.verify,
        max_response_bytes=settings.max_response_bytes,
    )


def _handled(job: Job, params: Mapping[str, Any], gate: SlotGate) -> object:
    """Let the method's handler make the call; what it returns."""
    handler = find(job.method)
    if want := starved():  # it would fail for that, and nobody could say how far it had got
        raise Starved(want)
    gate.wait()
    left = timedelta(seconds=max(0.0, job.lease_ends - clocks.monotonic()))
    context = Context(
        call_id=job.pk,
        rule=job.rule_name,
        key=job.key,
        attempt=job.number,
        idempotency_key=job.idempotency_key,
        deadline=datetime.now(UTC) + left,
        is_last=job.failed_count + 1 >= job.sound_rule.retry.max_attempts,
    )
    if job.first_sent_dt is None:
        job.first_sent_dt = job.now()
    return handler(params, context)
