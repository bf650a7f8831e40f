"""Kills or freezes the process it is loaded into, at a chosen point of the core: what no signal
from outside can time.

In: CALLQUEUE_TEST_SABOTAGE, a folder. A file `<point>` there names what is to happen ("child",
"group", "stop") and how many times, one word a line; each line is used up once, whatever
process comes by. Workers and dispensers of a test load it as a Django app (see tests.faults.stage).
Nothing of it is in the package.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from django.apps import AppConfig

POINTS = (
    "before-begin",
    "before-socket",
    "before-record",
    "inside-record",
    "after-record",
    "inside-release",
    "before-commit",
    "before-clearance",
    "before-publish",
    "inside-publish",
    "after-publish",
)


def plant(folder: Path, point: str, *deeds: str) -> None:
    """From now on, whoever comes by `point` does the next of these deeds."""
    assert point in POINTS, point
    for number, deed in enumerate(deeds):
        (folder / f"{point}.{number}.{deed}").touch()


def left(folder: Path) -> list[str]:
    """The deeds that nobody has done yet."""
    return sorted(path.name for path in folder.iterdir())


def strike(point: str) -> None:
    """Do the next deed planted at this point, if any; one process only gets it."""
    folder = Path(os.environ["CALLQUEUE_TEST_SABOTAGE"])
    for path in sorted(folder.glob(f"{point}.*")):
        with suppress(FileNotFoundError):
            path.unlink()
            DEEDS[path.suffix[1:]]()
            return


def _kill_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _stop_group() -> None:
    """The others, and then this very thread, which else would go on for a moment."""
    own, group = os.getpid(), os.getpgrp()
    for pid in [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]:
        with suppress(ProcessLookupError):
            if pid != own and os.getpgid(pid) == group:
                os.kill(pid, signal.SIGSTOP)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


DEEDS: dict[str, Callable[[], None]] = {
    "child": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "group": _kill_group,
    "stop": _stop_group,
}


class Sabotage(AppConfig):
    name = "tests.faults.sabotage"
    label = "sabotage"
    path = str(Path(__file__).parent)

    def ready(self) -> None:
        from callqueue import maker
        from callqueue.dispatch import chores, publisher, release_pass
        from callqueue.dispatch.dispenser import Dispenser
        from callqueue.execution import claim, flight, recorder, request
        from callqueue.transitions import ends

        chores.HEARTBEAT = 1.0  # a test waits for signs of life

        _wrap("before-begin", claim, "begin")
        _wrap("before-begin", claim, "take_begun")
        _wrap("before-socket", request.SlotGate, "wait")
        _wrap("before-record", recorder, "record")
        _wrap("inside-record", ends, "awaits_attempt")  # the attempts are written
        _wrap("after-record", recorder, "record")
        _wrap("inside-release", release_pass, "charge", after=True)
        _wrap("before-commit", maker, "take_off", after=True)  # its calls are being composed
        _wrap("before-clearance", flight.Clearance, "give")
        _wrap("before-publish", publisher, "pack")
        _wrap("inside-publish", publisher, "database_kwargs")
        _wrap("after-publish", Dispenser, "_release")


def _wrap(point: str, owner: Any, name: str, *, after: bool = False) -> None:
    original, after = getattr(owner, name), after or point.startswith("after")

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not after:
            strike(point)
        result = original(*args, **kwargs)
        if after and (name != "_release" or result.released):
            strike(point)
        return result

    setattr(owner, name, wrapped)
