"""A progress bar for long work, which rich draws on standard error while the work goes on.

Only where standard error is a terminal and rich is installed, the extra `progress`. Anywhere else
nothing is written, so logs and pipes stay clean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TextIO

Update = Callable[..., None]  # (done, total=None), as often as one likes


@contextmanager
def progress(
    label: str, *, stream: TextIO | None = None, wanted: bool = True
) -> Iterator[Update | None]:
    """A bar for as long as the block runs, which leaves no trace. The block gets what updates it;
    None where none is drawn.
    """
    stream = sys.stderr if stream is None else stream
    if not wanted or not stream.isatty() or find_spec("rich") is None:
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    console = Console(file=stream)
    with rich.Progress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task(label, total=None)

        def update(done: int, total: int | None = None) -> None:
            bar.update(task, completed=done, total=total)

        yield update
