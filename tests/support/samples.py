"""call_data for tests: good samples, what the checks say of others, and strategies for any value."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import strategies as st

from callqueue.exceptions import InvalidCall
from callqueue.handlers import HTTP_METHODS
from callqueue.security.secrets import Secret
from callqueue.sending.call_data import Reach, check_call_data

URL = "https://api.example.com/v1"
NOW = datetime(2030, 1, 1, tzinfo=UTC)
METHODS = HTTP_METHODS | {"send_email", "celery_task"}
ANYWHERE = Reach(hosts=("*",), networks=())


def checked(call_data: Any, **given: Any) -> dict[str, Any]:
    reach = Reach(tuple(given.pop("allowed_hosts", "*")), tuple(given.pop("allowed_networks", ())))
    arguments = {
        "methods": lambda: METHODS | {"sms", "fax"},
        "secret_names": {"STRIPE": "x", "GITHUB": "y"},
        "max_bytes": 262144,
    }
    return check_call_data(call_data, reach=reach, **{**arguments, **given})[0]


def http(**params: Any) -> dict[str, Any]:
    return {"method": "post", "params": {"url": URL, **params}}


def email(**params: Any) -> dict[str, Any]:
    return {
        "method": "send_email",
        "params": {"to": "a@example.com", "subject": "s", "message": "m", **params},
    }


def task(**params: Any) -> dict[str, Any]:
    return {"method": "celery_task", "params": {"name": "shop.tasks.ship", **params}}


def refused(call_data: Any, field: str, why: str = "", **given: Any) -> str:
    with pytest.raises(InvalidCall) as caught:
        checked(call_data, **given)
    assert caught.value.field == field
    assert why in caught.value.why
    return caught.value.why


texts = st.text(st.characters(exclude_categories=()), max_size=12)
json_leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts
other_leaves = (
    st.binary(max_size=4)
    | st.datetimes()
    | st.sets(st.integers(), max_size=2)
    | st.decimals()
    | st.uuids()
)
names = texts | st.sampled_from(
    ["$secret", "url", "headers", "auth", "method", "params", "json", "data", "cookies"]
)
known = st.sampled_from(["STRIPE", "GITHUB", "NO"])
secret = st.fixed_dictionaries({"$secret": known}) | st.builds(Secret, known)
values = st.recursive(
    json_leaves | other_leaves | secret,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(names, inner, max_size=4)
        | st.dictionaries(names | st.integers() | st.none(), inner, max_size=2)
    ),
    max_leaves=6,
)
urls = (
    texts
    | st.builds("http://{}".format, texts)
    | st.builds(
        "{}://{}:{}/{}".format,
        st.sampled_from(["http", "https", "HTTP"]),
        texts,
        st.integers(-1, 70000),
        texts,
    )
    | st.ip_addresses().map(lambda a: f"http://[{a}]/" if a.version == 6 else f"http://{a}/")
    | st.just(URL)
)
argument_names = names | st.sampled_from(["to", "subject", "name", "args", "kwargs", "timeout"])
params = st.dictionaries(argument_names, values, max_size=4) | (
    st.fixed_dictionaries(
        {"url": urls | values},
        optional={
            "headers": st.dictionaries(texts, texts | values, max_size=3) | values,
            "cookies": st.dictionaries(texts, texts | values, max_size=3) | values,
            "auth": st.lists(texts | values, max_size=3) | values,
            "params": values,
            "data": values,
            "json": values,
        },
    )
)
call_datas = values | st.fixed_dictionaries(
    {
        "method": st.sampled_from([*sorted(METHODS), "sms", "POST"]) | values,
        "params": params | values,
    }
)
