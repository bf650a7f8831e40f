"""Celery tasks that are calls."""
