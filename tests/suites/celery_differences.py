"""Tests of Celery's integration suite that tell QueuedTask from Celery's Task, and why."""

DIFFERENCES: dict[str, str] = {}
