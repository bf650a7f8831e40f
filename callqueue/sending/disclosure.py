"""Gives a call in hand the values of its secrets, each only where it may go. Nobody else asks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from callqueue import conf
from callqueue.exceptions import InvalidCall, NotAllowed
from callqueue.handlers import HTTP_METHODS
from callqueue.security import secrets
from callqueue.security.addresses import host_refusal
from callqueue.security.secrets import Secret, SecretContext, SecretError, SecretFor
from callqueue.security.withholding import withhold
from callqueue.sending.call_data import Reach, check_params, check_url

_ANYWHERE = Reach(("*",), ("0.0.0.0/0", "::/0"))


def disclose(
    method: str, params: Mapping[str, Any], *, rule: str, key: str
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The params with their secrets' values in place, checked as a whole though `send` may never
    have seen them; and those values. NotAllowed where one may not go there or the call may not be
    made, InvalidCall where a value does not fit its place, SecretError where one has no value now.
    """
    reach = _configured_reach()
    asker, resolved = _Asker(rule, key, reach), params
    try:
        if secrets.has_secret(params):
            if method in HTTP_METHODS:
                asker.learn_host(params.get("url"))
            resolved = secrets.replace_secrets(params, asker.value_of)
        check_params(method, resolved, reach)
    except InvalidCall as error:
        raise InvalidCall(error.field, withhold(error.why, asker.values.values())) from None
    except NotAllowed as error:
        raise NotAllowed(withhold(str(error), asker.values.values())) from None
    return resolved, tuple(dict.fromkeys(asker.values.values()))


def secret_values_of(method: str, params: Any, *, rule: str, key: str) -> tuple[str, ...]:
    """A call's secret values that can be had, may it be made or not: to take out of texts."""
    asker = _Asker(rule, key, _ANYWHERE)

    def ask(name: str) -> str:
        with suppress(Exception):
            asker.value_for_any_host(name)
        return ""

    with suppress(Exception):
        if method in HTTP_METHODS:
            asker.learn_host(params.get("url"))
    with suppress(Exception):
        secrets.replace_secrets(params, ask)
    return tuple(dict.fromkeys(asker.values.values()))


def _configured_reach() -> Reach:
    settings = conf.current()
    return Reach(settings.allowed_hosts, settings.allowed_networks)


class _Asker:
    """Asks for the secrets of a call of this rule and key, each once, and keeps the values."""

    def __init__(self, rule: str, key: str, reach: Reach) -> None:
        self.rule, self.key, self.reach = rule, key, reach
        self.host, self.port = "", 0
        self.values: dict[str, str] = {}

    def learn_host(self, url: Any) -> None:
        """Before all else: learn where the call goes. A secret URL has to be allowed there, too."""
        is_secret = isinstance(url, Secret)
        address = self.value_of(url.name, is_url=True) if is_secret else url
        self.host, self.port = check_url(address, self.reach)
        if is_secret:
            self._check_may_go(url.name)

    def value_of(self, name: str, *, is_url: bool = False) -> str:
        if not is_url:  # `learn_host` checks that one, once it tells the host
            self._check_may_go(name)
        return self.value_for_any_host(name)

    def value_for_any_host(self, name: str) -> str:
        """The value, host unchecked. NotAllowed for other rules; SecretError: it has none now."""
        if name not in self.values:
            context = SecretContext(self.rule, self.key, self.host)
            self.values[name] = self._entry_of(name).value(name, context)
        return self.values[name]

    def _entry_of(self, name: str) -> SecretFor:
        entry = conf.current().secrets.get(name)
        if entry is None:
            raise SecretError(f"secret {name!r} is not in SECRETS")
        if entry.rules is not None and self.rule not in entry.rules:
            raise NotAllowed(
                f"the secret {name!r} is not for calls of the rule {self.rule!r}: see SECRETS"
            )
        return entry

    def _check_may_go(self, name: str) -> None:
        hosts = self._entry_of(name).hosts
        if hosts is None:
            return
        if not self.host:
            raise NotAllowed(
                f"the secret {name!r} is for calls to some hosts only, and this call goes to none:"
                " see SECRETS"
            )
        if host_refusal(self.host, hosts, self.port) is not None:
            raise NotAllowed(
                f"the secret {name!r} may not go to the host {self.host}:{self.port}: see SECRETS"
            )
