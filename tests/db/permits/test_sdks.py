"""The SDKs that the how-to names take a permit for each request; `nox -s sdks` installs them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from asgiref.sync import async_to_sync

import callqueue
from callqueue import NotNow, Rule, SlidingWindow
from callqueue.models import CallAttempt
from tests.support.stub import serving

httpx = pytest.importorskip("httpx")
Rules = Callable[..., None]
# what each provider answers, by the end of its path
MESSAGE = {"role": "assistant", "content": "x"}
COMPLETION = {
    "choices": [{"index": 0, "finish_reason": "stop", "message": MESSAGE}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
}
ANSWERS = {
    "/v1/refunds": {"id": "re_1", "object": "refund"},
    "/Messages.json": {"sid": "SM1", "status": "queued", "body": "x"},
    "/chat/completions": {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        **COMPLETION,
    },
}


@pytest.fixture
def refusals() -> list[int]:
    """The statuses of the first answers, where a test wants others than 200."""
    return []


@pytest.fixture
def provider(rules: Rules, refusals: list[int]) -> Iterator[str]:
    limits = [SlidingWindow("4/h"), SlidingWindow("900/h", unit="tokens")]
    rules(r=Rule(hosts=["127.0.0.1"], limits=limits))

    def answer(path: str, _: int) -> tuple[int, dict[str, str], bytes]:
        found = next((body for end, body in ANSWERS.items() if path.endswith(end)), {})
        status = refusals.pop() if refusals else 200
        return status, {"Content-Type": "application/json"}, json.dumps(found).encode()

    with serving(answer) as stub:
        yield stub.url


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        made.mount("http://", callqueue.PermitAdapter(wait=0))
        yield made


def statuses() -> list[int | None]:
    return list(CallAttempt.objects.order_by("pk").values_list("response_status", flat=True))


def test_stripe(provider: str, refusals: list[int], session: requests.Session) -> None:
    stripe = pytest.importorskip("stripe")
    client = stripe.StripeClient(
        "sk_test_1",
        base_addresses={"api": provider},
        http_client=stripe.RequestsClient(session=session),
        max_network_retries=2,
    )
    refusals.append(503)
    assert client.v1.refunds.create({"charge": "ch_1"}).id == "re_1"
    assert statuses() == [503, 200], "its own retry takes a permit too"


def test_twilio(provider: str, session: requests.Session) -> None:
    pytest.importorskip("twilio")
    from twilio.http.http_client import TwilioHttpClient

    client = TwilioHttpClient()
    client.session.mount("http://", callqueue.PermitAdapter(wait=0, label="sms"))
    answer = client.request("POST", provider + "/2010/Accounts/AC1/Messages.json", data={"To": "1"})
    assert answer.status_code == 200
    assert statuses() == [200] and CallAttempt.objects.get().call.path == "sms"


def test_boto3(provider: str) -> None:
    boto3 = pytest.importorskip("boto3")
    from botocore.config import Config

    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "eu-west-1"}
    config = Config(retries={"total_max_attempts": 1})
    client = boto3.client("sqs", endpoint_url=provider, config=config, **keys)
    with callqueue.permit("r", wait=0, label="sqs"):
        client.list_queues()
    assert CallAttempt.objects.get().outcome == "succeeded"


def complete(client: Any) -> Any:
    messages = [{"role": "user", "content": "x"}]
    return client.chat.completions.create(model="m", messages=messages)


def test_openai(provider: str, refusals: list[int]) -> None:
    openai = pytest.importorskip("openai")
    transport = callqueue.PermitTransport(cost={"tokens": 300}, wait=0)
    with httpx.Client(transport=transport) as http_client:
        options = {"api_key": "k", "base_url": provider, "max_retries": 2}
        client = openai.OpenAI(http_client=http_client, **options)
        refusals.append(503)
        assert complete(client).usage.total_tokens == 12
        assert statuses() == [503, 200], "its own retry takes a permit too"
        complete(client)
        with pytest.raises((NotNow, openai.APIConnectionError)) as refused:
            complete(client)
        assert isinstance(refused.value, NotNow) or isinstance(refused.value.__cause__, NotNow)


def test_openai_in_a_coroutine(provider: str) -> None:
    openai = pytest.importorskip("openai")

    async def one() -> int:
        transport = callqueue.AsyncPermitTransport("r")
        async with httpx.AsyncClient(transport=transport) as http_client:
            client = openai.AsyncOpenAI(api_key="k", base_url=provider, http_client=http_client)
            return int((await complete(client)).usage.total_tokens)

    assert async_to_sync(one)() == 12 and statuses() == [200]
