"""Language models: requests and tokens a minute, by tier, and answers that take long."""

from __future__ import annotations

import math
from typing import Any

from callqueue.limits.kinds import FixedWindow, SlidingWindow, TokenBucket
from callqueue.limits.kinds.fields import SECOND, parse_rate
from callqueue.limits.rules import Retry
from callqueue.providers.fields import Fields, cost, verdict

SLOW = {"read_timeout": 300, "total_timeout": 300}


def openai(requests: str = "500/m", tokens: str = "90000/m", **fields: Any) -> Fields:
    """`requests`, `tokens`: your tier's limits.

    Send with `cost={"tokens": ...}`: the prompt's, and the most that may come back.
    """
    return {
        "hosts": ["api.openai.com"],
        "limits": [
            SlidingWindow(requests),
            _even(requests),
            SlidingWindow(tokens, unit="tokens"),
        ],
        "classify": verdict("openai"),
        "settle": cost("openai"),
        **SLOW,
        **fields,
    }


def anthropic(
    requests: str = "50/m",
    input_tokens: str = "30000/m",
    output_tokens: str = "8000/m",
    **fields: Any,
) -> Fields:
    """`requests`, `input_tokens`, `output_tokens`: your tier's limits for the model.

    Send with `cost={"input_tokens": ..., "output_tokens": ...}`, the latter as `max_tokens`.
    """
    return {
        "hosts": ["api.anthropic.com"],
        "limits": [
            SlidingWindow(requests),
            _even(requests),
            SlidingWindow(input_tokens, unit="input_tokens"),
            SlidingWindow(output_tokens, unit="output_tokens"),
        ],
        "classify": verdict("anthropic"),
        "settle": cost("anthropic"),
        "retry": Retry(base=5.0),
        **SLOW,
        **fields,
    }


def gemini(
    requests: str = "150/m",
    tokens: str = "1000000/m",
    per_day: str | None = "1000/d",
    **fields: Any,
) -> Fields:
    """`requests`, `tokens` (of the prompt), `per_day`: your tier's limits for the model.

    Send with `cost={"tokens": ...}`, the prompt's.
    """
    limits: list[Any] = [SlidingWindow(requests), SlidingWindow(tokens, unit="tokens")]
    if per_day is not None:
        limits.append(FixedWindow(per_day, timezone="America/Los_Angeles"))
    return {
        "hosts": ["generativelanguage.googleapis.com"],
        "limits": limits,
        "classify": verdict("gemini"),
        "settle": cost("gemini"),
        "retry": Retry(base=5.0, max_hold=90000.0),
        **SLOW,
        **fields,
    }


def _even(requests: str) -> TokenBucket:
    """Spreads the requests over the minute. A call holds its token until the ledger knows that it
    was sent, so the burst has those of a second, and one more: however long answers take.
    """
    n, period_us = parse_rate(requests, "requests")
    return TokenBucket(requests, burst=math.ceil(n * SECOND / period_us) + 1)
