"""What a worker's settings say, as digests: by them the doctor sees that a worker has others.

Workers answer to the remote-control command COMMAND. No value of a setting is in the answer.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from callqueue import conf
from callqueue.limits.in_force import digest_of
from callqueue.limits.rules import Rule

COMMAND = "callqueue_settings"


def install(**_: Any) -> None:
    """Let this worker answer."""
    from celery.worker.control import inspect_command

    inspect_command(name=COMMAND)(lambda state, **_: digests())


def digests() -> dict[str, str]:
    """By key of CALLQUEUE, and by rule: a text that differs where a worker would do otherwise."""
    config = conf.current()
    values: dict[str, Any] = {
        f"RULES[{name!r}]": _plain_rule(rule) for name, rule in config.rules.items()
    }
    values |= {
        "HANDLERS": config.handlers,
        "ALLOWED_HOSTS": config.allowed_hosts,
        "ALLOWED_NETWORKS": config.allowed_networks,
        "SECRETS": sorted(config.secrets),
        "ENCRYPTION_KEYS": [digest_of(key) for key in config.encryption_keys],
        "LEASE": [config.release_lease, config.grace],
        "MAX_RESPONSE_BYTES": config.max_response_bytes,
        "KEEP_RESPONSE_BYTES": config.keep_response_bytes,
    }
    return {key: digest_of(value) for key, value in values.items()}


def _plain_rule(rule: Rule) -> list[list[Any]]:
    """A rule as JSON that is the same in every process that has the same settings."""
    return [[f.name, _plain(getattr(rule, f.name))] for f in fields(rule)]


def _plain(value: Any) -> Any:
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__name__)
        return f"{getattr(value, '__module__', '')}.{name}"
    return repr(value)
