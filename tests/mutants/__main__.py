"""Draws mutants, runs for each the tests that call its function, and prints those that survive."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.mutations import Mutant, mutants
from tests.support import servers

ROOT = Path(__file__).resolve().parents[2]
MAP = ROOT / ".mutants.json"
CORE = ("limits", "ledger", "dispatch", "transitions", "execution", "permits", "sending")
TESTS = ("tests/unit", "tests/concurrency", "tests/db", "tests/operator", "tests/attacks")
# What no test finds, so many runs of the simulation look for: where orders of events are at stake.
SEEDS, SIMULATED = 60, ("limits", "ledger", "dispatch", "transitions", "execution", "permits")
ELSEWHERE = tuple(
    f"tests/db/{name}/"
    for name in ("admin", "forecast", "history", "look", "management", "testing")
)
T = TypeVar("T")
BUDGET_S = 60.0  # of tests for a mutant, by the seconds that they took for the map
SIMULATION_S = 900.0
PATIENCE_S = 60.0  # for one test, beside ten times what it took for the map
DOUBTFUL_S = 1.0  # a test that takes longer may have failed for the machine's sake: it has to twice
Drawn = tuple[str, Mutant]
Tests = dict[str, tuple[float, list[str]]]


def main() -> None:
    """Parse, draw, run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="begin after so many of those drawn")
    parser.add_argument("--only", default="", help="those of them whose line has this text")
    parser.add_argument("--jobs", type=int, default=1, help="so many side by side")
    parser.add_argument("--list", action="store_true", help="show them, and run nothing")
    parser.add_argument("--again", action="store_true", help="make the whole map of tests anew")
    options = parser.parse_args()
    drawn = draw(options.count, options.seed)[options.skip :]
    drawn = [one for one in drawn if options.only in shown(*one)]
    if options.list:
        for path, mutant in drawn:
            print(shown(path, mutant))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with servers.postgresql(), tempfile.TemporaryDirectory(prefix="callqueue-mutants-") as name:
        known = mapped(copied(Path(name) / "map"), is_anew=options.again)
        trees = [copied(Path(name) / str(number)) for number in range(options.jobs)]
        sys.exit(judge(drawn, known, trees))


def draw(count: int, seed: int) -> list[Drawn]:
    """So many of all that the core can have, by the seed."""
    every = [
        (str(path.relative_to(ROOT / "callqueue")), mutant)
        for name in CORE
        for path in sorted((ROOT / "callqueue" / name).rglob("*.py"))
        for mutant in mutants(path.read_bytes())
    ]
    return random.Random(seed).sample(every, min(count, len(every)))


def copied(folder: Path) -> Path:
    """The tree as git knows it and as it stands; what is put wrong is put wrong here."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def mapped(tree: Path, *, is_anew: bool) -> Tests:
    """Which functions each test calls. Only those are run that the last map has otherwise."""
    before: dict[str, Any] = {"files": {}, "tests": {}}
    if MAP.exists() and not is_anew:
        before = json.loads(MAP.read_text(encoding="utf-8"))
    found = [one for name in TESTS for one in (tree / name).rglob("test_*.py")]
    names = [str(one.relative_to(tree)) for one in found]
    files = {
        name: hashlib.sha256((tree / name).read_bytes()).hexdigest()
        for name in sorted(names)
        if not name.startswith(ELSEWHERE)
    }
    changed = [name for name, digest in files.items() if before["files"].get(name) != digest]
    tests = {
        name: said
        for name, said in before["tests"].items()
        if (file := name.partition("::")[0]) in files and file not in changed
    }
    if changed:
        print(
            f"running {len(changed)} files of tests once, to learn what they call ...", flush=True
        )
        out = tree / "map.json"
        begun(tree, ["-p", "tests.mutants.tracing", *changed], CALLQUEUE_MUTANTS_MAP=out).wait()
        tests |= json.loads(out.read_text(encoding="utf-8"))
        MAP.write_text(json.dumps({"files": files, "tests": tests}), encoding="utf-8")
    return tests


def judge(drawn: list[Drawn], known: Tests, trees: list[Path]) -> int:
    """Run the tests of each; 1 where one survives that is not known to be equivalent."""
    began, survived, equivalent = time.monotonic(), [], []
    waiting = queue.SimpleQueue[Drawn]()
    for one in drawn:
        waiting.put(one)

    def work(tree: Path) -> Iterator[tuple[str, Mutant, str]]:
        with Bench(tree, known) as bench:
            while True:
                try:
                    path, mutant = waiting.get_nowait()
                except queue.Empty:
                    return
                is_known = shown(path, mutant) in EQUIVALENT
                yield path, mutant, "" if is_known else bench.verdict_on(path, mutant)

    for number, (path, mutant, verdict) in enumerate(together(map(work, trees)), start=1):
        text = shown(path, mutant)
        if not verdict:
            verdict = f"equivalent: {EQUIVALENT[text]}"
            equivalent.append(text)
        elif not verdict.startswith("found"):
            survived.append(f"{text}\n    {verdict}")
        print(f"{number:4} line {mutant.line} of {text}\n     {verdict}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{len(drawn)} mutants in {minutes:.0f} minutes: {len(survived)} survive, "
          f"{len(equivalent)} are equivalent")  # fmt: skip
    print("\n".join(survived))
    return 1 if survived else 0


def together(several: Iterable[Iterator[T]]) -> Iterator[T]:
    """What they bring, each in a thread of its own, as it comes."""
    brought = queue.SimpleQueue[tuple[T | None, BaseException | None]]()

    def bring(one: Iterator[T]) -> None:
        try:
            for each in one:
                brought.put((each, None))
            brought.put((None, None))
        except BaseException as error:
            brought.put((None, error))

    threads = [threading.Thread(target=bring, args=(one,), daemon=True) for one in several]
    for thread in threads:
        thread.start()
    going = len(threads)
    while going:
        each, error = brought.get()
        if error is not None:
            raise error
        if each is None:
            going -= 1
        else:
            yield each


class Change:
    """A mutant that is in its file for as long as this is open, for processes that a test starts."""

    def __init__(self, file: Path, mutant: Mutant) -> None:
        self.file, self.before = file, file.read_bytes()
        self.after = mutant.applied(self.before)

    @property
    def told(self) -> dict[str, str]:
        """As the pytest that has collected the tests is told of it."""
        sources = {"before": self.before.decode(), "after": self.after.decode()}
        return {"path": str(self.file), **sources}

    def __enter__(self) -> None:
        self.file.write_bytes(self.after)

    def __exit__(self, *_: object) -> None:
        self.file.write_bytes(self.before)


class Bench:
    """A tree, and a pytest that has collected its tests: see `tests.mutants.warm`."""

    def __init__(self, tree: Path, known: Tests) -> None:
        self.tree, self.known = tree, known
        self.sound: set[str] = set()  # what fails with a mutant does not without
        self.broken: set[str] = set()

    def __enter__(self) -> Bench:
        ours, theirs = socket.socketpair()
        files = sorted({name.partition("::")[0] for name in self.known})
        self.process = begun(
            self.tree,
            ["-p", "tests.mutants.warm", *files],
            pass_fds=(theirs.fileno(),),
            CALLQUEUE_MUTANTS_SOCKET=theirs.fileno(),
        )
        theirs.close()
        self.socket, self.said = ours, ours.makefile("r", encoding="utf-8")
        self.early = set(self._next()["early"])
        return self

    def __exit__(self, *_: object) -> None:
        """It takes its databases with it, if it is let."""
        self.said.close()
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        end(self.process)

    def verdict_on(self, path: str, mutant: Mutant) -> str:
        """What the tests say that call its function, and then the simulation."""
        said = self._tests_on(path, mutant)
        if said.startswith("found") or path.partition("/")[0] not in SIMULATED:
            return said
        with Change(self.tree / "callqueue" / path, mutant):
            arguments = ["--seeds", f"0:{SEEDS}", "--until-found", "--processes", "1"]
            process = started(self.tree, "tests.simulation", arguments)
            try:
                return said if process.wait(SIMULATION_S) == 0 else "found by the simulation"
            except subprocess.TimeoutExpired:
                return "found by the simulation, which hangs"
            finally:
                end(process)

    def _tests_on(self, path: str, mutant: Mutant) -> str:
        """What the tests say, as far as the budget goes: first those that take little and call
        little else.
        """
        place = f"{path}:{mutant.function}"
        calling = sorted(
            (seconds * len(called), seconds, name)
            for name, (seconds, called) in self.known.items()
            if place in called and name not in self.broken
        )
        chosen, total = [], 0.0
        for _, seconds, name in calling:
            if total + seconds <= BUDGET_S or not chosen:
                chosen.append(name)
                total += seconds
        if not chosen:
            return "survives: no test calls the function"
        left = f" ({len(calling) - len(chosen)} more call it)" if len(calling) > len(chosen) else ""
        change = Change(self.tree / "callqueue" / path, mutant)
        while chosen:
            said = self._ask(chosen, change)
            if said["status"] == "cold" or (said["status"] == "passed" and place in self.early):
                if not self._passes_anew(chosen, change):
                    return "found where it is imported"
                said = {"status": "passed"}
            if said["status"] == "passed":
                return f"survives {len(chosen)} tests{left}"
            name, hangs = said["by"].partition("[")[0], said["status"] == "hangs"
            if self._is_believed(name, change, hangs=hangs):
                return f"found by {said['by']}{', which hangs' if hangs else ''}"
            chosen.remove(name)
        return "survives: the tests that call the function fail without it too"

    def _is_believed(self, name: str, change: Change, *, hangs: bool) -> bool:
        """Whether the mutant is what the test fails for."""
        if name not in self.sound:
            alone = self._ask([name])["status"]
            if alone != "passed":
                print(f"     without a mutant, {name}: {alone}", flush=True)
                self.broken.add(name)
                return False
            self.sound.add(name)
        is_doubtful = hangs or self.known[name][0] > DOUBTFUL_S
        return not is_doubtful or self._ask([name], change)["status"] != "passed"

    def _ask(self, tests: list[str], change: Change | None = None) -> dict[str, Any]:
        patience = {name: 10 * self.known[name][0] + PATIENCE_S for name in tests}
        order = {"tests": tests, "patience": patience, **(change.told if change else {"path": ""})}
        with change or nullcontext():
            self.socket.sendall(json.dumps(order).encode() + b"\n")
            said = self._next()
        if said["status"] == "none":
            raise SystemExit(f"there are no such tests any more, use --again: {tests}")
        return said

    def _passes_anew(self, tests: list[str], change: Change) -> bool:
        """By a pytest that imports the mutant: its code was called before any test."""
        with change:
            process = begun(self.tree, ["-x", *tests])
            try:
                return process.wait(3 * sum(self.known[name][0] for name in tests) + 120) == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                end(process)

    def _next(self) -> dict[str, Any]:
        if not (line := self.said.readline()):
            raise SystemExit(f"pytest in {self.tree} has ended")
        return dict(json.loads(line))


def begun(
    tree: Path, arguments: list[str], pass_fds: tuple[int, ...] = (), **more: object
) -> subprocess.Popen[bytes]:
    """pytest in the tree."""
    options = ["--database=postgresql", "-q", "-p", "no:cacheprovider"]
    return started(tree, "pytest", [*options, *arguments], pass_fds, **more)


def started(
    tree: Path, module: str, arguments: list[str], pass_fds: tuple[int, ...] = (), **more: object
) -> subprocess.Popen[bytes]:
    """A module, run as a program in the tree."""
    own = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=tree,
        env={**os.environ, **own, **{name: str(value) for name, value in more.items()}},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=pass_fds,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def shown(path: str, mutant: Mutant) -> str:
    """The mutant in a line, which is the same until its function changes."""
    was, text = (" ".join(one.split()) for one in (mutant.was, mutant.text))
    return f"{path} {mutant.function}: {was} -> {text}"


if __name__ == "__main__":
    main()
