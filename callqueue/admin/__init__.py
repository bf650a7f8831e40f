"""The admin: calls, their attempts and holds, and the dashboard, on Django's default admin site.

Staff with view permissions see what those name, redacted. Acting needs a permission of its own,
goes by POST, and is logged. Every class is a `base.OwnAdmin`: no lookup but its filters' is heeded.
"""

from __future__ import annotations

from django.contrib import admin

from callqueue.admin.calls import CallQueueAdmin
from callqueue.admin.dashboard import DashboardAdmin
from callqueue.admin.readonly import CallAttemptAdmin, HoldAdmin
from callqueue.models import CallAttempt, CallQueue, Hold, RuleState

admin.site.register(CallQueue, CallQueueAdmin)
admin.site.register(CallAttempt, CallAttemptAdmin)
admin.site.register(Hold, HoldAdmin)
admin.site.register(RuleState, DashboardAdmin)

__all__ = ["CallAttemptAdmin", "CallQueueAdmin", "HoldAdmin"]
