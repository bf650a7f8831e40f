"""Secrets and addresses: what may be sent where, and what is never shown."""
