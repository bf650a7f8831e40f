"""A database server has few sessions, for everybody: a simulation gives back what a process had that
has ended, and after each run keeps no more than the next one needs.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.simulation.command import ROOT

# sessions of the processes of these runs at a time; a dispenser has one for what it does aside, and a
# process that makes its calls itself one for each of its threads
MOST = 24
# Runs in which many processes do one thing each. (`Postgres.end` fails where sessions are left
# open.)
SEEDS = 21


@pytest.mark.slow
@pytest.mark.fault
def test_a_process_that_has_ended_keeps_no_session() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--seeds", f"0:{SEEDS}", "--each"]
    ran = subprocess.run(
        [*command, "--processes", "1"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    sessions = [int(line.split()[-2]) for line in ran.stdout.splitlines()[:SEEDS]]
    assert 2 < max(sessions) <= MOST
