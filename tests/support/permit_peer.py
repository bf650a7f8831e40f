"""A process that makes calls under permits, one after the other, until it is killed:
`python -m tests.support.permit_peer URL [priority]`. Each carries its attempt's number.
"""

from __future__ import annotations

import sys


def main(url: str, priority: int = 0) -> None:
    """Set Django up, then call for ever."""
    import django

    django.setup()
    import requests

    import callqueue

    session = requests.Session()
    print("permit peer ready", flush=True)
    while True:
        with callqueue.permit("r", priority=priority, label="peer") as permit:
            session.post(f"{url}?permit={permit.attempt_id}", timeout=30)
            permit.sent()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
