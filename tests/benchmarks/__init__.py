"""Measurements of speed: `python -m tests.benchmarks` (or `make bench`) prints a table; see its
`--help`.
"""
