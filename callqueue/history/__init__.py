"""History: what was sent and what came of it, added up by minutes, and the audit that proves what
was used. Reads the attempts; no release depends on it.
"""
