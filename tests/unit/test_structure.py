"""What each part of the package may do: import, and ask its own settings.

Other processes may have other settings, and operators give limits other rates: what counts, and what
becomes of a call, is decided by what is in force for all. Each look at a process's own has a reason
here why its answer may differ. A new one fails, until it asks `ledger.settings`, or has its reason.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import callqueue

PACKAGE = Path(callqueue.__file__).parent
DECIDING = ("ledger", "execution", "transitions", "maintenance", "dispatch", "permits")
OWN = "of this process: how it works, not what counts"
MAKER = "whoever makes the call needs its rule: timeouts, hooks, what to retry"
# By module and function: why, for as many looks at the settings as it takes.
REASONS = {
    "ledger/settings.py:book_in_force": "joined with what all others hold",
    "dispatch/dispenser.py:hold_everything": "every rule that may release here",
    "dispatch/dispenser.py:Dispenser.__init__": "stated as its opinion, before it releases",
    "permits/waiting.py:Waiter._make_pass": "joined with what all others hold",
    # What is in force may have rules that these settings lack; those are somebody else's to judge.
    "maintenance/recovery.py:_ids_to_end_here": "leaves to others what they know",
    "maintenance/recovery.py:_result_of_loss": MAKER,
    "maintenance/recovery.py:fail_orphans": "fails what no dispenser knows, by all opinions",
    "execution/claim.py:_jobs_of_rows": MAKER + "; without it, dispensers are asked who has it",
    "execution/request.py:_policy": "what this process may connect to; no opinion says anything of hosts",
    "ledger/settings.py:book_lately": "joined with what all others hold",
    "maintenance/reconcile.py:queues_wanted": "rules whose hook it has",
    "maintenance/reconcile.py:_hooks": "rules whose hook it has",
    "maintenance/cleanup.py:_cutoffs": "how long ended calls are kept; what counts, the ledger says",
    "execution/judging.py:_cut_note": OWN,
    "execution/request.py:_columns_of_body": OWN,
    "execution/process.py:max_in_flight": OWN,
    "ledger/holds.py:_announce": "which queue's workers tell of it",
    "execution/process.py:_hand_on": OWN,
    # A release that this process makes has its lease, wherever else it is looked at.
    "execution/claim.py:begin": OWN,
    "dispatch/release_pass.py:_attempts_to_insert": OWN,
    "dispatch/publisher.py:publish": OWN,
    "dispatch/choosing.py:rooms_of_workers": OWN,
    "dispatch/choosing.py:workers_may_be_behind": OWN,
    "dispatch/dispenser.py:Dispenser._poll_ready_if_due": OWN,
    "dispatch/release_pass.py:_conclude": OWN,
    "permits/asking.py:Options.as_wanted": "what its own code may ask for; the pass decides",
    "permits/asking.py:rule_of": "what its own code may ask for",
    "permits/httpx_transport.py:_Body.__init__": OWN,
}


def test_what_counts_is_not_asked_of_ones_own_settings() -> None:
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}:{name}"
        for folder in DECIDING
        for path in (PACKAGE / folder).rglob("*.py")
        for name in looks(ast.parse(path.read_text("utf-8")))
    }
    assert found == set(REASONS)


def looks(node: ast.AST, *inside: str) -> Iterator[str]:
    """The function of everything that is called `current` and may be that of the settings."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        inside = (*inside, node.name)
    name = getattr(node, "attr", getattr(node, "id", None))
    if name == "current" and isinstance(getattr(node, "ctx", None), ast.Load):
        yield ".".join(inside)
    for child in ast.iter_child_nodes(node):
        yield from looks(child, *inside)


def test_no_correction_is_judged_by_any_settings() -> None:
    """Who ends an attempt marks it by what its row says."""
    for module in ("execution/recorder.py", "transitions/verbs.py", "permits/granted.py"):
        source = (PACKAGE / module).read_text("utf-8")
        assert not list(looks(ast.parse(source))), module
        assert not re.search(r"\b(is_tallied|conf)\b", source), module


def test_no_module_stands_on_itself() -> None:
    """None imports, through whichever others, what imports it."""
    sizes_file = PACKAGE.parent / ".ci" / "sizes.py"
    spec = importlib.util.spec_from_file_location("sizes", sizes_file)
    assert spec is not None and spec.loader is not None
    sizes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sizes)
    trees = {
        sizes.name_of(path, PACKAGE): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")
    }
    graph = sizes.arrows(trees)
    assert len(graph) > 100
    assert not [name for name in graph if sizes.circle_of(name, graph) - {name}]


# --- Which tests give a bound of the product more than it has


TESTS = Path(__file__).parents[1]
WIDENED = {
    "db/conftest.py: choosing.LEAST": "a pass's own figures; test_backpressure.py has the bound",
    "db/dispatch/test_in_workers.py: publisher.ALONE": "the test ends it itself, however slow it is",
    "db/dispatch/test_in_workers.py: worker.LOOK": "makes its fault larger: the end waits as long",
    "db/dispatch/test_in_workers.py: worker.WAIT": "makes its fault larger: the end waits as long",
}
# A fault that a wider bound brings about is seen by nobody: each has a reason, and a test beside it.
IMPORTED = re.compile(r"from (callqueue[\w.]*) import (\([^)]*\)|[^\n]*)")
NUMBER = r"""(?:math\.|float\(")?(inf|\d[\d_.]*)"""
PATCHED = r"""(?:setattr|object)\(\s*(?:(\w+),\s*"|"(callqueue[\w.]*)\.)([A-Z_]+)",\s*""" + NUMBER
ASSIGNED = r"\n\s+(\w+)()\.([A-Z_]+) = " + NUMBER


def test_no_test_widens_a_bound_without_a_reason() -> None:
    found = {
        f"{path.relative_to(TESTS).as_posix()}: {bound}"
        for path in sorted(TESTS.rglob("*.py"))
        if "benchmarks" not in path.parts
        for bound in widened(path.read_text("utf-8"))
    }
    assert found == set(WIDENED)


def widened(source: str) -> Iterator[str]:
    """The constants of the product that are given a number larger than their own."""
    packages = {
        name: package
        for package, names in IMPORTED.findall(source)
        for name in re.findall(r"\w+", names)
    }
    found = [*re.findall(PATCHED, source), *re.findall(ASSIGNED, source)]
    for name, path, constant, number in found:
        if not path and name not in packages:
            continue
        path = path or f"{packages[name]}.{name}"
        own = getattr(importlib.import_module(path), constant, None)
        if isinstance(own, int | float) and float(number) > own:
            yield f"{path.rpartition('.')[2]}.{constant}"
