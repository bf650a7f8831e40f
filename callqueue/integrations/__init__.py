"""Other people's interfaces: Celery tasks, and schedules for beat."""
