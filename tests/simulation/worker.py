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

from tests.simulation.scheduler import MICRO, stream_of
from tests.simulation.settings_of_runs import Scene, drawn


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
        if not any(word in scene_of(seed).name for word in options.scene or [""]):
            continue
        found = run(stage, seed, options)
        if os.getppid() != parent:
            return 1  # nobody reads it any more, and its sessions are wanted by others
        print(json.dumps(found), flush=True)
        done += 1
        if (options.until_found and found["complaints"]) or done == options.runs:
            break
    return 0


def scene_of(seed: int) -> Scene:
    """What the run of this seed begins with: the first that is drawn of it."""
    return drawn(stream_of(seed, "scene"))


def run(stage: Any, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    from tests.simulation import shrinking
    from tests.simulation.world import World

    began = time.perf_counter()
    one = World(stage, seed).run()
    took = time.perf_counter() - began
    if options.twice:
        again = World(stage, seed).run()
        if (again.digest, len(again.story)) != (one.digest, len(one.story)):
            one.complaints.append("the second run differs: " + first_difference(one, again))
    if options.shrink and one.complaints:
        one = shrinking.shrunk(stage, one)
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
