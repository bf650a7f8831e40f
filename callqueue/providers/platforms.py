"""Platforms: GitHub, Cloudflare, Meta, Microsoft, Google."""

from __future__ import annotations

from typing import Any

from callqueue.limits.kinds import Concurrency, FixedWindow, SlidingWindow
from callqueue.limits.rules import Retry
from callqueue.providers.fields import Fields, verdict

PACIFIC = "America/Los_Angeles"
LONGEST_DAY = Retry(max_hold=90000.0)  # 25 hours: a hold until midnight may be as long


def cloudflare(**fields: Any) -> Fields:
    """`key` is the user or token, and each queue an address."""
    return {
        "hosts": ["api.cloudflare.com"],
        "limits": [SlidingWindow("1200/5m", per="key"), SlidingWindow("200/s", per="queue")],
        "retry": Retry(base=300.0),
        **fields,
    }


def github_read(per_hour: str = "5000/h", **fields: Any) -> Fields:
    """Send with `cost={"points": 1}`, or let `providers.github_route` say it. `key` is the user or
    the installation.
    """
    return {
        "hosts": ["api.github.com"],
        "limits": _github(per_hour),
        "classify": verdict("github"),
        "retry": Retry(base=60.0),
        **fields,
    }


def github_write(per_hour: str = "5000/h", **fields: Any) -> Fields:
    """Requests that create content: `cost={"points": 5}`. They share limits with `github_read`:
    give both the same.
    """
    return {
        "limits": [
            SlidingWindow("80/m", per="key"),
            SlidingWindow("500/h", per="key"),
            *_github(per_hour),
        ],
        "classify": verdict("github"),
        "retry": Retry(base=60.0),
        **fields,
    }


def _github(per_hour: str) -> list[Any]:
    return [
        SlidingWindow(per_hour, per="key", name="github-primary"),
        SlidingWindow("900/m", per="key", unit="points", name="github-points"),
        Concurrency(100, per="key", name="github-at-once"),
    ]


def meta_graph(per_hour: str = "200/h", **fields: Any) -> Fields:
    """`per_hour`: 200 for each daily user of the app; or what your business use case has, by
    `key`.
    """
    return {
        "hosts": ["graph.facebook.com"],
        "limits": [SlidingWindow(per_hour, per="key")],
        "classify": verdict("meta"),
        "retry": Retry(base=60.0, cap=900.0),
        "idempotency_header": None,
        **fields,
    }


def microsoft_graph(**fields: Any) -> Fields:
    """What holds for every service of Microsoft Graph; each has limits of its own besides."""
    return {
        "hosts": ["graph.microsoft.com"],
        "limits": [_microsoft()],
        "retry": Retry(base=10.0),
        "idempotency_header": None,
        **fields,
    }


def microsoft_outlook(**fields: Any) -> Fields:
    """Mail, calendars and contacts. `key` is the mailbox."""
    return {
        "limits": [Concurrency(4, per="key"), SlidingWindow("10000/10m", per="key"), _microsoft()],
        "retry": Retry(base=10.0),
        "idempotency_header": None,
        **fields,
    }


def _microsoft() -> SlidingWindow:
    return SlidingWindow("130000/10s", name="microsoft-graph")


def youtube(per_day: str = "10000/d", **fields: Any) -> Fields:
    """Send with `cost={"units": ...}`."""
    return {
        "hosts": ["www.googleapis.com"],
        "limits": [FixedWindow(per_day, timezone=PACIFIC, unit="units")],
        "classify": verdict("youtube"),
        "retry": LONGEST_DAY,
        **fields,
    }


def youtube_search(per_day: str = "100/d", **fields: Any) -> Fields:
    """search.list, or videos.insert: each has a day of its own."""
    return {
        "limits": [FixedWindow(per_day, timezone=PACIFIC)],
        "classify": verdict("youtube"),
        "retry": LONGEST_DAY,
        **fields,
    }
