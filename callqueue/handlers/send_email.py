"""send_email: one message through Django's email backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.core.mail import EmailMultiAlternatives, get_connection

from callqueue.exceptions import InvalidCall
from callqueue.handlers import BuiltIn
from callqueue.values import (
    Ban,
    Check,
    check_each,
    check_list,
    flaw_in,
    is_secret,
    refuse_unknown,
    text_check,
)

if TYPE_CHECKING:
    from callqueue.handlers import Context

_ONE_LINE: Ban = (
    re.compile(r"[\r\n\x00\x0b\x0c\x1c-\x1e\x85\u2028\u2029]"),
    "contains a line break, which would begin another mail header",
)


def send_email(params: Mapping[str, Any], context: Context) -> Any:
    """Send a message, with params as docs/reference/sending.md has them; {"sent": how many}."""
    message = EmailMultiAlternatives(
        subject=params.get("subject", ""),
        body=params.get("message", ""),
        from_email=params.get("from_email"),
        to=_as_list(params.get("to")),
        cc=_as_list(params.get("cc")),
        bcc=_as_list(params.get("bcc")),
        reply_to=_as_list(params.get("reply_to")),
        headers={"Message-ID": f"<callqueue.{context.idempotency_key}@{_mail_domain()}>"},
    )
    if params.get("html_message"):
        message.attach_alternative(params["html_message"], "text/html")
    message.connection = _connection_within_lease(context)
    return {"sent": message.send()}


def _connection_within_lease(context: Context) -> Any:
    """The backend's connection; its timeout, if it has one, within the lease that is left."""
    connection = get_connection()
    if hasattr(connection, "timeout"):
        left = max(0.001, (context.deadline - datetime.now(UTC)).total_seconds())
        connection.timeout = left if connection.timeout is None else min(left, connection.timeout)
    return connection


def _as_list(value: Any) -> list[str]:
    if not value:
        return []
    return [value] if isinstance(value, str) else list(value)


def _mail_domain() -> str:
    from django.core.mail.utils import DNS_NAME

    return str(DNS_NAME)


def _check_params(params: dict[str, Any]) -> None:
    refuse_unknown(params, PARAMS)
    if not params.get("to"):
        raise InvalidCall("params.to", "is missing: an address, or a list of them")
    check_each(params, PARAMS)


def _check_addresses(field: str, value: Any) -> None:
    if isinstance(value, str) or is_secret(value):
        _check_address(field, value)
    else:
        for index, address in enumerate(check_list(field, value)):
            _check_address(f"{field}[{index}]", address)


def _check_address(field: str, address: Any) -> None:
    is_text = isinstance(address, str) and address.strip()
    why = flaw_in(address, (_ONE_LINE,)) if is_text or is_secret(address) else "must be an address"
    if why:
        raise InvalidCall(field, why)


PARAMS: dict[str, Check] = {
    "to": _check_addresses,
    "cc": _check_addresses,
    "bcc": _check_addresses,
    "reply_to": _check_addresses,
    "subject": text_check(_ONE_LINE),
    "from_email": text_check(_ONE_LINE),
    "message": text_check(),
    "html_message": text_check(),
}
BUILT_IN = BuiltIn(send_email, free=("subject", "message", "html_message"), check=_check_params)
