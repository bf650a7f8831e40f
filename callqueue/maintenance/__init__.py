"""What time brings: lost attempts, expiries, retention, breakers."""
