"""Business applications: each account, organisation or shop has limits of its own (`per="key"`)."""

from __future__ import annotations

from typing import Any

from callqueue.limits.kinds import Concurrency, FixedWindow, SlidingWindow, TokenBucket
from callqueue.limits.rules import Retry
from callqueue.providers.fields import Fields, cost, verdict


def airtable(**fields: Any) -> Fields:
    """Send with `key={"base": ..., "user": ...}`."""
    return {
        "hosts": ["api.airtable.com"],
        "limits": [SlidingWindow("5/s", per="base"), SlidingWindow("50/s", per="user")],
        "retry": Retry(base=30.0),
        **fields,
    }


def spapi(rate: str, burst: int, **fields: Any) -> Fields:
    """One operation of Amazon's SP-API: its rate and burst. `key` is the seller."""
    return {
        "limits": [TokenBucket(rate, burst=burst, per="key")],
        "retry": Retry(base=60.0),
    } | fields


def hubspot(
    ten_seconds: int = 100,
    per_day: str = "250000/d",
    timezone: str = "America/New_York",
    **fields: Any,
) -> Fields:
    """`timezone` is the accounts'. `key` is the account."""
    return {
        "hosts": ["api.hubapi.com"],
        "limits": [
            SlidingWindow(f"{ten_seconds}/10s", per="key"),
            _hubspot_day(per_day, timezone),
        ],
        "retry": Retry(base=10.0, max_hold=90000.0),
        **fields,
    }


def hubspot_search(
    per_day: str = "250000/d", timezone: str = "America/New_York", **fields: Any
) -> Fields:
    """Search. It shares the day with `hubspot`: give both the same."""
    return {
        "limits": [SlidingWindow("4/s", per="key"), _hubspot_day(per_day, timezone)],
        "retry": Retry(base=10.0, max_hold=90000.0),
        **fields,
    }


def _hubspot_day(per_day: str, timezone: str) -> FixedWindow:
    return FixedWindow(per_day, timezone=timezone, per="key", name="hubspot-day")


def notion(**fields: Any) -> Fields:
    """`key` is the connection."""
    return {
        "hosts": ["api.notion.com"],
        "limits": [SlidingWindow("180/m", per="key"), TokenBucket("3/s", burst=3, per="key")],
        **fields,
    }


def quickbooks(**fields: Any) -> Fields:
    """`key` is the realm."""
    return {
        "hosts": ["quickbooks.api.intuit.com"],
        "limits": _quickbooks(),
        "retry": Retry(base=60.0),
        "total_timeout": 120,
        **fields,
    }


def quickbooks_batch(**fields: Any) -> Fields:
    """Batches. They share the realm's limits with `quickbooks`."""
    return {
        "limits": [SlidingWindow("40/m", per="key"), *_quickbooks()],
        "retry": Retry(base=60.0),
        "total_timeout": 120,
        **fields,
    }


def _quickbooks() -> list[SlidingWindow]:
    return [
        SlidingWindow("10/s", per="key", name="quickbooks-realm-and-app"),
        SlidingWindow("500/m", per="key", name="quickbooks-realm"),
    ]


def salesforce(per_day: str = "100000/d", **fields: Any) -> Fields:
    """`per_day`: your part of the org's requests of 24 hours. `key` is the org."""
    return {
        "limits": [Concurrency(25, per="key"), SlidingWindow(per_day, per="key")],
        "classify": verdict("salesforce"),
        "retry": Retry(max_rate_limited=100),
        "total_timeout": 600,
        **fields,
    }


def shopify_graphql(points: str = "100/s", bucket: int = 1000, **fields: Any) -> Fields:
    """Send with `cost={"points": ...}`, the query's requested cost. `key` is the shop."""
    return {
        "limits": [TokenBucket(points, burst=bucket, per="key", unit="points")],
        "classify": verdict("shopify"),
        "settle": cost("shopify"),
        **fields,
    }


def shopify_rest(rate: str = "2/s", bucket: int = 40, **fields: Any) -> Fields:
    """`key` is the shop."""
    return {"limits": [TokenBucket(rate, burst=bucket, per="key")]} | fields


def stripe_read(account: str = "100/s", endpoint: str = "25/s", **fields: Any) -> Fields:
    """Send with `key={"endpoint": ..., "object": ...}`."""
    return {
        "hosts": ["api.stripe.com"],
        "limits": _stripe(account, endpoint),
        "classify": verdict("stripe"),
        **fields,
    }


def stripe_pay(account: str = "100/s", endpoint: str = "25/s", **fields: Any) -> Fields:
    """Writes, before reads. They share the account's limits with `stripe_read`: give both the
    same.
    """
    return {
        "priority": 10,
        "limits": [SlidingWindow("1000/h", per="object"), *_stripe(account, endpoint)],
        "classify": verdict("stripe"),
        **fields,
    }


def _stripe(account: str, endpoint: str) -> list[Any]:
    return [
        SlidingWindow(endpoint, per="endpoint", name="stripe-endpoint"),
        SlidingWindow(account, name="stripe-account"),
        TokenBucket(account, burst=10, name="stripe-even"),
        Concurrency(20, name="stripe-at-once"),
    ]


def xero(per_day: str = "5000/d", **fields: Any) -> Fields:
    """`key` is the organisation's tenant id."""
    return {
        "hosts": ["api.xero.com"],
        "limits": [
            Concurrency(5, per="key"),
            SlidingWindow("60/m", per="key"),
            SlidingWindow(per_day, per="key"),
            SlidingWindow("10000/m"),
        ],
        "retry": Retry(max_hold=86400.0),
        **fields,
    }


def zendesk(account: str = "400/m", **fields: Any) -> Fields:
    """`account`: your plan's requests a minute. Send with `key={"account": ..., "ticket": ...}`."""
    return {"limits": [_zendesk(account)]} | fields


def zendesk_update(account: str = "400/m", **fields: Any) -> Fields:
    """Updates of tickets. They share the account's limit with `zendesk`: give both the same."""
    return {
        "limits": [
            _zendesk(account),
            SlidingWindow("100/m", per="account"),
            SlidingWindow("30/10m", per="ticket"),
        ],
        **fields,
    }


def _zendesk(account: str) -> SlidingWindow:
    return SlidingWindow(account, per="account", name="zendesk-account")
