"""Takes permits of "r" for ever, with a call to a URL under each; or so many, without."""

from __future__ import annotations

import asyncio
import sys

import django

django.setup()

import requests  # noqa: E402
from django.db import transaction  # noqa: E402

import callqueue  # noqa: E402


def call_for_ever(url: str) -> None:
    """Each call carries its attempt's number; by the rule's own priority."""
    session = requests.Session()
    print("permit peer ready", flush=True)
    while True:
        with callqueue.permit("r", priority=0, label="peer") as permit:
            session.post(f"{url}?permit={permit.attempt_id}", timeout=30)
            permit.sent()


def take(count: int) -> None:
    """Half of them inside a transaction that is rolled back, half in a coroutine."""

    async def taken() -> None:
        async with callqueue.apermit("r", wait=60, label="coroutine") as permit:
            permit.sent()

    async def all_taken() -> None:
        await asyncio.gather(*(taken() for _ in range(count // 2)))

    for _ in range(count // 2):
        with transaction.atomic(), callqueue.permit("r", wait=60, label="atomic") as permit:
            permit.settle(1)
            transaction.set_rollback(True)
    asyncio.run(all_taken())
    print(f"{count} permits taken", flush=True)


if __name__ == "__main__":
    take(int(sys.argv[1])) if sys.argv[1].isdigit() else call_for_ever(sys.argv[1])
