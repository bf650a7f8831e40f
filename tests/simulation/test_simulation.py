"""Seeds of the simulation, the same each time: none of them fails, and each is the same run twice;
and the faults that are put back are found.

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


def simulated(*arguments: str, seconds: float = 3000) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)


@pytest.mark.fault
@pytest.mark.parametrize(("database", "seeds"), [("postgresql", SEEDS), ("sqlite", SEEDS // 4)])
def test_no_seed_fails(database: str, seeds: int) -> None:
    ran = simulated("--seeds", f"0:{seeds}", "--processes", "1", "--database", database)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{seeds} seeds, 0 failed" in ran.stdout


@pytest.mark.fault
@pytest.mark.parametrize("database", ["postgresql", "sqlite"])
def test_a_seed_is_the_same_run_twice(database: str) -> None:
    seeds = f"1000:{1000 + AGAIN}"
    ran = simulated("--seeds", seeds, "--twice", "--processes", "1", "--database", database)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{AGAIN} seeds, 0 failed" in ran.stdout


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
    for name in (name for name, one in FAULTS.items() if not one.is_unseen):
        assert f"{name}: found by seed " in ran.stdout
