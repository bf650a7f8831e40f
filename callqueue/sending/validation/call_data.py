"""Checks of call_data as a whole: the method, and the params that the method takes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from callqueue.exceptions import InvalidCall
from callqueue.handlers import HTTP_METHODS
from callqueue.sending.validation.email_params import check_email_params
from callqueue.sending.validation.http_params import HTTP_PARAMS, check_http_params
from callqueue.sending.validation.json_values import plain_copy
from callqueue.sending.validation.refusals import kind_of, path_of, shown
from callqueue.sending.validation.task_params import check_task_params
from callqueue.sending.validation.urls import Reach
from callqueue.texts import suggest


def check_call_data(
    call_data: object,
    *,
    methods: Collection[str],
    reach: Reach,
    secret_names: Collection[str],
    max_bytes: int,
) -> dict[str, Any]:
    """A plain JSON copy of `call_data`, its method normalised. InvalidCall names the field,
    NotAllowed the host.

    A Secret is accepted in place of any string in params; what it stands for is not known here, so
    the worker repeats the checks with `check_params` once it is. A dict that looks like a reference
    to one is a dict.
    """
    if not isinstance(call_data, dict):
        raise InvalidCall(
            "call_data", f"must be a dict with 'method' and 'params', not {kind_of(call_data)}"
        )
    plain = plain_copy(call_data, max_bytes, secret_names)
    _refuse_other_names(plain)
    plain["method"] = method = _checked_method(plain, methods)
    if "params" not in plain:
        raise InvalidCall("params", "is missing: a dict of the method's arguments")
    check_params(method, plain["params"], reach)
    return plain


def check_params(method: str, params: object, reach: Reach) -> None:
    """Check what the method makes of its params. Again once secrets are resolved."""
    if not isinstance(params, dict):
        raise InvalidCall("params", f"must be a dict, not {kind_of(params)}")
    if method in HTTP_METHODS:
        check_http_params(params, reach)
    elif method == "send_email":
        check_email_params(params)
    elif method == "celery_task":
        check_task_params(params)


def _refuse_other_names(plain: dict[str, Any]) -> None:
    known = ("method", "params")
    for name in plain:
        if name not in known:
            is_param = name in HTTP_PARAMS
            advice = "; it belongs into params" if is_param else suggest(name, known)
            raise InvalidCall(path_of("call_data", name), f"is unknown{advice}")


def _checked_method(plain: dict[str, Any], methods: Collection[str]) -> str:
    method = plain.get("method")
    if not isinstance(method, str) or not method:
        state = f"must be a string, not {kind_of(method)}" if method else "is missing"
        raise InvalidCall(
            "method", f"{state}: an HTTP verb, 'send_email', 'celery_task' or a handler's name"
        )
    if method in methods:
        return method
    lowered = method.lower()
    if lowered not in methods:
        raise InvalidCall("method", f"{shown(method)} is unknown{suggest(lowered, methods)}")
    return lowered
