"""The rule of the ledger as a model that spin explores whole, and the faults that it must find in
it. Skipped where spin or a C compiler is missing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("ledger.pml")
# By fault, the sizes at which it is looked for, where they are not the model's own. The rule itself
# holds at each of them.
FAULTS: dict[str, tuple[str, ...]] = {
    "NO_LOCK": (),
    "AGE_FROM_RELEASE": (),
    "FORGET_OPEN": (),
    "FORGET_AGED": (),
    "NO_FENCE": (),
    "VOID_BEGUN": (),
    "NO_SHIFT": (),
    "EARLY_SEND": ("N=1", "A=2", "LEAD=2"),
    "NO_LEASE": ("N=1", "A=2", "END=8"),
    "NO_WATCH": ("N=1", "A=2"),
}
pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(
        not (shutil.which("spin") and shutil.which("cc")), reason="needs spin and a C compiler"
    ),
]


def explored(folder: Path, *defined: str) -> tuple[int, int]:
    """How many errors spin found with these defined, and how many states it saw."""

    def run(*command: str) -> str:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    run("spin", "-a", *(f"-D{name}" for name in defined), str(MODEL))
    run("cc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=4096", "-o", "pan", "pan.c")
    told = run("./pan", "-m200000", "-E")
    assert "max search depth too small" not in told, told
    errors = re.search(r"errors: (\d+)", told)
    states = re.search(r"(\d+) states, stored", told)
    assert errors and states, told
    return int(errors[1]), int(states[1])


@pytest.mark.slow
def test_no_order_of_events_is_over_the_limit(tmp_path: Path) -> None:
    errors, states = explored(tmp_path)
    assert errors == 0
    assert states > 5_000_000


@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=[] if name == "NO_LOCK" else pytest.mark.slow) for name in FAULTS],
)
def test_a_fault_in_the_rule_is_found(fault: str, tmp_path: Path) -> None:
    sizes = FAULTS[fault]
    assert explored(tmp_path, fault, *sizes)[0] > 0
    if sizes:
        assert explored(tmp_path, *sizes)[0] == 0
