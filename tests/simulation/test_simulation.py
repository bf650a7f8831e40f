"""Seeds of the simulation, the same each time: none of them fails, and each is the same run twice.

`make simulate SEEDS=1000` runs more; `python -m tests.simulation --seed 17 --story` shows one.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.simulation.command import ROOT
from tests.simulation.faults import FAULTS
from tests.support.length import examples

# Permits for ever in vain: of processes with other settings than dispensers have; of one whose row
# was deleted, since the clock was set by a day.
FAILED = [97, 20116]
SEEDS, AGAIN = examples(20, 400), examples(1, 30)


def simulated(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("database", "seeds"), [("postgresql", SEEDS), ("sqlite", max(4, SEEDS // 2))]
)
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


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("seed", FAILED)
def test_a_seed_that_failed_once_fails_no_more(seed: int) -> None:
    ran = simulated("--seed", str(seed))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_put_back_is_found(name: str) -> None:
    fault = FAULTS[name]
    ran = simulated("--fault", name, "--seeds", f"0:{fault.seeds}", "--until-found")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert " failed, " in ran.stdout, ran.stderr  # it was found, not that it could not be put back
