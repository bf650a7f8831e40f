"""Other people's interfaces: Celery tasks, Django's tasks, requests' sessions, beat, Prometheus."""
