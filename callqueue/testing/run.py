"""Runs the queue in this process: releases calls and makes them, without broker and workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any
from unittest import mock

from callqueue import broker
from callqueue.testing.clock import active_clocks, forget_readings
from callqueue.testing.transport import active_transports, without_network

# Seconds that a run waits, really, for the next call: a limit per second, the first retries.
PATIENCE = 5.0
# Seconds that it waits under a clock that the test moves: a retry at once is due some milliseconds
# later.
SOON = 0.1
NEVER = 86400.0  # what ready_calls.next_due_in says where nothing is due


def run_callqueue(
    until_idle: bool = True,
    using: str = "default",
    *,
    max_passes: int = 1000,
    skip_waits: bool = False,
) -> int:
    """Release what may go and make those calls, in this process; the count of attempts made.

    Goes on until nothing may go within PATIENCE (5 seconds, really waited for); with
    `until_idle=False` makes one pass. What a limit, a hold or a retry keeps back for longer stays:
    `travel` to when it may go, or let `skip_waits` do so. Inside `travel` nothing is waited for.
    Celery tasks that are sent meanwhile run at once. AssertionError after `max_passes`, and for a
    request that no `fake_transport` answers; only one to this machine is really made.
    """
    if skip_waits and not active_clocks:
        raise RuntimeError(
            "skip_waits moves the clock:"
            " use it inside callqueue.testing.travel(), which puts it right again"
        )
    run = _Run(using)
    with _in_this_process(), without_network(), closing(run):
        for _ in range(max_passes):
            made = run.make_pass()
            if not until_idle:
                return run.attempts
            if made or run.waits_a_moment() or (skip_waits and run.skips_a_wait()):
                continue
            return run.attempts
    raise AssertionError(
        f"the queue was not idle after {max_passes} passes: does a call send another without end?"
    )


class _Run:
    """One run: counts attempts, and knows when more may go."""

    def __init__(self, using: str) -> None:
        from callqueue.dispatch.dispenser import Dispenser
        from callqueue.dispatch.release_pass import Pass
        from callqueue.dispatch.rule_group import RuleGroup

        self.using, self.attempts = using, 0
        # Seconds until a blocked call of these rules may go, by the last pass over them.
        wakes = self.wakes = dict[tuple[str, ...], float | None]()

        class Watched(Dispenser):
            def _release(self, group: RuleGroup) -> Pass:
                done = super()._release(group)
                wakes[group.rules] = done.opens_in
                return done

        self.dispenser = Watched(using, publish=self._execute)

    def make_pass(self) -> int:
        """Release once and make what was released; the count of attempts."""
        before = self.attempts
        self.dispenser.run_once()
        return self.attempts - before

    def _execute(self, using: str, messages: Sequence[tuple[str, list[int]]]) -> bool:
        from callqueue.execution import executor

        for _, ids in messages:
            self.attempts += len(ids)
            executor.execute(using, ids)
            for transport in active_transports:
                transport.check()
        return True

    def close(self) -> None:
        """No dispenser runs any more."""
        self.dispenser.leave()

    def waits_a_moment(self) -> bool:
        """Wait for what may go soon; False where nothing may."""
        left = self._next_in()
        if left is None or left > (SOON if active_clocks else PATIENCE):
            return False
        time.sleep(max(0.001, left))
        return True

    def skips_a_wait(self) -> bool:
        """Travel to when the next call may go; False where none ever will."""
        left = self._next_in()
        if left is None:
            return False
        active_clocks[-1].forward(max(0.001, left + 0.001))
        return True

    def _next_in(self) -> float | None:
        """Seconds until a call is due, or a limit or hold lets one go; None without such a call."""
        from callqueue.ledger import ready_calls

        due = ready_calls.next_due_in(self.using)
        waits = [] if due >= NEVER else [due]
        waits += [
            wake
            for rules, wake in self.wakes.items()
            if wake is not None and ready_calls.rules_with_ready(self.using, rules)
        ]
        return min(waits, default=None)


@contextmanager
def _in_this_process() -> Iterator[None]:
    """No call is released ahead of its slot, for nobody waits for it here; Celery tasks run at
    once; time began just now.
    """
    from celery import current_app

    from callqueue.dispatch import release_pass

    forget_readings()
    with (
        mock.patch.object(release_pass, "LEAD", 0.0),
        mock.patch.object(current_app._get_current_object(), "send_task", _run_instead_of_sending),
    ):
        yield


def _run_instead_of_sending(name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
    """The broker's stand-in: runs the task here and now. One that is not registered is dropped."""
    from celery import current_app

    task = broker.registered(current_app._get_current_object(), name)
    if task is None:
        return current_app.AsyncResult(options.get("task_id") or "unknown")
    kept = ("task_id", "link", "link_error", "headers", "priority")
    given = {key: options[key] for key in kept if options.get(key) is not None}
    return task.apply(args, kwargs, throw=False, **given)
