"""History: what was sent and what came of it, added up, and the audit. No release depends on it."""
