"""The recipes of docs/how-to/providers.md: each rule is sound, and what a provider answered once means
what its section says.

The answers are as the providers' documentation and their users show them.
"""

# ruff: noqa: F811
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.utils import timezone

from callqueue import Rule, conf
from callqueue.models import CallAttempt, CallQueue, Hold
from tests.db.conftest import remote, rules  # noqa: F401
from tests.docs.test_docs_code import BLOCK, DOCS
from tests.support.behaviour import Vendor, response, run, send

Rules = Callable[..., None]


def recipes() -> dict[str, Any]:
    """Everything that the page's blocks define, by its name; each block stands alone."""
    defined: dict[str, Any] = {}
    for block in BLOCK.finditer((DOCS / "how-to" / "providers.md").read_text(encoding="utf-8")):
        own: dict[str, Any] = {}
        exec(block["code"], own)
        again = [name for name in own.keys() & defined.keys() if isinstance(own[name], Rule)]
        assert not again, "two sections name a rule alike"
        defined |= own
    return defined


RECIPES = recipes()
RULES = {name: value for name, value in RECIPES.items() if isinstance(value, Rule)}
SOON = str(int(timezone.now().timestamp()) + 3600)  # written when the tests begin
TOO_MANY = {"errors": [{"field": None, "message": "too many requests"}]}
BUSINESS = {"x-business-use-case-usage": json.dumps({"667": [
    {"type": "messages", "call_count": 100, "estimated_time_to_regain_access": 5},
]})}  # fmt: skip


def test_every_recipe_is_a_sound_rule_beside_all_others_and_has_an_answer(settings: Any) -> None:
    named = {name.replace("_", "-"): rule for name, rule in RULES.items()}
    settings.CALLQUEUE = {"RULES": named, "ROUTER": RECIPES["github_route"]}
    assert conf.problems() == []
    assert len(named) > 35
    assert all(conf.current().rules[name].limits for name in named)
    # those that have no answer are refused in the same way as another rule of theirs
    alike = {"plivo_sms", "plivo_voice", "spapi_tokens", "spapi_restrictions", "youtube_search"}
    assert RULES.keys() - {name for name, *_ in ANSWERS} == alike | {"mine"}


Held = tuple[str, float | None]
# provider, key, status, headers, body -> the hold's scope and the seconds that it lasts (None: the
# backoff); "failed" where nothing is held
ANSWERS: list[tuple[str, Any, int, Mapping[str, str], Any, Held | str]] = [
    ("airtable", {"base": "b", "user": "u"}, 429, {}, {"errors": [{"error": "RATE_LIMIT_REACHED"}]}, ("base", 30)),
    ("spapi_orders", "seller", 429, {"x-amzn-RateLimit-Limit": "0.0167"}, {"errors": [{"code": "QuotaExceeded"}]}, ("key", 60)),
    ("cloudflare", "token", 429, {"retry-after": "120"}, {"success": False}, ("key", 120)),
    ("discord", {"channel": "c"}, 429, {"Retry-After": "1"}, {"message": "You are being rate limited.", "retry_after": 64.57, "global": False}, ("channel", 64.57)),
    ("discord", {"channel": "c"}, 429, {}, {"retry_after": 5.5, "global": True}, ("rule", 5.5)),
    ("github_read", "u", 403, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": SOON}, {"message": "API rate limit exceeded for user ID 1."}, ("key", 3600)),
    ("github_read", "u", 403, {"retry-after": "60"}, {"message": "You have exceeded a secondary rate limit."}, ("key", 60)),
    ("github_write", "u", 403, {}, {"message": "You have exceeded a secondary rate limit."}, ("key", None)),
    ("github_read", "u", 403, {}, {"message": "Resource not accessible by integration"}, "failed"),
    ("hubspot", "a", 429, {}, {"status": "error", "policyName": "TEN_SECONDLY_ROLLING"}, ("key", 10)),
    ("hubspot_search", "a", 429, {}, {"policyName": "SECONDLY"}, ("key", 10)),
    ("notion", "c", 429, {"Retry-After": "7"}, {"code": "rate_limited"}, ("key", 7)),
    ("notion", "c", 529, {}, {"code": "service_overload"}, ("key", None)),
    ("openai", "", 429, {"retry-after": "20"}, {"error": {"code": "rate_limit_exceeded"}}, ("rule", 20)),
    ("openai", "", 429, {}, {"error": {"code": "insufficient_quota"}}, "failed"),
    ("anthropic", "", 429, {"retry-after": "33"}, {"type": "error", "error": {"type": "rate_limit_error"}}, ("rule", 33)),
    ("anthropic", "", 529, {}, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, ("rule", None)),
    ("anthropic", "", 429, {}, {"error": {"type": "rate_limit_error", "details": {"error_code": "enforced_spend_limit_reached"}}}, "failed"),
    ("gemini", "", 429, {}, {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "43s"}]}}, ("rule", 43)),
    ("gemini", "", 429, {}, {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED"}}, ("rule", None)),
    ("plivo_api", "", 429, {}, {"error": "too many requests"}, ("rule", None)),
    ("quickbooks", "r", 429, {}, {"Fault": {"Error": [{"code": "3001"}]}}, ("key", 60)),
    ("quickbooks_batch", "r", 429, {}, {}, ("key", 60)),
    ("salesforce", "o", 403, {}, [{"message": "TotalRequests Limit exceeded.", "errorCode": "REQUEST_LIMIT_EXCEEDED"}], ("key", 900)),
    ("salesforce", "o", 403, {}, [{"message": "ConcurrentPerOrgLongTxn Limit exceeded.", "errorCode": "REQUEST_LIMIT_EXCEEDED"}], ("key", 30)),
    ("salesforce", "o", 403, {}, [{"errorCode": "API_DISABLED_FOR_ORG"}], "failed"),
    ("sendgrid", "", 429, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": SOON}, TOO_MANY, ("rule", 3600)),
    ("ses", "", 400, {}, "<ErrorResponse><Error><Code>Throttling</Code><Message>Maximum sending rate exceeded.</Message></Error></ErrorResponse>", ("rule", None)),
    ("ses", "", 429, {"x-amzn-ErrorType": "TooManyRequestsException"}, {"message": "Too many requests"}, ("rule", None)),
    ("ses", "", 400, {}, "<Code>Throttling</Code><Message>Daily message quota exceeded.</Message>", ("rule", 3600)),
    ("ses", "", 400, {}, {"message": "Email address is not verified."}, "failed"),
    ("shopify_graphql", "shop", 200, {}, {"errors": [{"message": "Throttled", "extensions": {"code": "THROTTLED"}}], "extensions": {"cost": {"requestedQueryCost": 202, "throttleStatus": {"maximumAvailable": 1000.0, "currentlyAvailable": 2, "restoreRate": 50.0}}}}, ("key", 4)),
    ("shopify_graphql", "shop", 200, {}, {"errors": [{"extensions": {"code": "THROTTLED"}}]}, ("key", 1)),
    ("shopify_rest", "shop", 429, {"Retry-After": "2.0"}, {"errors": "Exceeded 2 calls per second"}, ("key", 2)),
    ("slack_post", {"workspace": "T1", "channel": "C9"}, 429, {"Retry-After": "30"}, {"ok": False, "error": "ratelimited"}, ("workspace", 30)),
    ("slack_tier_3", {"workspace": "T1"}, 200, {}, {"ok": False, "error": "channel_not_found"}, "failed"),
    ("slack_webhook", "hook", 429, {"Retry-After": "1"}, "rate_limited", ("key", 1)),
    ("stripe_read", {"endpoint": "e", "object": "o"}, 429, {"Stripe-Rate-Limited-Reason": "global-rate"}, {"error": {"code": "rate_limit"}}, ("rule", None)),
    ("stripe_pay", {"endpoint": "e", "object": "o"}, 429, {"Stripe-Rate-Limited-Reason": "endpoint-concurrency"}, {}, ("endpoint", None)),
    ("stripe_pay", {"endpoint": "e", "object": "o"}, 429, {}, {"error": {"code": "lock_timeout"}}, ("object", None)),
    ("twilio_sms", {"account": "AC1", "sender": "+1"}, 429, {}, {"code": 20429}, ("account", None)),
    ("twilio_voice", {"account": "AC1"}, 429, {}, {"code": 20429}, ("account", None)),
    ("whatsapp", {"sender": "s", "pair": "s:1"}, 400, {}, {"error": {"message": "(#130429) Rate limit hit", "type": "OAuthException", "code": 130429}}, ("sender", None)),
    ("whatsapp", {"sender": "s", "pair": "s:1"}, 400, BUSINESS, {"error": {"code": 80007}}, ("sender", 300)),
    ("whatsapp", {"sender": "s", "pair": "s:1"}, 400, {}, {"error": {"message": "(#131056) (Business Account, Consumer Account) pair rate limit hit", "code": 131056}}, ("pair", 60)),
    ("whatsapp", {"sender": "s", "pair": "s:1"}, 400, {}, {"error": {"code": 131047, "message": "Re-engagement message"}}, "failed"),
    ("meta", "act_1", 403, BUSINESS, {"error": {"message": "There have been too many calls from this ad-account.", "code": 80004}}, ("key", 300)),
    ("meta", "act_1", 400, {}, {"error": {"message": "(#4) Application request limit reached", "code": 4}}, ("key", None)),
    ("meta", "act_1", 400, {}, {"error": {"code": 100, "message": "Invalid parameter"}}, "failed"),
    ("microsoft_graph", "", 429, {"Retry-After": "10"}, {"error": {"code": "TooManyRequests"}}, ("rule", 10)),
    ("microsoft_outlook", "mailbox", 429, {"Retry-After": "12"}, {"error": {"code": "ApplicationThrottled", "message": "Application is over its MailboxConcurrency limit."}}, ("key", 12)),
    ("xero", "t", 429, {"Retry-After": "31", "X-Rate-Limit-Problem": "minute"}, {}, ("key", 31)),
    ("youtube", "", 403, {}, {"error": {"errors": [{"reason": "forbidden"}]}}, "failed"),
    ("zendesk", {"account": "a"}, 429, {"Retry-After": "93"}, {"error": "APIRateLimitExceeded"}, ("account", 93)),
    ("zendesk_update", {"account": "a", "ticket": "t"}, 429, {"Retry-After": "93"}, {}, ("account", 93)),
]  # fmt: skip
KEYS = {name: key for name, key, *_ in ANSWERS}


@pytest.mark.parametrize("given", ANSWERS, ids=lambda given: f"{given[0]} {given[2]}")
def test_an_answer_means_what_the_provider_says(rules: Rules, remote: Vendor, given: Any) -> None:
    name, key, status, headers, body, expected = given
    rules(r=replace(RULES[name], hosts=()))
    content = body if isinstance(body, str) else json.dumps(body)
    remote.answers["/"] = (status, headers, content.encode())
    call = send("r", key=key)
    before = timezone.now()
    run()
    call.refresh_from_db()
    assert len(remote.requests) == 1
    if isinstance(expected, str):
        failed = (CallQueue.Status.FAILED, 0)
        assert (call.status, Hold.objects.count()) == failed, call.error_message
        return
    assert (call.status, call.failed_count) == (CallQueue.Status.ERROR, 0), call.error_message
    assert CallAttempt.objects.get().outcome == CallAttempt.Outcome.THROTTLED
    assert "classify failed" not in call.error_message
    hold = Hold.objects.get()
    scope, seconds = expected
    assert hold.per == scope
    assert hold.until is not None
    if seconds is not None:
        assert 0.8 * seconds < (hold.until - before).total_seconds() < seconds + 30


@pytest.mark.parametrize(
    ("verdict", "status", "body"),
    [
        ("youtube_verdict", 403, {"error": {"errors": [{"reason": "quotaExceeded"}]}}),
        ("gemini_verdict", 429, {"error": {"details": [{"violations": [
            {"quotaId": "GenerateRequestsPerDayPerProjectPerModel-FreeTier"}]}]}}),
    ],
)  # fmt: skip
def test_a_days_quota_lasts_until_midnight_in_california(
    verdict: str, status: int, body: Any
) -> None:
    found = RECIPES[verdict](response(status, {}, body))
    assert timedelta(0) < found.until - timezone.now() <= timedelta(hours=25)
    assert found.until.astimezone(ZoneInfo("America/Los_Angeles")).hour == 0


@pytest.mark.parametrize(
    ("settle", "body", "cost"),
    [
        ("openai_cost", {"usage": {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}}, {"tokens": 21}),
        ("anthropic_cost", {"usage": {"input_tokens": 30, "output_tokens": 7, "cache_creation_input_tokens": 5, "cache_read_input_tokens": 900}}, {"input_tokens": 35, "output_tokens": 7}),
        ("gemini_cost", {"usageMetadata": {"promptTokenCount": 4, "totalTokenCount": 40}}, {"tokens": 4}),
        ("shopify_cost", {"extensions": {"cost": {"requestedQueryCost": 101, "actualQueryCost": 46}}}, {"points": 46}),
    ],
)  # fmt: skip
def test_what_a_call_cost_after_all(settle: str, body: Any, cost: dict[str, int]) -> None:
    assert RECIPES[settle](response(200, {}, body)) == cost
    assert RECIPES[settle](response(429, {}, {"error": {}})) is None


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.classify])
@pytest.mark.parametrize("status", [429, 500])
def test_an_answer_that_no_page_describes_is_judged_as_usual(
    rules: Rules,
    remote: Vendor,
    name: str,
    status: int,
) -> None:
    """As a proxy in between gives them: a verdict that fails on it is none."""
    rules(r=replace(RULES[name], hosts=()))
    remote.answers["/"] = (status, {}, b"<html>Too many</html>")
    call = send("r", key=KEYS.get(name, "k"))
    run()
    call.refresh_from_db()
    assert (call.status, Hold.objects.count()) == (CallQueue.Status.ERROR, int(status == 429))


def test_githubs_reads_and_writes_go_their_ways() -> None:
    def route(method: str, url: str) -> Any:
        return RECIPES["github_route"]({"method": method, "params": {"url": url}})

    assert route("get", "https://api.github.com/user").cost == {"points": 1}
    assert route("post", "https://api.github.com/user/repos").rule == "github-write"
    assert route("get", "https://api.github.com.example/") is None
