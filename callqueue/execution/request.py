"""Makes one call: its HTTP request, or what its method's handler does, once its slot has opened.
And says what is kept of the answer, with nothing secret in it. Never retries by itself, and raises
nothing but a soft time limit: what else a hook or a handler raises is that call's failure.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from callqueue import answers, clocks, conf, states, texts, transitions
from callqueue.exceptions import CallQueueError, InvalidCall, NotAllowed
from callqueue.execution import claim, judging, starvation, wire
from callqueue.execution.connection import Starved
from callqueue.execution.recorder import NOTHING, drop_answer
from callqueue.execution.starvation import why_starved
from callqueue.handlers import HTTP_METHODS, SAFE, Context, find_handler
from callqueue.security.redaction import REDACTED, redact_headers
from callqueue.security.withholding import (
    WITHHELD,
    clean_of_secrets,
    payload_strings,
    tells,
    withhold,
    withholding,
)
from callqueue.sending.disclosure import disclose
from callqueue.transitions import Job, Result

# seconds that the first answer of a rule is expected to take, before this process knows better
SLOW = 1.0
LEFT = "the worker was stopped before the first byte was sent"
MOST_HEADERS, LONGEST_NAME, LONGEST_VALUE = 100, 200, 2000
MOST_OF_HEADERS = 32768  # characters of all headers that are looked at
EDGE = 1024  # characters, the end of which may be half of what redaction takes out
LONGEST_SIZE = 2**31 - 1
_WIDE = ("utf-16", "utf-32")
# characters of an answer from which on it is cleaned in its rule's turn
LARGE = 8192
NOT_KEPT = "[not kept: many answers of this rule are being cleaned]"
_turns: dict[str, threading.Lock] = {}
# by rule: seconds from the last request of this process until its answer was there, and was read
_waits: dict[str, tuple[float, float]] = {}


def expected_wait(rule: str) -> float:
    """Seconds until an answer is read, if it takes as long as the rule's last; SLOW at first."""
    return _waits.get(rule, (SLOW, SLOW))[1]


def expected_latency(rule: str) -> float:
    """Seconds until an answer is there, by the last one; a busy process may read it later."""
    return _waits.get(rule, (SLOW, SLOW))[0]


class SlotGate(wire.Gate):
    """Waits for the instant to send at, and lets nothing through that may outlive the lease."""

    def __init__(self, job: Job) -> None:
        self._job, self.ends_at = job, job.lease_ends_at

    def wait(self) -> None:
        """Wait until the job is begun and its slot open. Dropped: undone, or too little is left."""
        if self._job.clearance is not None and not self._job.clearance.wait():
            raise wire.Dropped("what has begun it was undone before the first byte was sent")
        self._sleep_until_slot()
        self.is_passed = True
        left = self._job.lease_ends_at - clocks.monotonic()
        if left <= 0:
            raise wire.Dropped("the lease had ended before the first byte was sent")
        if left < self._seconds_needed():
            raise wire.Dropped(
                "too little was left of the lease for an answer before the first byte was sent"
            )

    def _sleep_until_slot(self) -> None:
        opens = self._job.slot_opens_at()
        if opens is not None:
            while (left := opens - clocks.monotonic()) > 0:
                time.sleep(left)

    def _seconds_needed(self) -> float:
        job = self._job
        return min(job.sound_rule.total_timeout, expected_wait(job.call.rule))


def make(job: Job) -> Result:
    """Make one call, and say what came of it."""
    job.unfit = claim.import_error_of_hooks(job)
    if job.unfit is not None:
        return judging.result_of_unfit(job)
    try:
        call = job.call
        params, values = disclose(call.method, job.params, rule=call.rule, key=call.key)
    except (InvalidCall, NotAllowed) as error:
        return scrub_result(transitions.after_giving_up(job, str(error)), ())
    except BaseException as error:
        if want := why_starved(error):
            return _result_of_drop(job, Starved(want))
        is_own = isinstance(error, CallQueueError)
        why = str(error) if is_own else texts.worded(error)
        return scrub_result(judging.result_of_failure(job, why), ())
    if call.method in HTTP_METHODS and not values:  # no secret that the log of a library could tell
        return scrub_result(_make_unscrubbed(job, params), ())
    with withholding(values, call.method, job.params):
        return scrub_result(_make_unscrubbed(job, params), values)


def _make_unscrubbed(job: Job, params: Mapping[str, Any]) -> Result:
    job.gate = gate = SlotGate(job)
    try:
        if job.call.method in HTTP_METHODS:
            return judging.result_of_answer(job, _send_request(job, params, gate))
        return judging.result_of_value(job, _call_handler(job, dict(params), gate))
    except wire.Dropped as dropped:
        return _result_of_drop(job, dropped)
    except BaseException as error:
        if not gate.is_passed and (want := why_starved(error)):
            return _result_of_drop(job, Starved(want))
        why = texts.worded(error)
        is_sent = gate.sent_at is not None
        return judging.result_of_loss(job, why) if is_sent else judging.result_of_failure(job, why)


def _result_of_drop(job: Job, dropped: wire.Dropped) -> Result:
    """Voided: nothing was sent. A process that is to blame takes no other call for a while."""
    if isinstance(dropped, Starved):
        starvation.shortage.begin(str(dropped))
    return transitions.after_void(job, str(dropped))


def _send_request(job: Job, given: Mapping[str, Any], gate: SlotGate) -> wire.Answer:
    """Send it; note a shortage, or how long the answer took: so long the next is expected to."""
    rule = job.sound_rule
    timeouts = wire.Timeouts(
        connect=rule.connect_timeout, read=rule.read_timeout, total=rule.total_timeout
    )
    params, policy = _with_idempotency_key(job, given), _policy(job)
    answer = wire.request(job.call.method, params, policy=policy, timeouts=timeouts, gate=gate)
    if answer.starved:
        starvation.shortage.begin(answer.error)
    if answer.sent_at is not None:
        read_at = clocks.monotonic()
        came_at = read_at if gate.answered_at is None else gate.answered_at
        _waits[job.call.rule] = came_at - answer.sent_at, read_at - answer.sent_at
    return answer


def _with_idempotency_key(job: Job, given: Mapping[str, Any]) -> dict[str, Any]:
    """The params with the rule's idempotency header, or their own, where the method is not safe."""
    params, header = dict(given), job.sound_rule.idempotency_header
    own = params.get("headers") or {}
    if header and job.call.method not in SAFE and header.lower() not in map(str.lower, own):
        params["headers"] = {**own, header: str(job.call.idempotency_key)}
    return params


def _policy(job: Job) -> wire.Policy:
    settings = conf.current()
    return wire.Policy(
        allowed_hosts=settings.allowed_hosts,
        allowed_networks=settings.allowed_networks,
        verify=job.sound_rule.verify,
        max_response_bytes=settings.max_response_bytes,
    )


def _call_handler(job: Job, params: Mapping[str, Any], gate: SlotGate) -> object:
    """Pass the gate, and call the handler; what it returns. Sets when the call was first sent."""
    call, handler = job.call, find_handler(job.call.method)
    if want := why_starved():  # it would fail for that, and nobody could say how far it had got
        raise Starved(want)
    gate.wait()
    left = timedelta(seconds=max(0.0, job.lease_ends_at - clocks.monotonic()))
    context = Context(
        call_id=call.id,
        rule=call.rule,
        key=call.key,
        attempt=job.attempt.number,
        idempotency_key=str(call.idempotency_key),
        deadline=datetime.now(UTC) + left,
        is_last=call.failed_count + 1 >= job.sound_rule.retry.max_attempts,
    )
    if call.first_sent_dt is None:
        call.first_sent_dt = job.to_wall(job.ledger_time_now())
    answer = handler(params, context)
    if isinstance(answer, Coroutine):  # nothing was made yet, and nobody would await it
        answer.close()
        raise TypeError("the handler is async; write def, with asgiref's async_to_sync inside")
    return answer


# --- What is kept of an answer: cut before it is looked at, so that the work has a bound, and after
# it, so that no half of a secret or of a credential is left


def scrub_result(result: Result, values: tuple[str, ...]) -> Result:
    """The result, changed: no secret is in its texts, nor in what is kept of its answer, neither
    these values nor what looks like a credential. Its texts lose the call's own strings too: they
    are logged, and are not encrypted.
    """
    hold = result.hold or {"reason": ""}
    said = {result.error, result.why, hold["reason"]} - {""}
    payload = payload_strings(result.job.call.method, result.job.params) if said else []
    cleaned = {"": "", **{text: clean_of_secrets(text, values, payload) for text in said}}
    result.error, result.why = cleaned[result.error], cleaned[result.why]
    hold["reason"] = cleaned[hold["reason"]]
    try:
        result.kept = _columns_of_answer(result, values)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # of a response that a hook has changed
        drop_answer(result, error)
    return result


def _columns_of_answer(result: Result, values: tuple[str, ...]) -> Mapping[str, Any]:
    """The columns of what was answered. A large answer is cleaned in its rule's turn, since whoever
    wrote it decides what that costs; one whose turn does not come in time is not kept.
    """
    job, response = result.job, result.response
    if response is None:
        if result.outcome != states.SUCCEEDED:
            return NOTHING
        return {**NOTHING, **_columns_of_body(_json_bytes(result.value), "utf-8", result, values)}
    columns: dict[str, Any]
    columns, content = {"response_status": response.status_code}, response.content or b""
    headers, long, size = _cut_headers(response.headers)
    is_large = size + len(content) >= LARGE
    turn = _turns.setdefault(job.call.rule, threading.Lock()) if is_large else None
    left = max(0.0, (job.lease_ends_at - clocks.monotonic()) / 2)
    if turn is not None and not turn.acquire(timeout=left):
        size = min(len(content), LONGEST_SIZE)
        empty = {"response_headers": {}, "response_body": NOT_KEPT, "response_size": size}
        return {**columns, **empty, "response_form": answers.WITHHELD}
    try:
        columns["response_headers"] = _cleaned_headers(headers, long, values)
        return {**columns, **_columns_of_body(content, response.encoding, result, values)}
    finally:
        if turn is not None:
            turn.release()


def _cut_headers(given: Mapping[str, Any]) -> tuple[dict[str, str], set[str], int]:
    """The headers to look at, the names of those cut, and how many characters all have."""
    kept, long, size = dict[str, str](), set[str](), 0
    for name, value in islice(given.items(), MOST_HEADERS):
        name, text = str(name)[: LONGEST_NAME + EDGE], str(value)
        is_long, text = len(text) > LONGEST_VALUE + EDGE, text[: LONGEST_VALUE + EDGE]
        if size + len(name) + len(text) > MOST_OF_HEADERS:
            continue
        size += len(name) + len(text)
        kept[name] = text
        if is_long:
            long.add(name)
    return kept, long, size


def _cleaned_headers(
    kept: dict[str, str], long: set[str], values: tuple[str, ...]
) -> dict[str, str]:
    """These headers without secrets; `long`: the names of those that were cut."""
    if values and tells("\n".join([*kept, *kept.values()]), values):
        long = {withhold(name, values) for name in long}
        kept = {withhold(name, values): withhold(text, values) for name, text in kept.items()}
    kept = redact_headers(kept)
    for name in long & {name for name, text in kept.items() if text not in (REDACTED, WITHHELD)}:
        kept[name] = kept[name][:-EDGE]
    return {name[:LONGEST_NAME]: text[:LONGEST_VALUE] for name, text in kept.items()}


def _columns_of_body(
    content: bytes, charset: str | None, result: Result, values: tuple[str, ...]
) -> dict[str, Any]:
    """The columns of a body. Where a part of it is kept, the result's error is made to say so."""
    most = conf.current().kept_response_bytes(result.job.rule)
    size = min(len(content) + (not result.is_whole), LONGEST_SIZE)
    text = _without_secrets(content, charset, most, values)
    is_cut = len(content) > most or not result.is_whole
    if text is None:
        text, form = answers.pack_body(content[:most], charset, is_cut=is_cut)
    else:
        text = text.encode()[:most].decode("utf-8", "ignore")
        form = answers.SCRUBBED_CUT if is_cut else answers.SCRUBBED
    if len(content) > most > 0:
        note = f"{most} of {size} bytes of the answer are kept"
        result.error = f"{result.error}; {note}" if result.error else note
    return {"response_size": size, "response_body": text, "response_form": form}


def _without_secrets(
    content: bytes, charset: str | None, most: int, values: tuple[str, ...]
) -> str | None:
    """The beginning of the body as text, without the secrets in it; None: there is none in it."""
    if not values:
        return None
    start = content[: most + EDGE]
    text = texts.decoded(start, charset)
    is_told = tells(text, values)
    # letters of a charset that is falsely claimed would be the secret's bytes, two or four in one
    if not text.isascii() and (not is_told or texts.codec_of(charset).startswith(_WIDE)):
        as_it_stands = texts.storable(start.decode("latin-1"))
        if tells(as_it_stands, values):
            text, is_told = as_it_stands, True
    return withhold(text, values) if is_told else None


def _json_bytes(value: Any) -> bytes:
    """What a handler returned, as JSON, or its repr where it has no such form (a loop)."""
    if value is None:
        return b""
    try:
        return json.dumps(value, default=str).encode()
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(value)).encode()
