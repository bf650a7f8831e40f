"""A small shop that owes calls to a vendor's API: the demo's project, and what docker-compose.yml
runs.

`celery --app example_project` finds the Celery application here.
"""

from __future__ import annotations

from example_project.celery import app as celery_app

__all__ = ["celery_app"]
