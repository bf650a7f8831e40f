"""Judges what became of each call, by the rows of two tables and by what the provider was sent."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.provider import Request
from tests.simulation.scheduler import MICRO, Process
from tests.simulation.settings_of_runs import CallOf

if TYPE_CHECKING:
    from tests.simulation.oracle import Judge

NEW, DONE, UNKNOWN = 0, 3, 7
FINAL = (3, 4, 5, 6, 7)
TRIES = 3  # as settings of runs say
PAUSE = round(0.08 * MICRO)  # after a first error, a tenth of a second but for what clocks err
SILENT = "the worker fell silent"  # as recovery says
LEASE, LEASE_OF_PERMITS = 2 * MICRO - 10, round(1.2 * MICRO) - 10  # at least, as settings say
PATIENT = 1 * MICRO  # microseconds for which an answer is waited for at least
RETRYABLE = (408, 425, 429, 500, 502, 503, 504)
EXACT = 2  # microseconds by which two clocks are rounded


class Ended(NamedTuple):
    """An attempt at the end of a run, as its row says. Instants are microseconds of true time."""

    call: int
    why: str
    outcome: str
    started_at: int | None
    send_at: int | None
    sent_at: int | None
    finished_at: int | None


class Fates:
    """What is wrong with the ends of calls."""

    def __init__(self, facts: Judge) -> None:
        self.facts = facts
        self.is_pruned = False  # cleanup has deleted calls

    def judge(
        self,
        requests: list[Request],
        attempts: dict[int, Ended],
        calls: dict[int, tuple[int, str, bool]],
    ) -> None:
        outcome = {pk: one.outcome for pk, one in attempts.items()}
        of_call: dict[str, list[Request]] = defaultdict(list)
        made: dict[int, int] = defaultdict(int)
        for request in requests:
            if request.counted_at is not None:
                of_call[request.token].append(request)
                made[request.attempt or 0] += 1
                if outcome.get(request.attempt or 0) == "voided":
                    self.facts.complain(f"attempt {request.attempt} was voided, and made")
            if request.attempt in attempts and not self.facts.was_set:
                self._judge_instants(request, attempts[request.attempt or 0])
        self._judge_room(requests)
        self._judge_patience(requests)
        self._judge_losses(attempts)
        for pk, count in made.items():
            if pk and count > 1:
                self.facts.complain(f"attempt {pk} was made {count} times")
        for token, sent in of_call.items():
            self._judge_repeats(self.facts.calls[token], sent)
        for call in self.facts.calls.values():
            if call.is_committed and not call.is_gone and call.pk is not None:
                self._judge_end(call, calls.get(call.pk), of_call.get(call.token, []))

    def _judge_room(self, requests: list[Request]) -> None:
        """A maker has no more calls on the wire than it has room for, and none when it ends."""
        for one in requests:
            if one.process.kind == "maker":
                if one.over_at > self.facts.left.get(one.process, float("inf")):
                    self.facts.complain(f"{one.process.name} ended, and left {one.token}")
                own = [x for x in requests if x.process is one.process]
                flying = sum(x.sent_at <= one.sent_at < x.over_at for x in own)
                if flying > one.process.config.calls_per_slot:
                    self.facts.complain(f"{one.process.name} has {flying} calls on the wire")

    def _judge_patience(self, requests: list[Request]) -> None:
        """Who makes a call waits for its answer, while there is one to come."""
        for one in requests:
            ends = one.given_up_at
            if ends is None or one.process.kind not in ("worker", "maker"):
                continue
            is_to_come = one.left_at is None or one.left_at > ends
            is_early = ends - one.sent_at < PATIENT and ends < self.facts.over_at
            if is_to_come and is_early and self._is_well(one.process):
                took = (ends - one.sent_at) / MICRO
                self.facts.complain(f"{one.token} was given up after {took:.3f} s")

    def _judge_instants(self, request: Request, attempt: Ended) -> None:
        """What the ledger says of when something was, it errs late; and nothing is sent before its
        slot opens, nor after its end.
        """
        facts, what = self.facts, f"attempt {request.attempt} of {request.token}"
        is_its_own = request.process.kind != "asker" or self._is_well(request.process)
        if attempt.send_at is not None and request.sent_at < attempt.send_at - EXACT:
            facts.complain(f"{what} was sent before its slot had opened")
        if attempt.finished_at is None or attempt.outcome == "voided":
            return
        if is_its_own and request.sent_at > attempt.finished_at + EXACT:
            facts.complain(f"{what} was sent after it had ended")
        if attempt.sent_at is not None and attempt.sent_at < request.sent_at - EXACT:
            facts.complain(f"{what} is said to be sent before it was")
        told_at = request.told_at
        if told_at and attempt.outcome != "lost" and attempt.finished_at < told_at - EXACT:
            facts.complain(f"{what} is said to be answered before it was")

    def _judge_losses(self, attempts: dict[int, Ended]) -> None:
        """Nobody is taken for dead before his lease has ended, which begins with his slot; and who
        had a permit is not given it again.
        """
        last = {one.call: pk for pk, one in attempts.items()}
        for pk, one in attempts.items():
            if one.outcome == "lost" and one.call not in self.facts.by_pk and pk < last[one.call]:
                self.facts.complain(f"attempt {pk} of a permit was lost, and another was made")
            release = self.facts.releases.get(pk)
            if one.why.startswith(SILENT) and release is not None and not self.facts.was_set:
                lasted = (one.finished_at or 0) - max(one.started_at or 0, one.send_at or 0)
                if lasted < (LEASE if release.call in self.facts.by_pk else LEASE_OF_PERMITS):
                    self.facts.complain(f"attempt {pk} was lost after {lasted / MICRO:.3f} s")

    def _is_well(self, process: Process) -> bool:
        """Whether it was never killed, slow, or cut off: then its answers are not lost."""
        return process not in self.facts.killed and process not in self.facts.hampered

    def _is_a_makers(self, call: CallOf) -> bool:
        """Whether only makers have released it, which were alive and well all the time."""
        by = {one.by for one in self.facts.releases.values() if one.call == call.pk}
        is_well = not by & (self.facts.hampered | self.facts.killed)
        return is_well and all(process.kind == "maker" for process in by)

    def _judge_repeats(self, call: CallOf, sent: list[Request]) -> None:
        errors = [one for one in sent if one.told_at is not None and one.status == 500]
        are_heard = all(self._is_well(one.process) for one in errors)
        if len(errors) > TRIES and are_heard and not call.requeued_at:
            self.facts.complain(f"{call.token} is made again after {len(errors) - 1} errors")
        for before, after in pairwise(sent):
            again = after.counted_at or 0
            if again < before.over_at:
                self.facts.complain(f"{call.token} is on the wire twice at {again / MICRO:.3f}")
            if any((before.counted_at or 0) <= at <= again for at in call.requeued_at):
                continue
            if before.told_at is not None and before.status in RETRYABLE:
                self._judge_pause(before, before.told_at, again)
                continue
            is_safe = call.method in ("get", "put", "delete") or call.may_repeat
            is_over = before.told_at is not None and before.status is not None
            if not is_safe:
                self.facts.complain(f"{call.method} {call.token} is made twice")
            elif is_over and self._is_well(before.process):
                self.facts.complain(f"{call.token} was answered {before.status}, and is made again")

    def _judge_pause(self, before: Request, told_at: int, again: int) -> None:
        """Half of the wait after an error is certain, however the clock was set before it."""
        was_set = any(told_at < at <= again for at, _ in self.facts.jumps)
        if before.status == 500 and again - told_at < PAUSE and not was_set:
            waited = (again - told_at) / MICRO
            self.facts.complain(f"{before.token} is made again {waited:.3f} s after an error")

    def _judge_end(
        self, call: CallOf, row: tuple[int, str, bool] | None, sent: list[Request]
    ) -> None:
        if row is None and self.is_pruned:
            return  # cleanup deletes what has ended
        if row is None:
            self.facts.complain(f"{call.token} (call {call.pk}) is lost: it has no row")
            return
        status, why, is_later = row
        if status == NEW and is_later and self.facts.was_set:
            return  # it was sent while the clock was ahead for a moment, and nobody saw that
        if status not in FINAL:
            self.facts.complain(
                f"{call.token} (call {call.pk}) never ends: status {status}, {why!r}"
            )
        if status == UNKNOWN and not sent and self._is_a_makers(call):
            self.facts.complain(f"{call.token} is said to be made perhaps, and was never sent")
        if status == DONE and not any(r.status and 200 <= r.status < 300 for r in sent):
            self.facts.complain(f"{call.token} is done, and was never answered so")
        good = [r for r in sent if r.told_at and r.status and r.status < 300]
        is_heard = good and all(self._is_well(one.process) for one in good)
        if status in FINAL and status != DONE and is_heard and not call.requeued_at:
            self.facts.complain(
                f"{call.token} was answered {good[0].status}, and is {status}: {why!r}"
            )
