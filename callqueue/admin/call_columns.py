"""The columns of the list of calls."""

from __future__ import annotations

from django.contrib import admin
from django.utils import timezone
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from callqueue import states
from callqueue.admin import call_page
from callqueue.admin.base import OwnAdmin
from callqueue.look import words
from callqueue.models import CallQueue
from callqueue.security.redaction import redact_text


class CallColumns(OwnAdmin):
    """What the list shows of a call."""

    @admin.display(description=gettext_lazy("status"))
    def shown_status(self, call: CallQueue) -> str:
        return format_html(
            '<span class="cq-status cq-{}">{}</span>',
            call_page.kind_of(call.status),
            call.get_status_display(),
        )

    @admin.display(description=gettext_lazy("key"))
    def shown_key(self, call: CallQueue) -> str:
        return format_html('<span class="cq-value">{}</span>', Truncator(call.key).chars(40))

    @admin.display(description=gettext_lazy("request"))
    def request_line(self, call: CallQueue) -> str:
        path, target = call.path or call.host, f"{call.host}{call.path}"
        shown = Truncator(path).chars(80), Truncator(target).chars(200)
        return format_html('<span title="{2}">{0} {1}</span>', call.method, *shown)

    @admin.display(description=gettext_lazy("due"))
    def due(self, call: CallQueue) -> str:
        if call.status not in states.WAITING:
            return ""
        seconds = (call.due_at_dt - timezone.now()).total_seconds()
        return format_html('<span class="cq-time">{}</span>', _ago_or_in(seconds))

    @admin.display(description=gettext_lazy("age"))
    def age(self, call: CallQueue) -> str:
        made = call.created_dt
        made = timezone.localtime(made) if timezone.is_aware(made) else made
        age = words.short(max(0.0, (timezone.now() - call.created_dt).total_seconds()))
        return format_html(
            '<time class="cq-time" datetime="{0}" title="{0}">{1}</time>',
            made.isoformat(" ", "seconds"),
            age,
        )

    @admin.display(description=gettext_lazy("last error"))
    def last_error(self, call: CallQueue) -> str:
        shown = Truncator(redact_text(call.error_message[:2000])).chars(80)
        return format_html("<span>{}</span>", shown) if shown else ""


def _ago_or_in(seconds: float) -> str:
    """ "4 min ago", "in 2 h": shorter than elsewhere, in a narrow column."""
    taken = words.short(abs(seconds))
    return (_("in %s") if seconds > 0 else _("%s ago")) % taken
