"""Run every test on everything that is there, and say at the end what that was.

`python -m tests.run [--faults] [pytest's arguments]`: on PostgreSQL, and what has SQL of its own on
SQLite and, where it answers, on MariaDB too. What waits for clocks and processes begins at once;
behind it runs what only computes, so that two cores are busy to the end; then the rest. A few that
failed beside the others, and not because a promise was broken, are tried once more alone, and are
named at the end whatever comes of it. Exits with pytest's status, the worst of them; the last line is
pytest's count. With CI set, a server that answers and was not used is a failure. Leaves no process
and no file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support import length, servers

ROOT = Path(__file__).resolve().parent.parent


def of_db(names: str, place: str = "{}") -> list[str]:
    """Folders and files of tests/db."""
    return [f"tests/db/{place.format(name)}" for name in names.split()]


BEHAVIOUR = ["tests/db", "tests/concurrency"]
PROCESSES = ["tests/acceptance", "tests/faults"]  # these wait most of their time
COMMANDS = ["tests/benchmarks", "tests/packaging", "tests/suites"]
# these may run behind any others: they judge nothing by the time it takes
COMPUTING = [
    ["tests/simulation"],
    ["tests/unit"],
    ["tests/operator", *of_db("admin control forecast look management")],
    of_db("database dispatch history ledger maintenance sending"),
]
# Of the behaviour suite, what says more to a database than Django's own words: all that `make test`
# runs on SQLite and MariaDB, what computes and what has threads. `make faults` runs it whole.
OWN_SQL = of_db(
    "control database dispatch history ledger look maintenance sending"
    " test_calls_from_send_to_end.py test_transitions.py"
)
OWN_THREADS = [
    "tests/concurrency",
    *of_db("claim restarts", "execution/test_{}.py"),
    *of_db("permit waiting", "permits/test_{}.py"),
]
# of those, what says the same to every database, in Django's own words
ALIKE = [
    "tests/concurrency/test_beside_the_loop.py",
    *of_db("maintenance/test_breaker.py"),
    *of_db("look/test_doctor.py sending/test_async_and_routers.py"),
]
# What makes no statement that others of OWN_SQL do not make too: on SQLite, where the ledger's clock is
# set, and not on MariaDB as well. `make faults` runs it there.
LIKE_OTHERS = [
    *of_db("backpressure known_room release_pass", "dispatch/test_{}.py"),
    *of_db("test_transitions.py"),
]
BESIDE, ALONE = 2, 3  # sessions at once, while some wait for processes, and after them
FEW = 6  # more than these are no accident of a busy machine
INTERRUPTED = 130
NO_TESTS_COLLECTED = 5
ORDER = ["failed", "passed", "skipped", "xfailed", "xpassed", "errors"]


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background job would ignore it
        signal.signal(number, interrupt)
    answering = servers.answering()
    faults = "--faults" in arguments
    arguments = [argument for argument in arguments if argument != "--faults"]
    if faults:
        os.environ[length.WHOLE] = "1"
    with servers.postgresql(), shared_bytecode():
        sessions = plan(answering, arguments, faults)
        run(sessions, arguments)
        passed_alone = try_alone(sessions, arguments)
    problems = unused(sessions, answering) if not arguments and not faults else []
    print(summary(sessions, answering, problems))
    for session in sessions:
        if session.status not in (0, 1, NO_TESTS_COLLECTED):  # it may have been killed
            print(f"DID NOT END BY ITSELF: {session.name()} (status {session.status})")
    for test in passed_alone:
        print(f"FAILED BESIDE THE OTHERS, PASSED ALONE: {test}")
    print(count_line(sessions, time.monotonic() - started), flush=True)
    return exit_status(sessions) or (1 if problems and os.environ.get("CI") else 0)


@dataclass
class Session:
    """One run of pytest: on which database, over which folders, and what came of it."""

    database: str
    folders: list[str]
    marks: str = ""
    without: list[str] = field(default_factory=list)  # folders among them that another runs
    waits: bool = False  # for processes and clocks: it begins at once
    computes: bool = False  # it may run behind those, with what they leave of the processors
    on: str = ""
    seconds: float = 0.0
    status: int = INTERRUPTED
    counts: Counter[str] = field(default_factory=Counter)
    used: Counter[str] = field(default_factory=Counter)
    doubtful: list[str] = field(default_factory=list)  # failed, and broke no promise

    def name(self) -> str:
        parts = [one.partition("::")[0].removeprefix("tests/") for one in self.folders[:3]]
        database = f"{self.database}, {self.marks}" if self.marks else self.database
        return f"{database}: {' '.join(parts)}{' ...' if len(self.folders) > 3 else ''}"

    def file(self, folder: Path, ending: str) -> Path:
        """A file of this session's own."""
        return folder / f"{re.sub(r'[^a-z]+', '-', self.name())}.{ending}"


def interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM and Ctrl-C end a run alike: pytest takes down what it put up."""
    raise KeyboardInterrupt


@contextmanager
def shared_bytecode() -> Iterator[None]:
    """What one of the many processes has compiled, the others need not; nothing of it stays."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        yield
    finally:
        for folder in ("callqueue", "example_project", "tests"):
            for kept in [*(ROOT / folder).rglob("__pycache__")]:
                shutil.rmtree(kept, ignore_errors=True)


def plan(answering: list[str], arguments: list[str], faults: bool) -> list[Session]:
    """What runs, in the order in which it is begun."""
    marks = "fault" if faults else ""
    if is_of_chosen(arguments):
        return [Session("postgresql", [], marks)]
    others = ["sqlite", *(["mariadb"] if "mariadb" in answering else [])]
    waiting = [[folder] for folder in PROCESSES] + [all_others()]
    computing = [folder for folders in COMPUTING for folder in folders]
    sessions = [Session("postgresql", folders, marks, waits=True) for folders in waiting]
    # at length it would keep the tests of processes from theirs
    sessions += [Session("postgresql", one, marks, computes=not faults) for one in COMPUTING]
    if faults:
        sessions += [Session(name, BEHAVIOUR, marks) for name in ("postgresql", *others)]
        return sessions + [Session(name, BEHAVIOUR) for name in others]
    for name in reversed(others):
        without = [*ALIKE, *(LIKE_OTHERS if name == "mariadb" else [])]
        sessions.append(Session(name, OWN_SQL, without=without, computes=True))
    sessions.append(Session("postgresql", ["tests/db"], without=computing))
    sessions += [Session(name, OWN_THREADS, without=ALIKE) for name in reversed(others)]
    return [*sessions, Session("postgresql", ["tests/concurrency"])]


def is_of_chosen(arguments: list[str]) -> bool:
    """Whether whoever runs this says which tests run."""
    return any(argument.startswith("tests") for argument in arguments)


def all_others() -> list[str]:
    """But for benchmarks, the wheel and other people's suites, which have commands of their own."""
    folders = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")}
    patient = {"tests/db", "tests/concurrency", *(one for some in COMPUTING for one in some)}
    return sorted(folders - {*patient, *PROCESSES, *COMMANDS})


def run(sessions: list[Session], arguments: list[str]) -> None:
    """So many at a time. One prints as it goes, several when each has ended."""
    with tempfile.TemporaryDirectory(prefix="callqueue-tests-") as name:
        folder, left = Path(name), list(sessions)
        running: list[tuple[Session, subprocess.Popen[bytes], float]] = []
        try:
            while left or running:
                for session in [one for one in left if may_begin(one, running, left)]:
                    if may_begin(session, running, left):
                        is_behind = any(one.waits for one, *_ in running) and session.computes
                        live = len(sessions) == 1
                        process = start(session, arguments, folder, live=live, behind=is_behind)
                        running.append((session, process, time.monotonic()))
                        left.remove(session)
                time.sleep(0.2)
                for ended in [one for one in running if one[1].poll() is not None]:
                    running.remove(ended)
                    session, process, began = ended
                    session.seconds = time.monotonic() - began
                    finish(session, process.returncode, folder)
        except KeyboardInterrupt:
            for _, process, _ in running:
                process.send_signal(signal.SIGINT)
            for _, process, _ in running:
                process.wait(60)
            raise SystemExit(INTERRUPTED) from None


def may_begin(session: Session, running: list[Any], left: list[Session]) -> bool:
    """What waits for processes begins at once, what only computes behind it, all else after it."""
    if session.waits:
        return True
    beside = [one for one, *_ in running if not one.waits]
    if any(one.waits for one, *_ in running) or any(one.waits for one in left):
        return session.computes and len(beside) < BESIDE
    return len(beside) < ALONE


def start(
    session: Session, arguments: list[str], folder: Path, *, live: bool, behind: bool = False
) -> subprocess.Popen[bytes]:
    """In a session of its own: interrupted, it hears of it once, and has time to clean up."""
    title = f" {session.name() if session.folders else ' '.join(arguments)} "
    output = None if live else session.file(folder, "txt").open("wb")
    print(f"\n{title:#^100}", end="\n" if live else " (printed when it has ended)\n", flush=True)
    command = [sys.executable, "-m", "pytest", f"--database={session.database}"]
    command += ["-m", session.marks] if session.marks else []
    command += arguments + [f"--ignore={one}" for one in session.without]
    command += [one for one in session.folders if (ROOT / one.partition("::")[0]).exists()]
    environment = {**os.environ, "CALLQUEUE_TEST_REPORT": str(session.file(folder, "json"))}
    errors = subprocess.STDOUT if output else None
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
    with output or nullcontext():
        return subprocess.Popen(
            ["nice", "-n", "19", *command] if behind else command,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            **streams,
        )


def finish(session: Session, status: int, folder: Path) -> None:
    """Print what was not printed yet, and keep the counts."""
    output, report = session.file(folder, "txt"), session.file(folder, "json")
    if output.exists():
        title = f" {session.name()}, {session.seconds:.0f} s "
        print(f"\n{title:#^100}\n{output.read_text('utf-8', errors='replace')}", flush=True)
    session.status = status
    if report.exists():
        document = json.loads(report.read_text(encoding="utf-8"))
        session.on = document["on"]
        session.counts.update(document["counts"])
        session.used.update(document["used"])
        session.doubtful = document["doubtful"]


def try_alone(sessions: list[Session], arguments: list[str]) -> list[str]:
    """Run the few that failed once more, one session after the other. Returns those that passed."""
    failed = [session for session in sessions if session.counts["failed"]]
    if is_of_chosen(arguments) or sum(one.counts["failed"] for one in failed) > FEW:
        return []
    passed = []
    for session in failed:
        number = session.counts["failed"]
        if len(session.doubtful) != number or session.counts["errors"]:
            continue
        alone = Session(session.database, session.doubtful)
        run([alone], arguments)
        if alone.status == 0 and alone.counts["passed"] == number:
            session.counts.update(passed=number, failed=-number)
            session.status = 0
            passed += session.doubtful
    return passed


def unused(sessions: list[Session], answering: list[str]) -> list[str]:
    """The databases and the servers that answer, and that no test that passed ran on."""
    used = {server for session in sessions for server in session.used}
    used |= {session.database for session in sessions if session.counts["passed"]}
    expected = dict.fromkeys([session.database for session in sessions] + answering)
    return [server for server in expected if server not in used]


def summary(sessions: list[Session], answering: list[str], problems: list[str]) -> str:
    lines = ["", f"{' what the tests ran on ':=^100}"]
    for database in dict.fromkeys(session.on or session.database for session in sessions):
        counts = Counter[str]()
        for session in sessions:
            if database in (session.on, session.database):
                counts += session.counts
        lines.append(f"{database:<24} {phrase(counts) or 'no tests'}")
    used = sum((session.used for session in sessions), Counter())
    lines += [f"{session.seconds:7.0f} s  {session.name()}" for session in sessions]
    again = sum(session.counts["rerun"] for session in sessions)
    lines += [f"{'tried again':<24} {again} times, for the machine was busy"] if again else []
    lines += [
        f"{server:<24} used by {number} of the tests that passed"
        for server, number in sorted(used.items())
    ]
    for server in servers.DEFAULTS:
        if server not in answering and server != "postgresql":
            lines.append(f"{server:<24} skipped: {servers.refusal(server)}")
    lines += [f"{server:<24} IS THERE, AND NO TEST THAT PASSED USED IT" for server in problems]
    return "\n".join(lines)


def phrase(counts: Counter[str]) -> str:
    words = {word: "error" if word == "errors" and counts[word] == 1 else word for word in ORDER}
    return ", ".join(f"{counts[word]} {words[word]}" for word in ORDER if counts[word])


def count_line(sessions: list[Session], seconds: float) -> str:
    total = sum((session.counts for session in sessions), Counter())
    text = f" {phrase(total) or 'no tests ran'} in {seconds:.2f}s "
    return f"{text:=^100}"


def exit_status(sessions: list[Session]) -> int:
    """The worst that pytest said. A session may find nothing (`-k`), not all of them."""
    statuses = [session.status for session in sessions]
    if all(status == NO_TESTS_COLLECTED for status in statuses):
        return NO_TESTS_COLLECTED
    return max((status for status in statuses if status != NO_TESTS_COLLECTED), key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
