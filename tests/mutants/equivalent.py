"""Mutants that change nothing that anybody promises, as `python -m tests.mutants --list` shows
them, and why.
"""

EQUIVALENT = {
    "ledger/agreement_rows.py ensure_states: states.filter(rule__in=rules) -> states.filter()": (
        "what is missing is told from all names as from some"
    ),
    "ledger/agreement.py _Sign.is_silent: moment - self.since > SILENCE -> "
    "(moment - self.since >= SILENCE)": "one instant of a clock more, after twenty seconds",
}
