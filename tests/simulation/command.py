"""The command: runs seeds side by side, and tells which of them fail.

`python -m tests.simulation --seeds 0:1000` runs them; `--seed 17 --story` prints one run as a story;
`--shrink` cuts a failing one down to few misfortunes. Every run is made in a process of its own
kind: with hashes that are the same each time (PYTHONHASHSEED=0).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    if options.worker:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # an exception would end a task of a run, not all
        from tests.simulation.worker import work

        return work(options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # databases are dropped then, too
    if options.faults:
        return look_for_faults(options)
    if options.seed is not None:
        options.seeds = [options.seed]
    return run_all(options)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=span, default=list(range(200)), metavar="FROM:TO")
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--story", action="store_true", help="print each statement of the run")
    parser.add_argument("--shrink", action="store_true", help="cut a failing run down")
    parser.add_argument(
        "--twice", type=int, nargs="?", const=1_000_000, default=0, metavar="COUNT",
        help="run each seed, or the first ones of each process, twice, and compare",
    )  # fmt: skip
    parser.add_argument("--fault", default="", help="one of the faults of faults.txt, put back in")
    parser.add_argument("--faults", action="store_true", help="look for each of them")
    parser.add_argument("--scene", action="append", metavar="WORD", help="only such scenes")
    parser.add_argument("--runs", type=int, default=0, help="end after so many of such scenes")
    parser.add_argument("--until-found", action="store_true", help="end at the first failure")
    parser.add_argument("--database", choices=("postgresql", "sqlite"), default="postgresql")
    parser.add_argument("--each", action="store_true", help="print a line for each seed")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def span(text: str) -> list[int]:
    first, found, last = text.partition(":")
    return list(range(int(first), int(last))) if found else list(range(int(first)))


def run_all(options: argparse.Namespace) -> int:
    """Run the seeds; the exit status says whether any failed."""
    began = time.monotonic()
    failed: list[int] = []
    statements = done = 0
    for found in results(options):
        done += 1
        statements += found["statements"]
        if options.each:
            facts = ("seed", "scene", "statements", "requests", "seconds", "sessions", "took")
            print(*(found[name] for name in facts), flush=True)
        if found["story"]:
            print(found["story"])
        if found["complaints"]:
            failed.append(found["seed"])
            print(f"seed {found['seed']} ({found['scene']}, {found['misfortunes']}):")
            for complaint in found["complaints"][:5]:
                print(f"    {complaint}")
        if done % 100 == 0 or options.story:
            pace = done / (time.monotonic() - began)
            print(f"{done} of {len(options.seeds)} seeds, {pace:.1f} a second", flush=True)
        if failed and options.until_found:
            break
    seconds = time.monotonic() - began
    print(
        f"{done} seeds, {len(failed)} failed, {statements / max(1, done):.0f} statements each, "
        f"{done / seconds:.1f} seeds a second"
        + (f"; the first that failed: {min(failed)}" if failed else "")
    )
    return bool(failed) or not done


def look_for_faults(options: argparse.Namespace) -> int:
    """Put each fault back, and look for it; the exit status says whether any was not found."""
    from tests.simulation import databases
    from tests.simulation.faults import FAULTS, looked_for
    from tests.support import servers

    missed = 0
    with servers.postgresql(), databases.postgresql(options.processes) as names:
        for name, seed, why in looked_for(options, names):
            missed += seed is None
            where = "not found" if seed is None else f"found by seed {seed}"
            print(f"{name}: {where} ({FAULTS[name].runs} runs at most): {why[:200]}", flush=True)
    print(f"{missed} missed")
    return bool(missed)


def results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What each seed came to, as processes side by side tell it."""
    from tests.simulation import databases
    from tests.support import servers

    count = max(1, min(options.processes, len(options.seeds)))
    with ExitStack() as stack:
        if options.database == "postgresql":
            stack.enter_context(servers.postgresql())
        names = stack.enter_context(getattr(databases, options.database)(count))
        running = [
            start(options, name, options.seeds[number::count]) for number, name in enumerate(names)
        ]
        try:
            yield from told(running)
        finally:
            for process in running:
                process.terminate()
                process.wait()


def start(options: argparse.Namespace, name: str, seeds: list[int]) -> Any:
    command = [sys.executable, "-m", "tests.simulation", "--worker", name]
    command += [
        flag
        for flag in ("--story", "--shrink", "--until-found")
        if vars(options)[flag[2:].replace("-", "_")]
    ]
    command += ["--fault", options.fault] if options.fault else []
    command += [f"--scene={word}" for word in options.scene or ()]
    command += [f"--runs={options.runs}", f"--twice={options.twice}"]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(seeds))
    process.stdin.close()
    return process


def told(running: list[Any]) -> Iterator[dict[str, Any]]:
    """Each line that any of the processes prints. One that fails is a failure."""
    import selectors

    with selectors.DefaultSelector() as selector:
        for process in running:
            selector.register(process.stdout, selectors.EVENT_READ, process)
        while selector.get_map():
            for key, _ in selector.select():
                line = key.data.stdout.readline()
                if line:
                    yield json.loads(line)
                else:
                    selector.unregister(key.fileobj)
                    if key.data.wait():
                        raise RuntimeError(
                            f"a process of the simulation ended with {key.data.returncode}"
                        )
