"""The worker: begins attempts, makes their calls, and records what came of them."""
