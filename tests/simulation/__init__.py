"""The whole of callqueue as tasks of one scheduler that draws everything from a seed: see
CONTRIBUTING.md.
"""
