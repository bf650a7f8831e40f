"""send_email: one message through Django's email backend, within the rule's total timeout where the backend has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django.core.mail import EmailMultiAlternatives

if TYPE_CHECKING:
    from callqueue.handlers import Context


def send_email(params: Mapping[str, Any], context: Context) -> Any:
    """Send one message: `to subject message from_email html_message cc bcc reply_to`. Returns how many were delivered."""
    message = EmailMultiAlternatives(
        subject=params.get("subject", ""),
        body=params.get("message", ""),
        from_email=params.get("from_email"),
        to=_listed(params.get("to")),
        cc=_listed(params.get("cc")),
        bcc=_listed(params.get("bcc")),
        reply_to=_listed(params.get("reply_to")),
        headers={"Message-ID": f"<callqueue.{context.idempotency_key}@{_domain()}>"},
    )
    if params.get("html_message"):
        message.attach_alternative(params["html_message"], "text/html")
    return {"sent": message.send()}


def _listed(value: Any) -> list[str]:
    if not value:
        return []
    return [value] if isinstance(value, str) else list(value)


def _domain() -> str:
    from django.core.mail.utils import DNS_NAME

    return str(DNS_NAME)
