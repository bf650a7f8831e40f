"""What draining so many calls under a rule would take: callqueue_simulate as a page, with its
curve.

In: a request whose query names the rule, the calls, the latency. Out: a page. Reads the changed
limits, and nothing else.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.db import router
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _

from callqueue import conf, database
from callqueue.admin import plots
from callqueue.admin.base import OwnAdmin
from callqueue.ledger import agreement
from callqueue.limits.simulation import Simulated, simulate
from callqueue.models import CallQueue
from callqueue.operations import formatting
from callqueue.operations import latency as pacing

# calls times limits that one request follows: a tenth of a second or so, whatever is asked
STEPS = 20_000


class WhatIfForm(forms.Form):
    """What is asked."""

    rule = forms.ChoiceField(label=_("Rule"))
    calls = forms.IntegerField(label=_("Calls"), min_value=1, max_value=STEPS, initial=1000)
    latency = forms.FloatField(
        label=_("Seconds to answer"),
        min_value=0,
        max_value=86400,
        initial=0.2,
        widget=forms.NumberInput(attrs={"step": "any"}),
    )
    keys = forms.IntegerField(label=_("Spread over keys"), min_value=1, max_value=STEPS, initial=1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rule: Any = self.fields["rule"]
        rule.choices = [(name, name) for name in conf.current().rules]

    def clean(self) -> dict[str, Any]:
        asked: dict[str, Any] = self.cleaned_data
        most = STEPS // max(1, len(conf.current().book.budgets.get(asked.get("rule", ""), ())))
        if asked.get("calls", 0) > most:
            why = _(
                "At most %(count)d are followed here under this rule; "
                "callqueue_simulate follows more."
            )
            self.add_error("calls", why % {"count": most})
        return asked


def page(request: HttpRequest, admin: OwnAdmin) -> HttpResponse:
    """The form, and the answer once it is filled in."""
    given = request.GET if "calls" in request.GET else None
    form = WhatIfForm(given, initial={"rule": request.GET.get("rule", "default")})
    is_asked = given is not None and form.is_valid()
    answer = _answer(form.cleaned_data, form) if is_asked else {}
    return admin.page(request, "what_if.html", _("What if?"), {"form": form, **answer})


def _answer(asked: dict[str, Any], form: WhatIfForm) -> dict[str, Any]:
    using, rule = router.db_for_read(CallQueue), asked["rule"]
    book = agreement.book_in_force(using)
    delivery, notice = pacing.observed(using)
    try:
        found: Simulated = simulate(
            book,
            rule,
            asked["calls"],
            latency=asked["latency"],
            start=database.to_us(database.clock(using)),
            keys=min(asked["keys"], asked["calls"]),
            delivery=delivery,
            notice=notice,
        )
    except ValueError as error:
        form.add_error(None, str(error))
        return {}
    return {
        "found": found,
        "takes": formatting.duration(found.seconds),
        "curve": plots.curve(found.curve),
    }
