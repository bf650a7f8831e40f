"""The admin's classes under django-unfold, as docs/how-to/deploy.md says."""

from django.contrib import admin
from unfold.admin import ModelAdmin

from callqueue.admin import CallAttemptAdmin, CallQueueAdmin, HoldAdmin
from callqueue.models import CallAttempt, CallQueue, Hold

OWN = {
    CallQueue: CallQueueAdmin,
    CallAttempt: CallAttemptAdmin,
    Hold: HoldAdmin,
}

for model, own in OWN.items():
    admin.site.unregister(model)
    admin.site.register(model, type(own.__name__, (own, ModelAdmin), {}))
