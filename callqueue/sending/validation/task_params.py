"""Checks of what a celery_task call takes."""

from __future__ import annotations

from typing import Any

from callqueue.exceptions import InvalidCall
from callqueue.sending.validation.refusals import (
    TASK_NAME,
    is_secret,
    listed,
    named,
    refuse_unknown,
)

OF_MESSAGE = ("embed", "headers", "properties")  # a QueuedTask's: handlers/celery_message.py
TASK_PARAMS = ("name", "args", "kwargs", *OF_MESSAGE)


def check_task_params(params: dict[str, Any]) -> None:
    """InvalidCall where Celery could not send a task of this."""
    refuse_unknown(params, TASK_PARAMS)
    name = params.get("name")
    if not is_secret(name) and not (isinstance(name, str) and TASK_NAME.fullmatch(name)):
        raise InvalidCall(
            "params.name", "must be the name of a Celery task, such as 'shop.tasks.ship'"
        )
    if params.get("args") is not None:
        listed("params.args", params["args"])
    for mapping in ("kwargs", *OF_MESSAGE):
        if params.get(mapping) is not None:
            named(f"params.{mapping}", params[mapping])
    if params.get("headers") and not isinstance(params["headers"].get("id"), str):
        raise InvalidCall("params.headers.id", "must be the id of a task, a string")
