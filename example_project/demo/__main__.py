"""`make demo`: sends 300 calls under three rules, shows them go, and holds what came of them
against the vendor's record.

In: `--keep` leaves the admin up afterwards; `--chart FILE` says where the picture goes. Out: a
table, the picture, and exit status 0 only if everything was as promised. Leaves no process and
nothing but the picture.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from example_project.demo import calls, chart, progress, verdict
from example_project.demo.stage import ROOT, Stage, StageError, require_free_port

SECONDS = 120.0  # it takes some 30; a machine that is busy with other things may take longer
CALLBACK_SECONDS = 10.0
CHART = ROOT / "demo-out" / "calls.svg"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 118)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    stage: Stage | None = None
    try:
        if options.keep:
            require_free_port()
        with Stage() as stage:
            return run(stage, console, options)
    except StageError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; everything that was started has been ended.")
        return 130


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="example_project.demo", description="300 calls under three rules."
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the admin up on 127.0.0.1:8000 until Ctrl-C"
    )
    parser.add_argument(
        "--chart", type=Path, default=CHART, metavar="FILE", help="where the picture goes (SVG)"
    )
    return parser.parse_args(arguments)


def run(stage: Stage, console: Console, options: argparse.Namespace) -> int:
    """The demo, step by step; its exit status."""
    stage.set_up()
    if options.keep:
        announce_admin(stage, console)
    console.print("Starting two Celery workers and a dispenser (callqueue_run would do, too) ...")
    stage.start()
    console.print(f"{calls.send_all()} calls are in the queue.")
    complete = progress.follow(console, seconds=SECONDS, check=stage.check)
    wait_for_callbacks()
    record = fetch_record(stage.vendor_url)
    found = verdict.judge(record)
    if not complete:
        found.problems.insert(0, f"not every call had ended after {SECONDS:g} seconds")
    console.print(table_of(found))
    console.print(f"Picture: {write_chart(record, options.chart)}", soft_wrap=True, highlight=False)
    status = conclude(console, found.problems)
    if options.keep:
        stay(stage, console)
    return status


def announce_admin(stage: Stage, console: Console) -> None:
    """Bring the admin up, with an account made for this run."""
    from django.contrib.auth import get_user_model

    password = secrets.token_urlsafe(12)
    get_user_model().objects.create_superuser("demo", password=password)  # type: ignore[attr-defined]
    url = stage.start_admin()
    console.print(
        f"Admin: {url}   user [bold]demo[/]   password [bold]{password}[/]", highlight=False
    )


def wait_for_callbacks() -> None:
    """The callbacks of the last calls are Celery tasks of their own, and may come a moment
    later.
    """
    from example_project.shop.models import Product

    deadline = time.monotonic() + CALLBACK_SECONDS
    while time.monotonic() < deadline:
        missing = Product.objects.filter(price__isnull=True).values_list("sku", flat=True)
        if not any(calls.expected_status(sku) == "done" for sku in missing):
            return
        time.sleep(0.1)


def fetch_record(vendor_url: str) -> dict[str, Any]:
    """What the vendor recorded. No proxy: the vendor is on this machine."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{vendor_url}/_record", timeout=30) as answer:
        record: dict[str, Any] = json.load(answer)
    return record


def table_of(found: verdict.Verdict) -> Table:
    table = Table(
        box=box.SIMPLE_HEAVY,
        show_footer=True,
        collapse_padding=True,
        pad_edge=False,
        caption=CAPTION,
    )
    rows = found.figures
    numbers = [("calls", "calls"), ("done", "done"), ("failed", "failed"), ("attempts", "attempts")]
    table.add_column("rule", footer="all")
    for title, name in numbers:
        table.add_column(
            title, justify="right", footer=str(sum(getattr(row, name) for row in rows))
        )
    table.add_column("limit")
    table.add_column("highest, as\nvendor saw", justify="right")
    table.add_column("429s", justify="right", footer=str(sum(row.refused for row in rows)))
    table.add_column(
        "made\ntwice", justify="right", footer=str(sum(row.made_twice for row in rows))
    )
    for row in rows:
        counted = [str(getattr(row, name)) for _, name in numbers]
        highest = f"{row.highest} of {row.allowed}"
        table.add_row(row.rule, *counted, row.limit, highest, str(row.refused), str(row.made_twice))
    return table


CAPTION = "highest: the most calls in any second, as the vendor recorded them"


def write_chart(record: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(chart.draw(record), encoding="utf-8")
    return path.resolve()


def conclude(console: Console, problems: list[str]) -> int:
    """Say whether everything was as promised; the exit status."""
    if not problems:
        console.print(
            "As promised: no limit exceeded, no 429, nothing made twice, every call in its right "
            "state."
        )
        return 0
    console.print(f"NOT as promised ({len(problems)}):", style="bold red")
    for problem in problems[:20]:
        console.print(f"  {problem}", markup=False)
    return 1


def stay(stage: Stage, console: Console) -> None:
    """Until Ctrl-C: the workers and the dispenser go on, so that calls can be requeued in the
    admin.
    """
    console.print("The admin stays up, and workers and dispenser with it. Ctrl-C ends them all.")
    try:
        while True:
            stage.check()
            time.sleep(0.5)
    except KeyboardInterrupt:
        console.print("Ending.")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
