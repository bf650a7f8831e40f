"""`python -m tests.mutants [--count 400] [--seed 1]`: small faults put into the core, one at a time,
and which of them no test finds. Needs PostgreSQL, and a quiet machine: on a busy one a test that
gets no turn is taken for one that hangs.
"""
