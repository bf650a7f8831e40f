"""A process that runs seeds, one after the other, and prints what came of each as a line of JSON."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
from typing import Any

from tests.simulation.scenes import drawn
from tests.simulation.scheduler import MICRO, stream_of


def work(options: argparse.Namespace) -> int:
    faulthandler.register(signal.SIGUSR1)
    parent = os.getppid()
    seeds = json.loads(sys.stdin.read())
    if options.fault:
        from tests.simulation import faults

        faults.put_back(options.fault)
    from tests.simulation.stage import set_stage

    stage = set_stage(options.worker)
    done = 0
    for seed in seeds:
        name = drawn(stream_of(seed, "scene")).name  # as its run draws it, first of all
        if not any(word in name for word in options.scene or [""]):
            continue
        found = run(stage, seed, options, is_twice=done < options.twice)
        if os.getppid() != parent:
            return 1  # nobody reads it any more, and its sessions are wanted by others
        print(json.dumps(found), flush=True)
        done += 1
        if (options.until_found and found["complaints"]) or done == options.runs:
            break
    return 0


def run(stage: Any, seed: int, options: argparse.Namespace, *, is_twice: bool) -> dict[str, Any]:
    from tests.simulation.world import World

    began = time.perf_counter()
    one = World(stage, seed).run()
    took = time.perf_counter() - began
    if is_twice:
        again = World(stage, seed).run()
        if (again.digest, len(again.story)) != (one.digest, len(one.story)):
            one.complaints.append("the second run differs: " + first_difference(one, again))
    if options.shrink and one.complaints:
        one = shrunk(stage, one)
    return {
        "seed": seed,
        "scene": one.scene,
        "misfortunes": " ".join(map(str, one.misfortunes)),
        "complaints": one.complaints,
        "statements": one.statements,
        "requests": one.requests,
        "seconds": one.seconds,
        "sessions": one.sessions,
        "took": round(took, 2),
        "digest": one.digest,
        "story": told(one) if options.story or (options.shrink and one.complaints) else "",
    }


def told(one: Any) -> str:
    return "\n".join(f"{step.at / MICRO:10.6f}  {step.who:<14} {step.what}" for step in one.story)


def first_difference(one: Any, other: Any) -> str:
    for a, b in zip(one.story, other.story, strict=False):
        if a != b:
            return f"{a} and {b}"
    return "one is longer"


def shrunk(stage: Any, failed: Any) -> Any:
    """The shortest run of the same seed that was found to fail: cut down to the fewest misfortunes and
    calls.
    """
    from tests.simulation.world import World

    best, left_out, calls = failed, frozenset[int](), None
    for one in failed.misfortunes:
        tried = World(stage, failed.seed, left_out | {one.number}, calls).run()
        if tried.complaints:
            best, left_out = tried, left_out | {one.number}
    for count in (1, 2, 3, 4, 6, 8, 10):
        tried = World(stage, failed.seed, left_out, count).run()
        if tried.complaints and len(tried.story) < len(best.story):
            best = tried
            break
    return best
