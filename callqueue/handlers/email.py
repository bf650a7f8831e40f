"""send_email: one message through Django's email backend, which waits no longer than the lease
lasts where it can be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.core.mail import EmailMultiAlternatives, get_connection

if TYPE_CHECKING:
    from callqueue.handlers import Context


def send_email(params: Mapping[str, Any], context: Context) -> Any:
    """Send one message, with params as docs/reference/sending.md has them. The count sent."""
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
    message.connection = _connection(context)
    return {"sent": message.send()}


def _connection(context: Context) -> Any:
    """The backend's connection. No wait for its server is longer than the lease that is left."""
    connection = get_connection()
    if hasattr(connection, "timeout"):
        left = max(0.001, (context.deadline - datetime.now(UTC)).total_seconds())
        connection.timeout = left if connection.timeout is None else min(left, connection.timeout)
    return connection


def _listed(value: Any) -> list[str]:
    if not value:
        return []
    return [value] if isinstance(value, str) else list(value)


def _domain() -> str:
    from django.core.mail.utils import DNS_NAME

    return str(DNS_NAME)
