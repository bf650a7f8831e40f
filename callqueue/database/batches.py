"""Many rows in short batches, so that no statement and no transaction grows with the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db.models import QuerySet


def in_batches(rows: QuerySet[Any], size: int) -> Iterator[list[int]]:
    """The primary keys of `rows` in their order, `size` at a time, each batch read when it is asked
    for.

    Rows that the caller changes meanwhile, so that they are no more among `rows`, are not missed
    for that.
    """
    if rows.query.is_sliced:
        pks = sorted(rows.values_list("pk", flat=True))
        yield from (pks[at : at + size] for at in range(0, len(pks), size))
        return
    in_order, last = rows.order_by("pk").values_list("pk", flat=True), 0
    while pks := list(in_order.filter(pk__gt=last)[:size]):
        yield pks
        last = pks[-1]
