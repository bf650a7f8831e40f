"""The app's settings, typed: `current()` reads CALLQUEUE once, checks it, and reads it again when
settings change.

Anything wrong raises ImproperlyConfigured naming the key and what to do; `problems()` gives all of
it for the system checks. Nothing else in the app reads django.conf.settings.CALLQUEUE.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from callqueue import states
from callqueue.exceptions import UnknownRule
from callqueue.limits.budgets import Book, bind
from callqueue.limits.kinds import SlidingWindow
from callqueue.limits.rules import MAX_NAME, PLACES_WANTED, Rule, is_place_pattern
from callqueue.security.secrets import SecretFor
from callqueue.texts import suggest as suggest

STATUS_NAMES = {
    "new": states.NEW,
    "dispatched": states.DISPATCHED,
    "error": states.ERROR,
    "done": states.DONE,
    "failed": states.FAILED,
    "cancelled": states.CANCELLED,
    "expired": states.EXPIRED,
    "unknown": states.UNKNOWN,
}
NAMES_OF_STATUS = {number: name for name, number in STATUS_NAMES.items()}
_WEEK, _MONTH = timedelta(days=7), timedelta(days=30)
DEFAULTS: dict[str, Any] = {
    "RULES": {"default": Rule(limits=[SlidingWindow("100/h")])},
    "ROUTER": None,
    "HANDLERS": {},
    "RETENTION": {
        "done": _WEEK,
        "cancelled": _WEEK,
        "expired": _WEEK,
        "failed": _MONTH,
        "unknown": _MONTH,
    },
    "ALLOWED_HOSTS": ["*"],
    "ALLOWED_NETWORKS": [],
    "SECRETS": {},
    "ENCRYPTION_KEYS": [],
    "MAX_CALL_BYTES": 262144,
    "MAX_RESPONSE_BYTES": 1048576,
    "KEEP_RESPONSE_BYTES": 4096,
    "DISPENSER": {"INTERVAL": 1.0, "POLL": 0.05},
    "LEASE": {"RELEASE": 300, "GRACE": 30},
}


@dataclass(frozen=True)
class Config:
    """The settings as the app uses them; durations are seconds, sizes bytes."""

    book: Book
    router: Callable[[Mapping[str, Any]], Any] | None
    handlers: Mapping[str, str]
    retention: Mapping[int, timedelta | None]
    allowed_hosts: tuple[str, ...]
    allowed_networks: tuple[str, ...]
    secrets: Mapping[str, SecretFor]
    encryption_keys: tuple[str, ...]
    max_call_bytes: int
    max_response_bytes: int
    keep_response_bytes: int
    interval: float
    poll: float
    release_lease: float
    grace: float

    @property
    def rules(self) -> Mapping[str, Rule]:
        """The rules by name."""
        return self.book.rules

    def rule(self, name: str) -> Rule:
        """The rule of this name; UnknownRule suggests the nearest."""
        try:
            return self.book.rules[name]
        except (KeyError, TypeError):
            raise UnknownRule(
                f"there is no rule {name!r}{suggest(str(name), self.book.rules)}"
            ) from None

    @cached_property
    def leases(self) -> str:
        """By rule, as JSON: seconds that an attempt may take from its slot on. Every begin on
        PostgreSQL sends it.
        """
        return json.dumps({name: self.lease(rule) for name, rule in self.rules.items()})

    def lease(self, rule: Rule | None) -> float:
        """Seconds that an attempt of the rule may take from its slot on; None: of one that is not
        in the settings any more.
        """
        return (rule.total_timeout if rule else 0.0) + self.grace


@cache
def current() -> Config:
    """The settings in force. ImproperlyConfigured lists everything that is wrong."""
    config, wrong = _read(getattr(settings, "CALLQUEUE", {}))
    if wrong or config is None:
        raise ImproperlyConfigured("; ".join(wrong))
    return config


def problems() -> list[str]:
    """What is wrong with the settings, one sentence each; empty when nothing is."""
    return _read(getattr(settings, "CALLQUEUE", {}))[1]


def forget(*, setting: str = "", **_: Any) -> None:
    """Read the settings again at the next use: connected to Django's setting_changed."""
    if setting in ("", "CALLQUEUE"):
        current.cache_clear()


setting_changed.connect(forget, dispatch_uid="callqueue.conf")


def _read(raw: Any) -> tuple[Config | None, list[str]]:
    if not isinstance(raw, Mapping):
        return None, [f"CALLQUEUE: {type(raw).__name__} is not a dict"]
    wrong = [
        f"CALLQUEUE: unknown key {key!r}{suggest(str(key), DEFAULTS)}"
        for key in raw
        if key not in DEFAULTS
    ]
    reader = _Reader(
        {**DEFAULTS, **{key: value for key, value in raw.items() if key in DEFAULTS}}, wrong
    )
    intervals = reader.numbers("DISPENSER", {"INTERVAL": 0.05, "POLL": 0.001})
    leases = reader.numbers("LEASE", {"RELEASE": 0.1, "GRACE": 0.1})
    book = reader.book()
    config = Config(
        book=book,
        router=reader.router(),
        handlers=reader.handlers(),
        retention=reader.retention(),
        allowed_hosts=reader.hosts(),
        allowed_networks=reader.networks(),
        secrets=reader.secrets(book.rules),
        encryption_keys=reader.encryption_keys(),
        max_call_bytes=reader.size("MAX_CALL_BYTES"),
        max_response_bytes=reader.size("MAX_RESPONSE_BYTES"),
        keep_response_bytes=reader.size("KEEP_RESPONSE_BYTES", least=0),
        interval=intervals["INTERVAL"],
        poll=intervals["POLL"],
        release_lease=leases["RELEASE"],
        grace=leases["GRACE"],
    )
    return config, wrong


class _Reader:
    """Reads one key after the other, and notes what is wrong instead of stopping at the first."""

    def __init__(self, values: Mapping[str, Any], wrong: list[str]) -> None:
        self.values, self.wrong = values, wrong

    def note(self, key: str, why: str) -> None:
        self.wrong.append(f"CALLQUEUE[{key!r}]: {why}")

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.values[key]
        if isinstance(value, Mapping) and all(isinstance(name, str) and name for name in value):
            return dict(value)
        self.note(
            key, f"is not a dict of names, but {_kind(value, 'a dict with a name that is no text')}"
        )
        return {}

    def book(self) -> Book:
        rules = self.mapping("RULES")
        for name, rule in list(rules.items()):
            if not isinstance(rule, Rule):
                self.note("RULES", f"{name!r} is {_kind(rule)}, not a callqueue.Rule(...)")
                del rules[name]
            elif len(name) > MAX_NAME:
                self.note("RULES", f"{name!r:.40} is longer than {MAX_NAME} characters")
                del rules[name]
        rules.setdefault("default", DEFAULTS["RULES"]["default"])
        try:
            return bind(rules)
        except ImproperlyConfigured as error:
            self.wrong.append(str(error))
            return bind({})

    def router(self) -> Callable[..., Any] | None:
        value = self.values["ROUTER"]
        return None if value is None else self.imported("ROUTER", value)

    def imported(self, key: str, value: Any) -> Any:
        if callable(value):
            return value
        try:
            found = import_string(value)
        except Exception as error:
            is_path = isinstance(value, str)
            self.note(
                key,
                f"{value!r} cannot be imported: {error}"
                if is_path
                else f"is {_kind(value)}, which is not callable",
            )
            return None
        if not callable(found):
            self.note(key, f"{value!r} is not callable")
        return found

    def handlers(self) -> dict[str, str]:
        handlers = self.mapping("HANDLERS")
        for name, path in handlers.items():
            if not isinstance(path, str):
                self.note("HANDLERS", f"{name!r} is {_kind(path)}, not a dotted path")
        return handlers

    def retention(self) -> dict[int, timedelta | None]:
        given = self.mapping("RETENTION")
        kept = {**DEFAULTS["RETENTION"], **given}
        for name, value in given.items():
            if STATUS_NAMES.get(name) not in states.FINAL:
                finals = [NAMES_OF_STATUS[s] for s in states.FINAL]
                self.note(
                    "RETENTION",
                    f"{name!r} is not the name of a final status{suggest(name, finals)}",
                )
                kept.pop(name)
            elif value is not None and (not isinstance(value, timedelta) or value < timedelta(0)):
                self.note(
                    "RETENTION", f"{name!r} is {_kind(value)}, not a timedelta, nor None (keep)"
                )
                kept.pop(name)
        return {STATUS_NAMES[name]: value for name, value in kept.items()}

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.values[key]
        if isinstance(value, list | tuple | set | frozenset) and all(
            isinstance(v, str) and v for v in value
        ):
            return tuple(value)
        self.note(
            key, f"is not a list of strings, but {_kind(value, 'a list with something else in it')}"
        )
        return ()

    def hosts(self) -> tuple[str, ...]:
        hosts = self.strings("ALLOWED_HOSTS")
        for place, host in enumerate(hosts, 1):
            if not is_place_pattern(host):
                self.note(
                    "ALLOWED_HOSTS", f"entry {place} of {len(hosts)} is not among {PLACES_WANTED}"
                )
        return hosts

    def networks(self) -> tuple[str, ...]:
        networks = self.strings("ALLOWED_NETWORKS")
        for place, network in enumerate(networks, 1):
            try:
                ipaddress.ip_network(network)
            except ValueError:
                why = "is not a network such as '10.0.0.0/8', its host bits all 0"
                self.note("ALLOWED_NETWORKS", f"entry {place} of {len(networks)} {why}")
        return networks

    def secrets(self, rules: Mapping[str, Rule]) -> dict[str, SecretFor]:
        secrets: dict[str, SecretFor] = {}
        for name, value in self.mapping("SECRETS").items():
            if isinstance(value, SecretFor):
                secrets[name] = value
            elif callable(value) or (isinstance(value, str) and value):
                secrets[name] = SecretFor(value)
            else:
                self.note(
                    "SECRETS",
                    f"{name!r} is neither a string, a callable nor a SecretFor(...), but {_kind(value)}",
                )
        for name, secret in secrets.items():
            for rule in secret.rules or ():
                if rule not in rules:
                    self.note(
                        "SECRETS",
                        f"{name!r} is for a rule that there is not: {rule!r}{suggest(rule, rules)}",
                    )
        return secrets

    def encryption_keys(self) -> tuple[str, ...]:
        value = self.values["ENCRYPTION_KEYS"]
        if not isinstance(value, list | tuple):
            self.note("ENCRYPTION_KEYS", "is not a list of Fernet keys, newest first")
            return ()
        keys = tuple(
            key.decode("ascii", "replace") if isinstance(key, bytes) else key for key in value
        )
        if keys:
            from callqueue.security.encryption import check_keys

            self.wrong.extend(f"CALLQUEUE['ENCRYPTION_KEYS']: {why}" for why in check_keys(keys))
        return keys

    def size(self, key: str, least: int = 1) -> int:
        value = self.values[key]
        if type(value) is int and value >= least:
            return value
        self.note(key, f"is not a whole number of bytes of at least {least}")
        return int(DEFAULTS[key])

    def numbers(self, key: str, least: Mapping[str, float]) -> dict[str, float]:
        numbers = dict(DEFAULTS[key])
        for name, value in self.mapping(key).items():
            if name not in numbers:
                self.note(key, f"unknown key {name!r}{suggest(name, numbers)}")
            elif (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not least[name] <= value <= 86400
            ):
                self.note(key, f"{name} is not a number of seconds from {least[name]:g} to 86400")
            else:
                numbers[name] = float(value)
        return {name: float(value) for name, value in numbers.items()}


def _kind(value: object, container: str = "") -> str:
    """What stands where something else should: its type, never itself, which may be a secret that
    was put there by mistake.
    """
    if container and isinstance(value, Mapping | list | tuple | set | frozenset):
        return container
    return "an empty string" if value == "" else type(value).__name__
