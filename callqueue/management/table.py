"""Plain text tables: a heading, rows, columns as wide as they need to be."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from callqueue.security.redaction import printable


def table(
    heading: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()
) -> Iterator[str]:
    """The lines of a table; the columns numbered in `right` are set to the right. What would not be
    seen is escaped.
    """
    heading, rows = list(map(printable, heading)), [list(map(printable, row)) for row in rows]
    widths = [max(len(row[i]) for row in [heading, *rows]) for i in range(len(heading))]
    for row in [heading, *rows]:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
