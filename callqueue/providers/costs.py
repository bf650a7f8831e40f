"""What a call cost after all, as its answer says (`settle`), and what one will, for a ROUTER."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callqueue.limits.rules import Route
from callqueue.providers.answers import as_object, body, number

READS = ("get", "head", "options")


def anthropic(response: Any) -> dict[str, int] | None:
    """Input tokens without those read from the cache, and output tokens."""
    used = as_object(body(response).get("usage"))
    counts = [number(used.get(name)) for name in ("input_tokens", "output_tokens")]
    if None in counts:
        return None
    written = number(used.get("cache_creation_input_tokens")) or 0.0
    into, out = (int(count) for count in counts if count is not None)
    return {"input_tokens": into + int(written), "output_tokens": out}


def gemini(response: Any) -> dict[str, int] | None:
    """The prompt's tokens: what Gemini's limit of tokens counts."""
    return _one(as_object(body(response).get("usageMetadata")).get("promptTokenCount"), "tokens")


def openai(response: Any) -> dict[str, int] | None:
    """All tokens, of the prompt and of the answer."""
    return _one(as_object(body(response).get("usage")).get("total_tokens"), "tokens")


def shopify(response: Any) -> dict[str, int] | None:
    """The query's points."""
    cost = as_object(as_object(body(response).get("extensions")).get("cost"))
    return _one(cost.get("actualQueryCost"), "points")


def github_route(call_data: Mapping[str, Any]) -> Route | None:
    """For `ROUTER`: GitHub's reads cost a point, its writes five, under the rules "github-read" and
    "github-write". None for other hosts.
    """
    if not str(call_data["params"].get("url", "")).startswith("https://api.github.com/"):
        return None
    if call_data["method"] in READS:
        return Route(rule="github-read", cost={"points": 1})
    return Route(rule="github-write", cost={"points": 5})


def _one(count: Any, unit: str) -> dict[str, int] | None:
    used = number(count)
    return None if used is None else {unit: int(used)}
