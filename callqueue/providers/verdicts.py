"""Verdicts: what an answer means, for providers that throttle in a way of their own.

In: a requests.Response. Out: an outcome, or None for the usual verdict (a 429, or a 503 with
Retry-After, holds). docs/how-to/providers.md has the sources.
"""

from __future__ import annotations

import json
from datetime import datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from callqueue.outcome import GiveUp, HoldUntil, Outcome
from callqueue.providers.answers import (
    as_object,
    as_objects,
    body,
    epoch,
    error,
    number,
    retry_after,
    told,
)

PACIFIC = ZoneInfo("America/Los_Angeles")

# Meta's codes: app, user, page and custom limits; business use cases; WhatsApp's own.
META_LIMITS = frozenset({4, 17, 32, 341, 368, 613, *range(80000, 80015)})
WHATSAPP_LIMITS = frozenset({4, 80007, 130429, 131048, 131056, 131057, 133016})
PAIR_LIMIT = 131056  # one sender and one recipient


def anthropic(response: Any) -> Outcome | None:
    """A spend limit is not waited for. 529 (overloaded) is in the rule's `retry.statuses`."""
    details = as_object(error(response).get("details"))
    if details.get("error_code") == "enforced_spend_limit_reached":
        return GiveUp("Anthropic: the month's spend limit is reached")
    return None


def discord(response: Any) -> Outcome | None:
    """A 429 that says `global` holds the rule; any other the narrowest scope, the channel."""
    if response.status_code != 429:
        return None
    answer = body(response)
    after = number(answer.get("retry_after"))
    seconds = retry_after(response, 1.0) if after is None else after
    return HoldUntil(seconds, "Discord: 429", scope="rule" if answer.get("global") else None)


def gemini(response: Any) -> Outcome | None:
    """A 429 says in its body for how long (RetryInfo), and whether the day's quota is used up."""
    if response.status_code != 429:
        return None
    details = as_objects(error(response).get("details"))
    quotas = [v for d in details for v in as_objects(d.get("violations"))]
    if any("PerDay" in str(quota.get("quotaId")) for quota in quotas):
        return HoldUntil(_midnight_pacific(), "Gemini: the day's quota is used up")
    delays = [number(str(d.get("retryDelay", "")).removesuffix("s")) for d in details]
    known = [delay for delay in delays if delay is not None]
    return HoldUntil(known[0] if known else retry_after(response, None), "Gemini: 429")


def github(response: Any) -> Outcome | None:
    """403 and 429 alike: `retry-after`, else the end of the hour, else the backoff."""
    if response.status_code not in (403, 429):
        return None
    if (seconds := retry_after(response, None)) is not None:
        return HoldUntil(seconds, "GitHub: retry-after")
    reset = epoch(response.headers, "x-ratelimit-reset")
    if response.headers.get("x-ratelimit-remaining") == "0" and reset is not None:
        return HoldUntil(reset, "GitHub: the hour's requests are used up")
    if response.status_code == 429 or "secondary rate limit" in response.text.lower():
        return HoldUntil(None, "GitHub: secondary limit")
    return None


def meta(response: Any) -> Outcome | None:
    """Throttled with status 400 or 403 and a code; the header says how many minutes are left."""
    code = _code(response)
    if code not in META_LIMITS:
        return None
    return HoldUntil(_minutes_of_meta(response), f"Meta: error {code}")


def openai(response: Any) -> Outcome | None:
    """No money left is no reason to wait."""
    if response.status_code == 429 and error(response).get("code") == "insufficient_quota":
        return GiveUp("OpenAI: insufficient_quota; see the account's billing")
    return None


def salesforce(response: Any) -> Outcome | None:
    """A 403 with REQUEST_LIMIT_EXCEEDED, for the day or for long requests at once."""
    for one in as_objects(told(response)):
        if one.get("errorCode") == "REQUEST_LIMIT_EXCEEDED":
            at_once = "Concurrent" in str(one.get("message"))
            return HoldUntil(30 if at_once else 900, f"Salesforce: {one.get('message')}")
    return None


def sendgrid(response: Any) -> Outcome | None:
    """A 429 lasts until X-RateLimit-Reset."""
    if response.status_code != 429:
        return None
    reset = epoch(response.headers, "X-RateLimit-Reset")
    return HoldUntil(reset or retry_after(response, None), "SendGrid: too many requests")


def ses(response: Any) -> Outcome | None:
    """Throttled with a 400 or a 429: the rate for a moment, the day's quota for long."""
    text = response.text
    if response.status_code not in (400, 429, 454):
        return None
    if "Daily message quota exceeded" in text:
        return HoldUntil(3600, "SES: the quota of 24 hours is used up")
    if response.status_code == 429 or "sending rate exceeded" in text or "Throttling" in text:
        return HoldUntil(None, "SES: the sending rate is exceeded")
    return None


def shopify(response: Any) -> Outcome | None:
    """GraphQL throttles with a 200: hold until the bucket has what the query asked for."""
    answer = body(response)
    errors = as_objects(answer.get("errors"))
    if not any(as_object(one.get("extensions")).get("code") == "THROTTLED" for one in errors):
        return None
    cost = as_object(as_object(answer.get("extensions")).get("cost"))
    status = as_object(cost.get("throttleStatus"))
    wanted, there = number(cost.get("requestedQueryCost")), number(status.get("currentlyAvailable"))
    rate = number(status.get("restoreRate"))
    seconds = (wanted - there) / rate if wanted is not None and there is not None and rate else 1.0
    return HoldUntil(max(1.0, seconds), "Shopify: THROTTLED")


def slack(response: Any) -> Outcome | None:
    """A 429 holds the workspace; a 200 with `"ok": false` has failed."""
    if response.status_code == 429:
        return HoldUntil(retry_after(response, 30.0), "Slack: 429", scope="workspace")
    answer = body(response)
    if response.status_code == 200 and answer.get("ok") is False:
        if answer.get("error") in ("ratelimited", "rate_limited"):
            return HoldUntil(retry_after(response, 30.0), "Slack: ratelimited", scope="workspace")
        return GiveUp(f"Slack: {answer.get('error')}")
    return None


def stripe(response: Any) -> Outcome | None:
    """A 429 names its limit: all, the endpoint, or (the usual verdict) the object."""
    if response.status_code != 429:
        return None
    reason = response.headers.get("Stripe-Rate-Limited-Reason", "")
    for prefix, scope in (("global", "rule"), ("endpoint", "endpoint")):
        if reason.startswith(prefix):
            return HoldUntil(retry_after(response, None), f"Stripe: {reason}", scope=scope)
    return None


def whatsapp(response: Any) -> Outcome | None:
    """Throttled with a 400 and a code: the pair of sender and recipient, or the whole sender."""
    code = _code(response)
    if code not in WHATSAPP_LIMITS:
        return None
    if code == PAIR_LIMIT:
        return HoldUntil(60, f"WhatsApp: error {code}, too many to this recipient", scope="pair")
    return HoldUntil(_minutes_of_meta(response), f"WhatsApp: error {code}", scope="sender")


def youtube(response: Any) -> Outcome | None:
    """A 403 with quotaExceeded: until midnight, Pacific Time."""
    reasons = [detail.get("reason") for detail in as_objects(error(response).get("errors"))]
    if response.status_code != 403 or "quotaExceeded" not in reasons:
        return None
    return HoldUntil(_midnight_pacific(), "YouTube: the day's quota is used up")


def _code(response: Any) -> int | None:
    """The number of an error of Meta's."""
    code = error(response).get("code")
    return code if isinstance(code, int) else None


def _midnight_pacific() -> datetime:
    tomorrow = datetime.now(PACIFIC).date() + timedelta(days=1)
    return datetime.combine(tomorrow, time.min, PACIFIC)


def _minutes_of_meta(response: Any) -> float | None:
    """Seconds until access is regained, of X-Business-Use-Case-Usage; None where it is missing."""
    try:
        usage = json.loads(response.headers.get("X-Business-Use-Case-Usage", ""))
    except ValueError:
        return None
    uses = [use for listed in as_object(usage).values() for use in as_objects(listed)]
    minutes = [number(use.get("estimated_time_to_regain_access")) or 0.0 for use in uses]
    return max(minutes, default=0.0) * 60 or None
