"""What a worker's settings say, as digests: by them the doctor sees that a worker has others.

Workers answer to the remote-control command COMMAND. No value of a setting is in the answer.
"""

from __future__ import annotations

from typing import Any

from callqueue import conf
from callqueue.limits.opinions import digest_of, plain_rule

COMMAND = "callqueue_settings"


def install(**_: Any) -> None:
    """Let this worker answer."""
    from celery.worker.control import inspect_command

    inspect_command(name=COMMAND)(lambda state, **_: digests())


def digests() -> dict[str, str]:
    """By key of CALLQUEUE, and by rule: a text that differs where a worker would do otherwise."""
    config = conf.current()
    values: dict[str, Any] = {
        f"RULES[{name!r}]": plain_rule(rule) for name, rule in config.rules.items()
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
