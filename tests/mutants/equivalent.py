"""Mutants that change nothing that anybody promises, as `python -m tests.mutants --list` shows
them, and why.
"""

EQUIVALENT: dict[str, str] = {}
