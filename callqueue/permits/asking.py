"""What is asked for with a permit, checked as `send` checks the same arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from callqueue import conf, states
from callqueue.exceptions import InvalidCall
from callqueue.limits.rules import Rule
from callqueue.sending import intake
from callqueue.texts import storable

LONGEST_LABEL = 100
HIGHEST = 32767  # priority


@dataclass(frozen=True)
class Wanted:
    """`call`: a permit's columns. `wait` and `lease`: seconds; `wait` None: as long as it takes."""

    call: Mapping[str, Any] = field(repr=False)
    rule: Rule
    wait: float | None
    lease: float


@dataclass(frozen=True)
class Options:
    """What a permit may be asked for with, as `callqueue.permit` says."""

    rule: str | None = None
    key: str | Mapping[str, str] = ""
    cost: int | Mapping[str, int] = 1
    priority: int | None = None
    wait: float | None = None
    lease: float | None = None
    label: str = ""

    def as_wanted(self, url: str | None = None) -> Wanted:
        """These, checked; InvalidCall, UnknownRule. Without `rule`: the URL's, else "default"."""
        config = conf.current()
        name = self.rule if self.rule is not None else rule_of(url) or "default"
        rule, priority, lease = config.rule(name), self.priority, self.lease
        if priority is None:  # somebody waits for it: it goes before any backlog
            priority = min(rule.priority + 1, HIGHEST)
        request = intake.CallRequest(None, key=self.key, cost=self.cost, priority=priority)
        label, usual = _checked_label(self.label), config.begun_lease(rule)
        shown = "" if config.encryption_keys else label  # in lists, which are not encrypted
        call = {
            **intake.checked_columns(request, name, config),
            "method": states.PERMIT,
            "call_data": {"method": states.PERMIT, "params": {"label": label}},
            "path": shown,
        }
        return Wanted(
            call,
            rule,
            wait=None if self.wait is None else _checked_seconds("wait", self.wait, least=0.0),
            lease=usual if lease is None else _checked_seconds("lease", lease, least=0.1),
        )


def rule_of(url: str | None) -> str | None:
    """The name of the rule for this URL's host; None: no rule, or no URL. InvalidCall: no host."""
    if not isinstance(url, str | None):
        raise InvalidCall("url", "must be a string")
    try:
        host = urlsplit(url or "").hostname or ""
    except ValueError:
        raise InvalidCall("url", "cannot be read") from None
    if url and not host:
        raise InvalidCall("url", "names no host; give all of it, as https://api.example/path")
    return intake.rule_of_host(host, conf.current())


def _checked_seconds(argument: str, value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value:
        raise InvalidCall(argument, f"must be a number of seconds, {least:g} or more")
    return float(min(value, 366 * 86400))


def _checked_label(label: Any) -> str:
    if not isinstance(label, str):
        raise InvalidCall("label", "must be a string")
    return storable(label)[:LONGEST_LABEL]
