"""Secrets, named by code: `Secret("NAME")` in params becomes its value in the worker alone.

A dict that somebody sent never names a secret: in the database the two are written differently.
Nothing here stores or logs a value, and no error contains one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.security.addresses import PLACES_WANTED, is_place_pattern

MARK = "$secret"
_MARK = re.compile(r"\$+secret")


class SecretError(CallQueueError):
    """A secret has no usable value now. The text names it and never contains a value."""


@dataclass(frozen=True, repr=False)
class Secret:
    """A secret by its name in CALLQUEUE["SECRETS"], for any string inside a call's `params`."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidCall("Secret", "takes the name of a secret in CALLQUEUE['SECRETS']")

    def __repr__(self) -> str:
        return f"Secret({self.name!r})"

    def __format__(self, spec: str) -> str:
        raise TypeError(
            f"{self!r} stands for a whole string, not for a part of one: "
            "put what surrounds it into its value"
        )


@dataclass(frozen=True)
class SecretContext:
    """What a secret is asked for: a call of this rule and key to this host, "" without one."""

    rule: str
    key: str
    host: str


@dataclass(frozen=True)
class SecretFor:
    """An entry of SECRETS that goes only to these hosts, with calls of these rules (None: any).
    `source`: the value, or a callable that returns it, given a SecretContext if it takes one.
    """

    source: str | Callable[..., str] = field(repr=False)
    hosts: Sequence[str] | None = field(default=None, kw_only=True)
    rules: Sequence[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.source) and not (isinstance(self.source, str) and self.source):
            raise ImproperlyConfigured(
                f"SecretFor: its value is neither a string nor a callable, but {_kind(self.source)}"
            )
        for name in ("hosts", "rules"):
            object.__setattr__(self, name, _checked_names(name, getattr(self, name)))
        if not all(map(is_place_pattern, self.hosts or ())):
            raise ImproperlyConfigured(f"SecretFor.hosts: one of them is not among {PLACES_WANTED}")

    def value(self, name: str, context: SecretContext) -> str:
        """The value, for this use. SecretError, which names the secret, where there is none."""
        value, failed = self.source, ""
        if callable(value):
            try:
                value = value(context) if _takes_context(value) else value()
            # raised anew outside: its text and its traceback may hold the value
            except BaseException as error:
                failed = type(error).__name__
        if failed:
            raise SecretError(f"secret {name!r}: its callable raised {failed}")
        if not isinstance(value, str) or not value:
            raise SecretError(f"secret {name!r} is not a non-empty string")
        return value


def walk_json(value: Any, *, with_names: bool = False) -> Iterator[Any]:
    """A JSON value and every value inside it, in no promised order; on request, names too."""
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, Mapping):
            pending.extend(value.values())
            if with_names:
                pending.extend(map(str, value))
        elif isinstance(value, list | tuple):
            pending.extend(value)


def has_secret(value: Any) -> bool:
    return any(isinstance(one, Secret) for one in walk_json(value))


def map_json(value: Any, put: Callable[[Any], Any], name: Callable[[Any], Any] = str) -> Any:
    """A copy of JSON: each value as `put` has it, not looked into if changed; names as `name`."""
    new = put(value)
    if new is not value:
        return new
    if isinstance(value, Mapping):
        return {name(key): map_json(item, put, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_json(item, put, name) for item in value]
    return value


def replace_secrets(value: Any, value_of: Callable[[str], str]) -> Any:
    """A copy with every Secret replaced by `value_of` its name."""
    return map_json(value, lambda one: value_of(one.name) if isinstance(one, Secret) else one)


def mark_secrets(value: Any) -> Any:
    """A copy as it is stored: a Secret as {"$secret": NAME}, such data with one more "$"."""
    return map_json(
        value, lambda one: {MARK: one.name} if isinstance(one, Secret) else one, _escaped_name
    )


def unmark_secrets(value: Any) -> Any:
    return map_json(
        value, lambda one: Secret(one[MARK]) if _is_reference(one) else one, _unescaped_name
    )


def secrets_from_references(document: Any) -> Any:
    """A copy: {"$secret": NAME} as a Secret, a "$" off "$$secret". InvalidCall: a bad reference."""
    for value in walk_json(document):
        if isinstance(value, dict) and MARK in value and not _is_reference(value):
            raise InvalidCall(
                "call_data",
                f"has a reference to a secret that is not {{{MARK!r}: NAME}} and nothing else",
            )
    return unmark_secrets(document)


def _is_reference(value: Any) -> bool:
    is_marked = isinstance(value, dict) and len(value) == 1 and MARK in value
    return is_marked and isinstance(value[MARK], str) and value[MARK] != ""


def _escaped_name(name: Any) -> Any:
    return f"${name}" if isinstance(name, str) and _MARK.fullmatch(name) else name


def _unescaped_name(name: str) -> str:
    return name[1:] if name != MARK and _MARK.fullmatch(name) else name


def _takes_context(source: Callable[..., str]) -> bool:
    """Whether it needs an argument, or its first is `context`. Other defaults are its owner's."""
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):
        return False
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in parameters if p.kind in by_place]
    return any(p.default is p.empty for p in places) or (
        bool(places) and places[0].name == "context"
    )


def _checked_names(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence | set | frozenset) or not all(
        isinstance(n, str) and n for n in names
    ):
        raise ImproperlyConfigured(f"SecretFor.{name}: is not a list of names, but {_kind(value)}")
    if not names:
        raise ImproperlyConfigured(
            f"SecretFor.{name}: is empty, so the secret could go nowhere; "
            "leave it out for no such limit"
        )
    return tuple(names)


def _kind(value: object) -> str:
    return "an empty string" if value == "" else type(value).__name__
