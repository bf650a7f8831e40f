"""The app's settings, typed. Nothing else in the app reads django.conf.settings.CALLQUEUE."""

# ruff: noqa: F401
# mypy: implicit-reexport

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from callqueue.conf.reader import (
    DEFAULTS,
    NAMES_OF_STATUS,
    STATUS_NAMES,
    Reader,
)
from callqueue.exceptions import UnknownRule
from callqueue.limits.budgets import Book
from callqueue.limits.rules import Rule
from callqueue.security.addresses import PLACES_WANTED, is_place_pattern
from callqueue.security.secrets import SecretFor
from callqueue.texts import suggest

_PLACE = f"is not among {PLACES_WANTED}"
_NETWORK = "is not a network such as '10.0.0.0/8', its host bits all 0"


@dataclass(frozen=True)
class Config:
    """The settings as the app uses them; floats are seconds, sizes bytes."""

    book: Book
    router: Callable[[Mapping[str, Any]], Any] | None
    handlers: Mapping[str, str]
    retention: Mapping[int, timedelta | None]
    allowed_hosts: tuple[str, ...]
    allowed_networks: tuple[str, ...]
    secrets: Mapping[str, SecretFor]
    calls_per_slot: int
    encryption_keys: tuple[str, ...] = field(repr=False)
    max_call_bytes: int
    max_response_bytes: int
    keep_response_bytes: int
    interval: float
    poll: float
    in_workers: int  # HTTP calls at once that a worker which releases makes itself
    release_lease: float
    grace: float

    @property
    def rules(self) -> Mapping[str, Rule]:
        return self.book.rules

    def rule(self, name: str) -> Rule:
        """The rule of this name; UnknownRule suggests the nearest."""
        try:
            return self.book.rules[name]
        except (KeyError, TypeError):
            raise UnknownRule(
                f"there is no rule {name!r}{suggest(str(name), self.book.rules)}"
            ) from None

    def kept_response_bytes(self, rule: Rule | None) -> int:
        """How much of an answer is kept; None: of a rule that is gone."""
        own = rule.keep_response_bytes if rule else None
        return self.keep_response_bytes if own is None else own

    def queue_of(self, rule: str) -> str:
        """A queue whose workers make the rule's calls; "": Celery's default, or no such rule."""
        return self.rules[rule].queue_names[0] if rule in self.rules else ""

    def begun_lease(self, rule: Rule | None) -> float:
        """Seconds for an attempt from when it may be sent to its record; None: its rule is gone."""
        return (rule.total_timeout if rule else 0.0) + self.grace


@cache
def current() -> Config:
    """The settings in force. ImproperlyConfigured lists everything that is wrong."""
    config, wrong = _read_settings()
    if wrong:
        raise ImproperlyConfigured("; ".join(wrong))
    return config


def problems() -> list[str]:
    """What is wrong with the settings, one sentence each; empty when nothing is."""
    return _read_settings()[1]


def forget(*, setting: str = "", **_: Any) -> None:
    """Read the settings again at the next use: connected to Django's setting_changed."""
    if setting in ("", "CALLQUEUE"):
        current.cache_clear()


setting_changed.connect(forget, dispatch_uid="callqueue.conf")


def _read_settings() -> tuple[Config, list[str]]:
    """The settings, of use to nobody if anything is wrong with them, and what is wrong."""
    reader = Reader(getattr(settings, "CALLQUEUE", {}))
    of_dispensers = {"INTERVAL": 0.05, "POLL": 0.001, "IN_WORKERS": 0}
    dispenser = reader.named_numbers("DISPENSER", of_dispensers)
    leases = reader.named_numbers("LEASE", {"RELEASE": 0.1, "GRACE": 0.1})
    book = reader.book()
    config = Config(
        book=book,
        router=reader.router(),
        handlers=reader.handlers(),
        retention=reader.retention(),
        allowed_hosts=reader.strings("ALLOWED_HOSTS", is_place_pattern, _PLACE),
        allowed_networks=reader.strings("ALLOWED_NETWORKS", ipaddress.ip_network, _NETWORK),
        secrets=reader.secrets(book.rules),
        calls_per_slot=reader.whole_number("CALLS_PER_SLOT", unit="calls"),
        encryption_keys=reader.encryption_keys(),
        max_call_bytes=reader.whole_number("MAX_CALL_BYTES"),
        max_response_bytes=reader.whole_number("MAX_RESPONSE_BYTES"),
        keep_response_bytes=reader.whole_number("KEEP_RESPONSE_BYTES", least=0),
        interval=dispenser["INTERVAL"],
        poll=dispenser["POLL"],
        in_workers=int(dispenser["IN_WORKERS"]),
        release_lease=leases["RELEASE"],
        grace=leases["GRACE"],
    )
    return config, reader.wrong
