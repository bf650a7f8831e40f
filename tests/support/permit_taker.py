"""A process that takes so many permits and makes no call: `python -m tests.support.permit_taker 20`.
Half of them inside a transaction that is rolled back, half in a coroutine.
"""

from __future__ import annotations

import sys


def main(count: int) -> None:
    """Set Django up, take them, say how many."""
    import asyncio

    import django

    django.setup()
    from django.db import transaction

    import callqueue

    async def taken() -> None:
        async with callqueue.apermit("r", wait=60, label="coroutine") as permit:
            permit.sent()

    for _ in range(count // 2):
        with transaction.atomic(), callqueue.permit("r", wait=60, label="atomic") as permit:
            permit.settle(1)
            transaction.set_rollback(True)

    async def all_taken() -> None:
        await asyncio.gather(*(taken() for _ in range(count // 2)))

    asyncio.run(all_taken())
    print(f"{count} permits taken", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
