"""Draws mutants, runs for each the tests that call its function, and prints those that survive."""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.mutations import Mutant, mutants
from tests.support import servers

ROOT = Path(__file__).resolve().parents[2]
MAP = ROOT / ".mutants.json"
CORE = ("limits", "ledger", "dispatch", "transitions", "execution", "permits", "sending")
ELSEWHERE = ("admin", "forecast", "history", "look", "management", "testing")
TESTS = [
    "tests/unit",
    "tests/concurrency",
    "tests/db",
    *(f"--ignore=tests/db/{n}" for n in ELSEWHERE),
]
BUDGET_S = 60.0  # of tests for a mutant, by the seconds that they took for the map
PATIENCE_S = 120.0  # more than that, for a machine that does other things too
USAGE, NO_TESTS = 4, 5  # what pytest ends with where it cannot do what it was told
Drawn = tuple[str, Mutant]
Map = dict[str, tuple[float, list[str]]]


def main() -> None:
    """Parse, draw, run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="begin after so many of those drawn")
    parser.add_argument("--list", action="store_true", help="show them, and run nothing")
    parser.add_argument("--again", action="store_true", help="make the map of tests anew")
    options = parser.parse_args()
    drawn = draw(options.count, options.seed)[options.skip :]
    if options.list:
        for path, mutant in drawn:
            print(shown(path, mutant))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with servers.postgresql(), tempfile.TemporaryDirectory(prefix="callqueue-mutants-") as name:
        tree = copied(Path(name))
        if options.again or not MAP.exists():
            make_map(tree)
        sys.exit(judge(drawn, json.loads(MAP.read_text(encoding="utf-8")), tree))


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


def make_map(tree: Path) -> None:
    """Run the tests once, and keep which functions each calls."""
    print("running the tests once, to learn what they call ...", flush=True)
    os.environ["CALLQUEUE_MUTANTS_MAP"] = str(tree / "map.json")
    run(["-p", "tests.mutants.tracing", *TESTS], tree, 3600.0)
    shutil.copy(tree / "map.json", MAP)


def judge(drawn: list[Drawn], known: Map, tree: Path) -> int:
    """Run the tests of each; 1 where one survives that is not known to be equivalent."""
    began, survived, equivalent = time.monotonic(), [], []
    for number, (path, mutant) in enumerate(drawn, start=1):
        text = shown(path, mutant)
        if text in EQUIVALENT:
            verdict = f"equivalent: {EQUIVALENT[text]}"
            equivalent.append(text)
        else:
            verdict = verdict_on(path, mutant, known, tree)
            if not verdict.startswith("found"):
                survived.append(f"{text}\n    {verdict}")
        print(f"{number:4} line {mutant.line} of {text}\n     {verdict}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{len(drawn)} mutants in {minutes:.0f} minutes: {len(survived)} survive, "
          f"{len(equivalent)} are equivalent")  # fmt: skip
    print("\n".join(survived))
    return 1 if survived else 0


def verdict_on(path: str, mutant: Mutant, known: Map, tree: Path) -> str:
    """What the tests say that call its function, the quickest first, as far as the budget goes."""
    place = f"{path}:{mutant.function}"
    calling = sorted((s, name) for name, (s, called) in known.items() if place in called)
    chosen, seconds = [], 0.0
    for took, name in calling:
        if seconds + took <= BUDGET_S or not chosen:
            chosen.append(name)
            seconds += took
    if not chosen:
        return "survives: no test calls the function"
    file = tree / "callqueue" / path
    source = file.read_bytes()
    changed = mutant.applied(source)
    ast.parse(changed)
    file.write_bytes(changed)
    try:
        status = run(["-x", *chosen], tree, 3 * seconds + PATIENCE_S)
    finally:
        file.write_bytes(source)
    if status in (USAGE, NO_TESTS):
        raise SystemExit(f"the tests of {place} cannot be run: {chosen}")
    left = f" ({len(calling) - len(chosen)} more call it)" if len(calling) > len(chosen) else ""
    if status == 0:
        return f"survives {len(chosen)} tests{left}"
    return "found, by a test that hangs" if status is None else "found"


def run(arguments: list[str], tree: Path, seconds: float) -> int | None:
    """pytest's status in the tree; None where it does not end."""
    options = ["--database=postgresql", "-q", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def shown(path: str, mutant: Mutant) -> str:
    """The mutant in a line, which is the same until its function changes."""
    was, text = (" ".join(one.split()) for one in (mutant.was, mutant.text))
    return f"{path} {mutant.function}: {was} -> {text}"


if __name__ == "__main__":
    main()
