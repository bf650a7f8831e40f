"""Chats, telephony and mail: each sender or channel has a limit beside the account's."""

from __future__ import annotations

from typing import Any

from callqueue.limits.kinds import Concurrency, SlidingWindow, TokenBucket
from callqueue.limits.rules import Retry
from callqueue.providers.fields import Fields, verdict


def discord(**fields: Any) -> Fields:
    """Send with `key={"channel": ...}`. 5 in 5 seconds per channel is our choice."""
    return {
        "hosts": ["discord.com"],
        "limits": [
            SlidingWindow("5/5s", per="channel"),
            SlidingWindow("50/s", name="discord-bot"),
        ],
        "classify": verdict("discord"),
        **fields,
    }


def plivo_api(**fields: Any) -> Fields:
    return {
        "hosts": ["api.plivo.com"],
        "limits": [SlidingWindow("300/5s")],
        "idempotency_header": None,
        **fields,
    }


def plivo_voice(calls: str = "2/s", **fields: Any) -> Fields:
    return {"limits": [SlidingWindow(calls)], "idempotency_header": None} | fields


def plivo_sms(sender: str = "1/s", account: str = "5/s", **fields: Any) -> Fields:
    """`key` is the sending number."""
    return {
        "limits": [SlidingWindow(sender, per="key"), SlidingWindow(account)],
        "idempotency_header": None,
        **fields,
    }


def sendgrid(requests: str = "600/m", **fields: Any) -> Fields:
    """`requests`: what X-RateLimit-Limit says of your endpoint."""
    return {
        "hosts": ["api.sendgrid.com"],
        "limits": [SlidingWindow(requests)],
        "classify": verdict("sendgrid"),
        "idempotency_header": None,
        **fields,
    }


def ses(rate: str = "14/s", per_day: str = "50000/d", **fields: Any) -> Fields:
    """`rate`, `per_day`: your account's quotas, counted in recipients. Send with
    `cost={"recipients": ...}`.
    """
    return {
        "limits": [
            SlidingWindow(rate, unit="recipients"),
            SlidingWindow(per_day, unit="recipients"),
        ],
        "classify": verdict("ses"),
        "idempotency_header": None,
        **fields,
    }


def slack(tier: str = "50/m", **fields: Any) -> Fields:
    """One method of the Web API: `tier` is its requests a minute. Send with
    `key={"workspace": ...}`.
    """
    return {
        "limits": [SlidingWindow(tier, per="workspace")],
        "classify": verdict("slack"),
        **fields,
    }


def slack_post(workspace: str = "100/m", **fields: Any) -> Fields:
    """chat.postMessage. Send with `key={"workspace": ..., "channel": ...}`."""
    return {
        "hosts": ["slack.com"],
        "limits": [
            SlidingWindow("1/s", per="channel"),
            SlidingWindow(workspace, per="workspace"),
        ],
        "classify": verdict("slack"),
        **fields,
    }


def slack_webhook(**fields: Any) -> Fields:
    """Incoming webhooks. `key` is the webhook."""
    return {"hosts": ["hooks.slack.com"], "limits": [SlidingWindow("1/s", per="key")]} | fields


def twilio_voice(calls: str = "1/s", at_once: int = 20, **fields: Any) -> Fields:
    """Send with `key={"account": ...}`."""
    return {
        "hosts": ["api.twilio.com"],
        "limits": [SlidingWindow(calls, per="account"), _twilio(at_once)],
        "idempotency_header": None,
        **fields,
    }


def twilio_sms(segments: str = "10/10s", at_once: int = 20, **fields: Any) -> Fields:
    """Send with `key={"account": ..., "sender": ...}` and `cost={"segments": ...}`."""
    return {
        "limits": [
            _twilio(at_once),
            SlidingWindow("2000/s", per="account"),
            SlidingWindow(segments, per="sender", unit="segments"),
        ],
        "idempotency_header": None,
        **fields,
    }


def _twilio(at_once: int) -> Concurrency:
    return Concurrency(at_once, per="account", name="twilio-at-once")


def whatsapp(throughput: str = "80/s", **fields: Any) -> Fields:
    """Messages of the Cloud API. Send with `key={"sender": PHONE_NUMBER_ID, "pair": "ID:TO"}`.

    `throughput` is the sender's, messages that come in included.
    """
    return {
        "limits": [
            TokenBucket("10/m", burst=45, per="pair"),
            SlidingWindow(throughput, per="sender"),
        ],
        "classify": verdict("whatsapp"),
        "retry": Retry(max_attempts=5, base=4.0, factor=4.0),
        "idempotency_header": None,
        **fields,
    }
