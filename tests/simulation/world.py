"""One run: what it begins with, and what happens in it, from beginning to end.

In: a seed, how long it is, and which of the misfortunes that it draws to leave out. Out: a `Run`:
the judge's complaints, the story, and its digest.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from tests.simulation import (
    application,
    judged_use,
    misfortunes,
    scenes,
    settings_of_runs,
)
from tests.simulation.broker import Broker
from tests.simulation.cast import Cast
from tests.simulation.drain import drain
from tests.simulation.ending import Ending
from tests.simulation.misfortunes import Misfortune
from tests.simulation.oracle import Judge
from tests.simulation.probe import probe
from tests.simulation.provider import MOODS, Provider, Request
from tests.simulation.scheduler import MICRO, Scheduler, Step, Stuck, Task
from tests.simulation.stage import Stage
from tests.simulation.statements import Statements

LATE_BUCKETS = MICRO  # what a tallied bucket takes to leave now has ended within this
PATIENCE = 45.0  # seconds after the misfortunes within which every call must have ended


@dataclass
class Run:
    """What came of a seed."""

    seed: int
    scene: str = ""
    complaints: list[str] = field(default_factory=list)
    misfortunes: list[Misfortune] = field(default_factory=list)
    story: list[Step] = field(default_factory=list)
    digest: int = 0
    statements: int = 0
    requests: int = 0
    seconds: float = 0.0
    sessions: int = 0  # that processes had at a time


class World:
    """One run."""

    def __init__(
        self,
        stage: Stage,
        seed: int,
        leave_out: Collection[int] = (),
        calls: int | None = None,
    ) -> None:
        self.stage, self.seed, self.length, self._calls = stage, seed, scenes.length_of(seed), calls
        self.scheduler = Scheduler(seed)
        stage.doors.begin(self.scheduler)
        draw = self.scheduler.stream("scene")
        self.scene = scenes.drawn(draw)
        self.configs = {False: stage.config(self.scene.rules), True: stage.config(self.scene.other)}
        self.judge = Judge()
        self.is_calm = self.was_cut = False
        self._tokens = 0
        self.broker = stage.broker = Broker(stage.doors, draw.choice([0.0, 0.1, 0.3]))
        self.provider = stage.wire.provider = Provider(stage.doors, draw.choice(MOODS))
        self.provider.transit_of = self._transit_of
        self.provider.on_count = self._find_attempt
        self.statements = Statements(self)
        self.cast = Cast(self)
        self.ending = Ending(self)
        self.misfortunes = misfortunes.drawn(self, leave_out)
        if any(limit.kind == "calendar" for limit in self.scene.limits()):
            stage.doors.clock_set = round(draw.uniform(0, 2) * MICRO)
            self.judge.calendar = stage.doors.clock_set

    def token(self, kind: str) -> str:
        """A name for one more call."""
        self._tokens += 1
        return f"{kind}{self._tokens}"

    # --- The run

    def run(self) -> Run:
        server = self.stage.server
        self.statements.connect()
        server.begin()
        rings = server.rings
        try:
            with self._tallied():
                self._play()
        except Stuck as stuck:
            self.judge.complain(str(stuck))
        finally:
            self.is_calm, self.judge.over_at = True, self.scheduler.now
            self.scheduler.end()
            self.stage.database.end()
        if server.rings > rings:
            self.judge.complain("a deadlock")
        self.ending.judge()
        return Run(
            self.seed, self.scene.name, self.judge.complaints, self.misfortunes,
            self.scheduler.story, self.scheduler.digest, self.statements.count,
            len(self.provider.requests), self.scheduler.now / MICRO, server.most,
        )  # fmt: skip

    @contextmanager
    def _tallied(self) -> Iterator[None]:
        """Small windows and buckets are tallied too, where the scene says so; in some runs they are
        counted anew every few seconds, as they are each hour. And no period is a multiple of a
        review's.
        """
        from callqueue.dispatch import next_look
        from callqueue.ledger import tallies

        small = {"COARSE": self.scene.coarse, "ROOMY": 0, "SHORT": 0, "SHORT_UNITS": 0}
        if self.scheduler.stream("recounts").random() < 0.3:
            small["RECOUNT"] = 3 * MICRO
        with ExitStack() as patches:
            patches.enter_context(patch.object(next_look, "REVIEW", judged_use.REVIEW))
            if self.scene.is_tallied:
                patches.enter_context(patch.multiple(tallies, **small, LATE=LATE_BUCKETS))
                suits = classmethod(lambda cls, limit: limit.is_keyed)
                patches.enter_context(patch.object(tallies.BucketTallies, "suits", suits))
            yield

    def _play(self) -> None:
        length, draw = self.length, self.scheduler.stream("play")
        self.cast.enter()
        application.arrange(self, self._calls)
        for number in range(draw.choice(length.permits)):
            self.cast.ask(self.scheduler.stream(f"permit {number}"))
        for one in self.misfortunes:
            misfortunes.arrange(self, one)
        self.scheduler.run(length.troubled)
        self.ending.calm_down()
        self.scheduler.run(length.troubled + PATIENCE, self.ending.is_done)
        is_probed = draw.random() < length.probed
        if is_probed and not self.judge.complaints and self.ending.is_done():
            probe(self)
            if self.length is scenes.LONG and not self.judge.complaints:
                drain(self)
                self.ending.look_again()
                self.scheduler.run(self.scheduler.now / MICRO + PATIENCE, self.ending.is_done)

    # --- What the provider is told, and what fails

    def _transit_of(self, token: str) -> float:
        """For how long a request may be on its way, so that no limit needs to see more."""
        call = self.judge.calls[token]
        limits = list(self.scene.limits(call.rule))
        if limits and all(one.strict or one.kind == "once" for one in limits):
            return 0.4
        return 0.9 * min((one.jitter for one in limits), default=settings_of_runs.JITTER)

    def _find_attempt(self, request: Request) -> None:
        """Which attempt it is: one that its worker has a message of, or its maker has released."""
        call = self.judge.calls[request.token]
        if self.scene.settles(call.rule) and call.pk is not None:
            # A forecast knows no more of a call than its charge.
            is_more = self.scene.overspends and not self.is_calm
            most = call.charge("tokens") * (3 if is_more else 1)
            request.used = self.scheduler.stream("used").randint(1, max(1, most))
        if request.attempt is not None:
            return  # a permit's
        who = request.process
        ids = {pk for message in who.all_messages for pk in message.ids}
        own = [
            one.pk
            for one in self.judge.releases.values()
            if one.call == call.pk and (one.pk in ids or (one.by is who and who.kind == "maker"))
        ]
        if not own:
            self.judge.complain(f"{request.token} was sent without an attempt")
            return
        request.attempt = max(own)

    def fell(self, task: Task, error: BaseException) -> None:
        """A task ended by an error: of that, only a database that was cut under it is expected."""
        text = f"{task.name} failed: {type(error).__name__}: {str(error)[:300]}"
        self.scheduler.tell(text)
        if not (self.was_cut and "closed the connection" in str(error)):
            self.judge.complain(text + _where(error))


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{f.name}:{f.lineno}" for f in frames if "/callqueue/" in f.filename]
    return f" ({' > '.join(own[-4:])})"
