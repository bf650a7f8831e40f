"""What time brings: lost attempts, expiries, retention, probes."""
