"""What the rules of all providers are made of: a Rule's fields, and the paths of their hooks."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def verdict(name: str) -> str:
    """The dotted path of a verdict: settings that hold a path are the same in every process."""
    return f"callqueue.providers.verdicts.{name}"


def cost(name: str) -> str:
    """The dotted path of a `settle`."""
    return f"callqueue.providers.costs.{name}"
