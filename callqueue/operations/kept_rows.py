"""Rows of sums that one process writes again and again: those that it wrote lately are in memory,
so that adding to them reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from callqueue import database, tables

CHUNK = 300  # rows that one statement looks for
KEPT = 20_000  # rows that are remembered


class Sum(Protocol):
    """What can be added up."""

    def add(self, other: Self) -> None: ...


Scope = TypeVar("Scope", bound=tuple[Any, ...])
S = TypeVar("S", bound=Sum)


class KeptRows(Generic[Scope, S]):
    """The rows of a model, by the fields that name each, with the fields that are added up. To be
    used by one writer at a time.
    """

    def __init__(
        self,
        using: str,
        model: str,
        names: Sequence[str],
        columns: Sequence[str],
        make: Callable[..., S],
    ) -> None:
        self.using, self.model = using, getattr(tables, model)
        self.names, self.columns, self.make = names, columns, make
        self._known: dict[Scope, tuple[int, S]] = {}

    def add(self, found: Mapping[Scope, S]) -> None:
        """Add to the rows, and make those that are missing."""
        if len(self._known) > KEPT:
            self._known.clear()
        self._read([scope for scope in found if scope not in self._known])
        fresh = [scope for scope in found if scope not in self._known]
        changed = []
        for scope, sums in found.items():
            if scope in self._known:
                pk, known = self._known[scope]
                known.add(sums)
                changed.append({"pk": pk, **self._values(known)})
        for at in range(0, len(changed), CHUNK):
            database.update_each(self.model, self.using, changed[at : at + CHUNK])
        records = [
            {**dict(zip(self.names, scope, strict=True)), **self._values(found[scope])}
            for scope in fresh
        ]
        for at in range(0, len(records), CHUNK):
            made = database.insert_each(self.model, self.using, records[at : at + CHUNK])
            self._known |= {
                scope: (pk, found[scope])
                for scope, pk in zip(fresh[at:], made, strict=False)
                if pk is not None
            }

    def _values(self, sums: S) -> dict[str, Any]:
        return {name: getattr(sums, name) for name in self.columns}

    def _read(self, scopes: Sequence[Scope]) -> None:
        """Look for rows that are not remembered."""
        wanted = set(scopes)
        for chunk in self._chunks(scopes):
            within = {
                f"{name}__in": sorted({scope[i] for scope in chunk})
                for i, name in enumerate(self.names)
            }
            rows = self.model._default_manager.using(self.using).filter(**within)
            for pk, *values in rows.values_list("pk", *self.names, *self.columns):
                scope: Any = tuple(values[: len(self.names)])
                if scope in wanted:
                    self._known[scope] = (pk, self.make(*values[len(self.names) :]))

    def _chunks(self, scopes: Sequence[Scope]) -> Iterator[Sequence[Scope]]:
        for at in range(0, len(scopes), CHUNK):
            yield scopes[at : at + CHUNK]
