"""Reads the keys of CALLQUEUE and notes what is wrong. Of values it repeats dotted paths only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from callqueue import states
from callqueue.limits.budgets import Book, book_of
from callqueue.limits.kinds import SlidingWindow
from callqueue.limits.rules import MAX_NAME, Rule
from callqueue.security.secrets import SecretFor
from callqueue.texts import storable, suggest

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
    "CALLS_PER_SLOT": 100,
    "ENCRYPTION_KEYS": [],
    "MAX_CALL_BYTES": 262144,
    "MAX_RESPONSE_BYTES": 1048576,
    "KEEP_RESPONSE_BYTES": 65536,
    "DISPENSER": {"INTERVAL": 1.0, "POLL": 0.05, "IN_WORKERS": 8},
    "LEASE": {"RELEASE": 300, "GRACE": 30},
}


class Reader:
    """Values of keys, checked. What a method returns after it noted a mistake is of no use."""

    def __init__(self, raw: Any) -> None:
        self.wrong: list[str] = []  # all that is wrong, not the first mistake alone
        if not isinstance(raw, Mapping):
            self.wrong.append(f"CALLQUEUE: {type(raw).__name__} is not a dict")
            raw = {}
        for key in raw:
            if key not in DEFAULTS:
                self.wrong.append(f"CALLQUEUE: unknown key {key!r}{suggest(str(key), DEFAULTS)}")
        self.values = {key: raw.get(key, default) for key, default in DEFAULTS.items()}

    def note(self, key: str, why: str) -> None:
        self.wrong.append(f"CALLQUEUE[{key!r}]: {why}")

    def named_values(self, key: str) -> dict[str, Any]:
        value = self.values[key]
        if isinstance(value, Mapping) and all(isinstance(name, str) and name for name in value):
            return dict(value)
        unnamed = "a dict with a name that is no text"
        kind = unnamed if isinstance(value, Mapping) else _kind(value)
        self.note(key, f"is not a dict of names, but {kind}")
        return {}

    def book(self) -> Book:
        rules = self.named_values("RULES")
        for name, rule in list(rules.items()):
            if not isinstance(rule, Rule):
                self.note("RULES", f"{name!r} is {_kind(rule)}, not a callqueue.Rule(...)")
                del rules[name]
            elif len(name) > MAX_NAME:
                self.note("RULES", f"{name!r:.40} is longer than {MAX_NAME} characters")
                del rules[name]
            elif storable(name) != name:
                self.note("RULES", f"{name!r} is not text that a database can store")
                del rules[name]
        rules.setdefault("default", DEFAULTS["RULES"]["default"])
        try:
            return book_of(rules)
        except ImproperlyConfigured as error:
            self.wrong.append(str(error))
            return book_of({})

    def router(self) -> Callable[..., Any] | None:
        value = self.values["ROUTER"]
        return None if value is None else self.imported_callable("ROUTER", value)

    def imported_callable(self, key: str, value: Any) -> Any:
        """The callable that `value` is, or names by a dotted path; else a note, and None."""
        try:
            found = import_string(value) if isinstance(value, str) else value
        except Exception as error:
            self.note(key, f"{value!r} cannot be imported: {error}")
            return None
        if callable(found):
            return found
        shown = repr(value) if isinstance(value, str) else f"is {_kind(value)}, which"
        self.note(key, f"{shown} is not callable")
        return None

    def handlers(self) -> dict[str, str]:
        handlers = self.named_values("HANDLERS")
        for name, path in handlers.items():
            if not isinstance(path, str):
                self.note("HANDLERS", f"{name!r} is {_kind(path)}, not a dotted path")
            elif len(name) > MAX_NAME:
                self.note("HANDLERS", f"{name!r:.40} is longer than {MAX_NAME} characters")
        return {name.lower(): path for name, path in handlers.items()}

    def retention(self) -> dict[int, timedelta | None]:
        given = self.named_values("RETENTION")
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
                kind = "negative" if isinstance(value, timedelta) else _kind(value)
                self.note("RETENTION", f"{name!r} is {kind}, not a timedelta, nor None (keep)")
                kept.pop(name)
        return {STATUS_NAMES[name]: value for name, value in kept.items()}

    def strings(self, key: str, is_sound: Callable[[str], object], flaw: str) -> tuple[str, ...]:
        """A key's strings. Notes `flaw` where `is_sound` of one is false or raises ValueError."""
        value = self.values[key]
        if not isinstance(value, list | tuple | set | frozenset) or not all(
            isinstance(entry, str) and entry for entry in value
        ):
            kind = _kind(value, "a list with something else in it")
            self.note(key, f"is not a list of strings, but {kind}")
            return ()
        for place, entry in enumerate(value, 1):
            try:
                sound = is_sound(entry)
            except ValueError:
                sound = None
            if not sound:
                self.note(key, f"entry {place} of {len(value)} {flaw}")
        return tuple(value)

    def secrets(self, rules: Mapping[str, Rule]) -> dict[str, SecretFor]:
        secrets: dict[str, SecretFor] = {}
        for name, value in self.named_values("SECRETS").items():
            if isinstance(value, SecretFor):
                secrets[name] = value
            elif callable(value) or (isinstance(value, str) and value):
                secrets[name] = SecretFor(value)
            else:
                wanted = "neither a string, a callable nor a SecretFor(...)"
                self.note("SECRETS", f"{name!r} is {wanted}, but {_kind(value)}")
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
            from callqueue.security.encryption import key_problems

            self.wrong.extend(f"CALLQUEUE['ENCRYPTION_KEYS']: {why}" for why in key_problems(keys))
        return keys

    def whole_number(self, key: str, least: int = 1, unit: str = "bytes") -> int:
        value = self.values[key]
        if type(value) is int and value >= least:
            return value
        self.note(key, f"is not a whole number of {unit} of at least {least}")
        return int(DEFAULTS[key])

    def named_numbers(self, key: str, least: Mapping[str, float]) -> dict[str, float]:
        numbers = dict(DEFAULTS[key])
        for name, value in self.named_values(key).items():
            if name not in numbers:
                self.note(key, f"unknown key {name!r}{suggest(name, numbers)}")
            elif (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not least[name] <= value <= 86400
            ):
                self.note(key, f"{name} is not a number from {least[name]:g} to 86400")
            else:
                numbers[name] = float(value)
        return {name: float(value) for name, value in numbers.items()}


def _kind(value: object, container: str = "") -> str:
    """What stands where something else should: its type, never itself, which may be a secret."""
    if container and isinstance(value, Mapping | list | tuple | set | frozenset):
        return container
    return "an empty string" if value == "" else type(value).__name__
