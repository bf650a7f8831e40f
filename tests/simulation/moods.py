"""How the provider may be in a run: what it answers, how often, and how fast."""

from __future__ import annotations

from typing import Any

from tests.simulation.provider import Mood

MOODS = (
    Mood([("ok", 0.9), ("error", 0.1)]),
    Mood([("ok", 0.9), ("slow", 0.1)], latency=(0.003, 0.05)),
    Mood([("ok", 1.0)], latency=(0.15, 0.9)),
    Mood(
        [("ok", 0.6), ("error", 0.1), ("busy", 0.1), ("away", 0.04), ("missing", 0.04),
         ("silence", 0.06), ("reset", 0.03), ("odd", 0.03)]
    ),
    Mood([("ok", 0.6), ("busy", 0.2), ("busy2", 0.15), ("busy0", 0.05)], latency=(0.1, 0.4)),
    Mood([("ok", 0.5), ("told", 0.3), ("busy", 0.1), ("odd", 0.1)]),
    Mood([("ok", 0.7), ("silence", 0.3)]),
    Mood([("ok", 0.1), ("error", 0.9)], latency=(0.003, 0.05)),
)  # fmt: skip


def drawn(draw: Any) -> Mood:
    return draw.choice(MOODS)  # type: ignore[no-any-return]
