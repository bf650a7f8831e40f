"""The table of legal moves."""

from __future__ import annotations

import re
from pathlib import Path

from callqueue import states
from callqueue.conf import STATUS_NAMES
from callqueue.states import Move

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "states.md"


def test_moves_lead_from_every_state_and_from_a_final_one_by_requeue_or_a_hook_alone() -> None:
    assert not [move for move in Move if set(move.sources) & set(move.targets)]
    assert {source for move in Move for source in move.sources} == set(range(8))
    leaving = {move for move in Move if set(move.sources) & set(states.FINAL)}
    assert leaving == {Move.REQUEUE, Move.REQUEUE_AGAIN, Move.RECONCILE}


def test_the_page_about_states_has_the_same_moves() -> None:
    """Its table may name several states in a cell; `send` is in no row of ours."""
    told = set()
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [re.findall(r"`([A-Z]+)`", cell) for cell in line.split("|")[1:3]]
        if len(cells) == 2 and all(cells):
            told |= {(one, other) for one in cells[0] for other in cells[1]}
    number = {name.upper(): status for name, status in STATUS_NAMES.items()}
    assert {(number[one], number[other]) for one, other in told} == {
        (source, target) for move in Move for source in move.sources for target in move.targets
    }
