"""Where a URL, or a registry of Prometheus, finds the metrics."""

from callqueue.integrations.prometheus import CallQueueCollector, register, view

__all__ = ["CallQueueCollector", "register", "view"]
