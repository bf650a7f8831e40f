"""The ledger: what every budget is charged with, who is held, and which calls are ready."""
