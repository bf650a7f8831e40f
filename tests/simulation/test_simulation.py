"""Seeds of the simulation, the same each time: none of them fails, the first are the same runs twice,
and no process that has ended keeps a session; and the faults that are put back are found.

`make simulate SEEDS=1000` runs more; `python -m tests.simulation --seed 17 --story` shows one.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.command import ROOT
from tests.simulation.faults import FAULTS, changed, changes_of
from tests.support.length import examples

SEEDS = examples(200, 2000)
AGAIN = examples(3, 60)
# of the processes of one of the first runs at a time; a dispenser has one for what it does aside, and a process that
# makes its calls itself one for each of its threads (`Postgres.end` fails where one is left open)
SESSIONS = 24


def simulated(*arguments: str, seconds: float = 3000) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)


@pytest.mark.fault
@pytest.mark.parametrize(("database", "seeds"), [("postgresql", SEEDS), ("sqlite", SEEDS // 4)])
def test_no_seed_fails(database: str, seeds: int) -> None:
    which = ["--seeds", f"0:{seeds}", "--twice", str(AGAIN), "--database", database]
    ran = simulated(*which, "--processes", "1", "--each")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{seeds} seeds, 0 failed" in ran.stdout
    if database == "postgresql":
        words = [line.split() for line in ran.stdout.splitlines()]
        sessions = [int(one[-2]) for one in words if one[-2].isdigit()]
        assert 2 < max(sessions[:21]) <= SESSIONS


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_put_back(name: str) -> None:
    """Its text is in the product exactly once."""
    for module, changes in changes_of(name).items():
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin is not None
        changed(changes, Path(found.origin).read_text(encoding="utf-8"))


@pytest.mark.fault
@pytest.mark.slow
def test_faults_that_are_put_back_are_found() -> None:
    ran = simulated("--faults", "--processes", "2", seconds=7200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in FAULTS:
        assert f"{name}: found by seed " in ran.stdout
