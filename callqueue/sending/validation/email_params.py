"""Checks of what a send_email call takes."""

from __future__ import annotations

import re
from typing import Any

from callqueue.exceptions import InvalidCall
from callqueue.sending.validation.refusals import kind_of
from callqueue.sending.validation.value_checks import is_secret, listed, refuse_unknown

_ADDRESSES = ("to", "cc", "bcc", "reply_to")
_ONE_LINE = ("subject", "from_email")
EMAIL_PARAMS = (*_ADDRESSES, *_ONE_LINE, "message", "html_message")
_LINE_BREAK = re.compile(r"[\r\n\x00\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")


def check_email_params(params: dict[str, Any]) -> None:
    """InvalidCall where no mail could be written of this, or one with headers of its own."""
    refuse_unknown(params, EMAIL_PARAMS)
    if not params.get("to"):
        raise InvalidCall("params.to", "is missing: an address, or a list of them")
    for name, value in params.items():
        field = f"params.{name}"
        if value is None or is_secret(value):
            continue
        if name in _ADDRESSES:
            _check_addresses(field, value)
        elif not isinstance(value, str):
            raise InvalidCall(field, f"must be a string, not {kind_of(value)}")
        elif name in _ONE_LINE:
            _check_one_line(field, value)


def _check_addresses(field: str, value: Any) -> None:
    if isinstance(value, str):
        _check_address(field, value)
        return
    for index, address in enumerate(listed(field, value)):
        if not is_secret(address):
            _check_address(f"{field}[{index}]", address)


def _check_address(field: str, address: Any) -> None:
    if not isinstance(address, str) or not address.strip():
        raise InvalidCall(field, "must be an address")
    _check_one_line(field, address)


def _check_one_line(field: str, value: str) -> None:
    if _LINE_BREAK.search(value):
        raise InvalidCall(field, "contains a line break, which would begin another mail header")
