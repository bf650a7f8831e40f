"""Runs the queue in this process: releases calls and makes them, without broker and workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any
from unittest import mock

from asgiref.sync import sync_to_async

from callqueue import broker
from callqueue.testing.clock import active_clocks, forget_readings
from callqueue.testing.transport import active_transports, without_network
from callqueue.texts import suggest

# Seconds that a run waits, really, for the next call: a limit per second, the first retries.
PATIENCE = 5.0
# Seconds that it waits under a clock that the test moves: a retry at once is due some milliseconds
# later.
SOON = 0.1
NEVER = 86400.0  # what ready_calls.next_due_in says where nothing is due


class CallbackFailed(AssertionError):
    """A callback raised, or no task is registered under its name."""


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
    Celery tasks that are sent meanwhile run at once. CallbackFailed, once all have run, where a
    callback raised or is not registered. AssertionError after `max_passes`, and for a request that
    no `fake_transport` answers; only one to this machine is really made.
    """
    if skip_waits and not active_clocks:
        raise RuntimeError(
            "skip_waits moves the clock:"
            " use it inside callqueue.testing.travel(), which puts it right again"
        )
    run = _Run(using)
    with _in_this_process() as tasks, without_network(), closing(run):
        for _ in range(max_passes):
            made = run.make_pass()
            if not until_idle or not (made or run.wait_or_travel(skip_waits)):
                tasks.raise_failures()
                return run.attempts
        tasks.raise_failures()
    raise AssertionError(
        f"the queue was not idle after {max_passes} passes: does a call send another without end?"
    )


arun_callqueue = sync_to_async(run_callqueue)  # in async tests


class _Run:
    """Passes of a dispenser over all rules, whose calls are made here as they are released."""

    def __init__(self, using: str) -> None:
        from callqueue.dispatch.dispenser import Dispenser
        from callqueue.dispatch.next_look import RuleGroup
        from callqueue.dispatch.release_pass import Pass

        self.using, self.attempts = using, 0  # those made
        # Seconds until a blocked call of these rules may go, by the last pass over them.
        wakes = self.wakes = dict[tuple[str, ...], float | None]()

        class Watched(Dispenser):
            def _release(self, group: RuleGroup) -> Pass:
                done = super()._release(group)
                wakes[group.rules] = done.opens_in
                return done

        self.dispenser = Watched(using, publish=self._execute)
        self.close = self.dispenser.leave

    def make_pass(self) -> int:
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

    def wait_or_travel(self, skip: bool) -> bool:
        """Wait for what may go soon, or if `skip` travel to what may later; False: neither."""
        from callqueue.ledger import ready_calls

        due = ready_calls.next_due_in(self.using)
        opening = [
            opens_in
            for rules, opens_in in self.wakes.items()
            if opens_in is not None and ready_calls.rules_with_ready(self.using, rules)
        ]
        left = min([due, *opening])
        if left <= (SOON if active_clocks else PATIENCE):
            time.sleep(max(0.001, left))
        elif skip and (opening or due < NEVER):
            active_clocks[-1].forward(left + 0.001)
        else:
            return False
        return True


class _Tasks:
    """Celery's stand-in: runs tasks here and now, and keeps what went wrong with callbacks."""

    def __init__(self) -> None:
        from celery import current_app

        self.app: Any = current_app._get_current_object()
        self.failures: list[str] = []
        self.error: BaseException | None = None

    def raise_failures(self) -> None:
        if self.failures:
            raise CallbackFailed("\n".join(self.failures)) from self.error

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Run a task here; a failure stays in its result. An unregistered one is dropped."""
        task = broker.registered_task(self.app, name)
        if task is None:
            return self.app.AsyncResult(options.get("task_id") or "unknown")
        kept = ("task_id", "link", "link_error", "headers", "priority")
        given = {key: options[key] for key in kept if options.get(key) is not None}
        return task.apply(args, kwargs, throw=False, **given)

    def send_beside(self, name: str, args: tuple[Any, ...], *, queue: str = "") -> None:
        broker.registered_task(self.app, name)(*args)

    def send_callback(self, app: Any, name: str, args: tuple[Any, ...]) -> None:
        """Run a callback with `(call_id, status)`; one that queues itself is left to it."""
        from celery import Task

        task, told = broker.registered_task(app, name), f"callback {name} of call {args[0]}"
        if task is None:
            own = [known for known in app.tasks if not known.startswith("celery.")]
            why = f"no task is registered under that name{suggest(name, own)}"
            self.failures.append(f"{told}: {why}")
        elif type(task).apply_async is not Task.apply_async:
            task.apply_async(args)
        elif (done := task.apply(args, throw=False)).failed():
            raised = f"{type(done.result).__name__}: {done.result}"
            self.failures.append(f"{told} ({args[1]}) raised {raised}\n{done.traceback}")
            self.error = self.error or done.result


@contextmanager
def _in_this_process() -> Iterator[_Tasks]:
    """No call is released ahead of its slot, for nobody waits for it here; Celery tasks run at
    once, in this thread, which alone sees the test's transaction; time began just now.
    """
    from callqueue import aside
    from callqueue.dispatch import release_pass

    forget_readings()
    tasks = _Tasks()
    with (
        mock.patch.object(release_pass, "LEAD", 0.0),
        mock.patch.object(aside, "within", lambda seconds, name, work: work()),
        mock.patch.object(broker, "send_beside", tasks.send_beside),
        mock.patch.object(broker, "send_by_name", tasks.send_callback),
        mock.patch.object(tasks.app, "send_task", tasks.send_task),
    ):
        yield tasks
