"""`PermitTransport` and `AsyncPermitTransport`: a permit for each request of an httpx client.

`httpx.Client(transport=callqueue.PermitTransport())`. Redirects and retries that the client makes
take a permit each. Needs httpx, the extra `httpx`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured

from callqueue.permits import transport
from callqueue.permits.granted import Permit
from callqueue.permits.permit import abegin, begin
from callqueue.permits.transport import Options

if TYPE_CHECKING:
    import httpx
    from httpx import AsyncBaseTransport, BaseTransport
else:
    try:
        import httpx
        from httpx import AsyncBaseTransport, BaseTransport
    except ImportError:
        httpx, BaseTransport, AsyncBaseTransport = None, object, object


class _Options:
    """What both transports are made with."""

    def __init__(
        self,
        rule: str | None = None,
        *,
        key: str | Mapping[str, str] = "",
        cost: int | Mapping[str, int] = 1,
        priority: int | None = None,
        wait: float | None = None,
        lease: float | None = None,
        label: str = "",
        transport: Any = None,
        **of_transport: Any,
    ) -> None:
        if httpx is None:
            raise ImproperlyConfigured(
                f"callqueue.{type(self).__name__} needs httpx:"
                ' pip install "django-callqueue[httpx]"'
            )
        self._options = Options(rule, key, cost, priority, wait, lease, label)
        self._inner = self._default(**of_transport) if transport is None else transport

    def _default(self, **of_transport: Any) -> Any:
        raise NotImplementedError


class PermitTransport(_Options, BaseTransport):
    """A transport of httpx that makes each request under a permit.

    `rule`: under which; without it the rule whose hosts name the request's, and hosts without a
    rule go as `CALLQUEUE["OTHER_HOSTS"]` says. `key`, `cost`, `priority`, `wait`, `lease`, `label`:
    see `callqueue.permit`. `transport`: what sends them; else an `httpx.HTTPTransport` made with
    the other arguments. Raises NotNow where no permit is to be had within `wait`.
    """

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request under a permit."""
        asked = self._options.wanted(request.method, str(request.url))
        if asked is None:
            return self._sent(request)
        permit = begin(asked)
        try:
            response = self._sent(request)
            if _is_worth_reading(permit, response):
                response.read()
        except BaseException as error:
            transport.failed(permit, error)
            raise
        transport.answered(permit, _as_response(request, response))
        return response

    def close(self) -> None:
        """Close what sends them."""
        self._inner.close()

    def _sent(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = self._inner.handle_request(request)
        return response

    def _default(self, **of_transport: Any) -> Any:
        return httpx.HTTPTransport(**of_transport)


class AsyncPermitTransport(_Options, AsyncBaseTransport):
    """The same for `httpx.AsyncClient`."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request under a permit."""
        asked = await sync_to_async(self._options.wanted)(request.method, str(request.url))
        if asked is None:
            return await self._sent(request)
        permit = await abegin(asked)
        try:
            response = await self._sent(request)
            if _is_worth_reading(permit, response):
                await response.aread()
        except BaseException as error:
            permit.end_with(transport.ended_by(permit, error))
            await permit.written()
            raise
        transport.answered(permit, _as_response(request, response))
        await permit.written()
        return response

    async def aclose(self) -> None:
        """Close what sends them."""
        await self._inner.aclose()

    async def _sent(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = await self._inner.handle_async_request(request)
        return response

    def _default(self, **of_transport: Any) -> Any:
        return httpx.AsyncHTTPTransport(**of_transport)


def _is_worth_reading(permit: Permit, response: httpx.Response) -> bool:
    kind = response.headers.get("content-type", "")
    return transport.is_worth_reading(permit, response.status_code, kind)


def _as_response(request: httpx.Request, response: httpx.Response) -> Any:
    body = response.content if response.is_closed else None
    headers = dict(response.headers)
    return transport.as_response(response.status_code, headers, body, str(request.url))
