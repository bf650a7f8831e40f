"""Cuts a failing run down: to the fewest misfortunes and calls with which it still fails."""

from __future__ import annotations

from typing import Any


def shrunk(stage: Any, failed: Any) -> Any:
    """The shortest run of the same seed that was found to fail."""
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
