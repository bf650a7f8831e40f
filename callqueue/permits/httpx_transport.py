"""`PermitTransport` and `AsyncPermitTransport`: a permit for each request of a client of httpx2 or
httpx (its request tells which), redirects and retries too. No body is read before the client does.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from callqueue import conf
from callqueue.permits import transport
from callqueue.permits.asking import Options, Wanted
from callqueue.permits.granted import AsyncPermit, Permit
from callqueue.permits.permit import abegin, begin

_PIECE = 1024  # bytes of a compressed body that are unfolded at once

if TYPE_CHECKING:
    from httpx import AsyncBaseTransport, BaseTransport
else:
    BaseTransport = AsyncBaseTransport = object


class _Transport:
    _default = ""  # the class of the client's library that sends requests

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
        self._options = Options(rule, key, cost, priority, wait, lease, label)
        self._inner, self._of_transport = transport, of_transport

    def _sender(self, request: Any) -> Any:
        if self._inner is None:  # the first request tells which library it is
            self._inner = getattr(_library_of(request), self._default)(**self._of_transport)
        return self._inner

    def _wanted_for(self, request: Any) -> Wanted | None:
        return transport.wanted_for_url(self._options, str(request.url))


class PermitTransport(_Transport, BaseTransport):
    """A transport of httpx2 or httpx that makes each request under a permit.

    `rule`: under which; without it the rule whose hosts name the request's, and hosts without a
    rule pass. `key` to `label`: see `callqueue.permit`. `transport`: what sends them; else the
    library's `HTTPTransport`, made with the rest. NotNow where `wait` ends without a permit.
    """

    _default = "HTTPTransport"

    def handle_request(self, request: Any) -> Any:
        sender = self._sender(request)
        if (asked := self._wanted_for(request)) is None:
            return sender.handle_request(request)
        permit = begin(asked)
        try:
            response = sender.handle_request(request)
        except BaseException as error:
            permit.end_with(permit.result_of(error))
            raise
        _end_with_answer(permit, request, response)
        return response

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def __enter__(self) -> PermitTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncPermitTransport(_Transport, AsyncBaseTransport):
    """As `PermitTransport`, for an `AsyncClient`."""

    _default = "AsyncHTTPTransport"

    async def handle_async_request(self, request: Any) -> Any:
        sender = self._sender(request)
        if (asked := self._wanted_for(request)) is None:
            return await sender.handle_async_request(request)
        permit = await abegin(asked)
        try:
            response = await sender.handle_async_request(request)
        except BaseException as error:
            permit.end_with(permit.result_of(error))
            await permit.wait_until_written()
            raise
        _end_with_answer(permit, request, response)
        await permit.wait_until_written()
        return response

    async def aclose(self) -> None:
        if self._inner is not None:
            await self._inner.aclose()

    async def __aenter__(self) -> AsyncPermitTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _end_with_answer(permit: Permit, request: Any, response: Any) -> None:
    """End the permit, now or once the client has read the body or closes it."""
    status, url = response.status_code, str(request.url)

    def end(body: bytes, *, is_cut: bool) -> None:
        told = transport.as_response(status, response.headers, body, url)
        permit.end_with(transport.result_of_response(permit, told, is_cut=is_cut))

    wants_body = transport.wants_body(permit)
    if response.is_closed:  # it was never sent, but made by a client's own transport
        end(response.content if wants_body else b"", is_cut=False)
    elif wants_body:
        permit.sent()
        response.stream = _body_class(response)(response, permit, end)
    elif transport.is_charged_until_read(permit):
        told = transport.as_response(status, response.headers, b"", url)
        result = transport.result_of_response(permit, told)
        permit.hold_and_tell_sent(result)
        response.stream = _body_class(response)(
            response, permit, lambda *_, **__: permit.end_with(result)
        )
    else:
        end(b"", is_cut=False)


class _Body:
    """A response's stream: keeps the beginning of what is read; at its close `end` gets that."""

    def __init__(self, response: Any, permit: Permit, end: Callable[..., None]) -> None:
        self._response, self._stream, self._permit = response, response.stream, permit
        self._end: Callable[..., None] | None = end
        self._start, self._is_whole = bytearray(), False
        self._most = conf.current().max_response_bytes
        self._room = self._most + self._most // 100 + 1024  # gzip adds to what it cannot shorten

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._keep(part)
            yield part
        self._is_whole = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._keep(part)
            yield part
        self._is_whole = True

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._end_once()

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._end_once()
            if isinstance(self._permit, AsyncPermit):
                await self._permit.wait_until_written()

    def _keep(self, part: bytes) -> None:
        self._start += part[: max(0, self._room + 1 - len(self._start))]

    def _end_once(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            body, is_cut = self._decoded()
            end(body, is_cut=is_cut)

    def _decoded(self) -> tuple[bytes, bool]:
        """The body up to MAX_RESPONSE_BYTES, as it came if headers lie; whether it is cut."""
        library, found, start = _library_of(self._response), bytearray(), bytes(self._start)
        pieces = (start[at : at + _PIECE] for at in range(0, len(start), _PIECE))
        is_cut = not self._is_whole or len(start) > self._room
        try:
            again = library.Response(200, headers=self._response.headers, content=pieces)
            for part in again.iter_bytes():
                found += part
                if len(found) > self._most:
                    break
        except library.DecodingError:
            found = found if is_cut and found else bytearray(start)
        return bytes(found[: self._most]), is_cut or len(found) > self._most


@cache
def _body_class_of_library(library: Any) -> type[_Body]:
    # clients take no stream of another class
    kinds = (_Body, library.SyncByteStream, library.AsyncByteStream)
    return type("Body", kinds, {})


def _body_class(response: Any) -> type[_Body]:
    return _body_class_of_library(_library_of(response))


def _library_of(message: Any) -> Any:
    names = (kind.__module__.partition(".")[0] for kind in type(message).__mro__)
    return sys.modules[next(name for name in names if name in ("httpx", "httpx2"))]
