"""How fast a rule's attempts were answered over the last minute, and how many of them failed.

In: a database alias, the rules' names. Out: a Rate for each. Every read is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import mean

from callqueue import states, tables
from callqueue.database import as_parameter, from_us, instant_us
from callqueue.limits.kinds import SECOND
from callqueue.operations.waiting_counts import CAP, each

RECENT = 60  # seconds over which the rate is taken
LATEST = 100  # attempts of that time whose mean is the latency


@dataclass(frozen=True)
class Rate:
    """A rule's attempts over the last minute: answered per second, mean seconds from release to
    answer, and what share failed (None: none was answered). `is_stamped`: False where some were
    answered, and of none is known when it was sent.
    """

    per_second: float = 0.0
    latency: float = 0.0
    failing: float | None = None
    is_stamped: bool = True


def rates(using: str, names: Sequence[str], now: int) -> dict[str, Rate]:
    """The rate of each of these rules, as of `now`, in microseconds."""
    since = as_parameter(using, from_us(now) - timedelta(seconds=RECENT))
    newest = (
        f"FROM {tables.name(using, 'CallAttempt')} WHERE rule = %s AND finished_at > %s "
        "AND outcome <> %s ORDER BY finished_at DESC LIMIT"
    )
    counts = (
        "SELECT %s, COUNT(*), MIN(finished_at), SUM(CASE WHEN outcome = %s THEN 0 ELSE 1 END) "
        f"FROM (SELECT finished_at, outcome {newest} {CAP}) AS newest"
    )
    params = [(name, states.SUCCEEDED, name, since, states.VOIDED) for name in names]
    counted = {name: figures for name, *figures in each(using, counts, params) if figures[0]}
    taken = (
        "SELECT %s, released_at, finished_at, sent_at, outcome "
        f"FROM (SELECT released_at, finished_at, sent_at, outcome {newest} {LATEST}) AS latest"
    )
    latencies: dict[str, list[int]] = {name: [] for name in counted}
    stamped, answered = set[str](), set[str]()
    for name, begin, end, sent, outcome in each(
        using, taken, [(name, name, since, states.VOIDED) for name in counted]
    ):
        latencies[name].append(instant_us(end) - instant_us(begin))
        if sent is not None:
            stamped.add(name)
        if outcome == states.SUCCEEDED:
            answered.add(name)
    found = dict.fromkeys(names, Rate())
    for name, (count, first, failed) in counted.items():
        if latencies[name]:
            seconds = (now - instant_us(first)) / SECOND if count >= CAP else RECENT
            latency = mean(latencies[name]) / SECOND
            pace, failing = count / max(seconds, 0.001), int(failed) / count
            is_stamped = name in stamped or name not in answered  # those were perhaps never sent
            found[name] = Rate(pace, latency, failing, is_stamped)
    return found
