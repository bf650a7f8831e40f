"""`PermitTransport` and `AsyncPermitTransport`: a permit for each request of an httpx client.

`httpx.Client(transport=callqueue.PermitTransport())`. Redirects and retries that the client makes
take a permit each. Needs httpx, the extra `httpx`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

from callqueue import conf
from callqueue.permits import transport
from callqueue.permits.asking import Options, Wanted
from callqueue.permits.granted import Permit
from callqueue.permits.permit import abegin, begin
from callqueue.transitions import Result

_PIECE = 1024  # bytes of a compressed body that are unfolded at once

if TYPE_CHECKING:
    import httpx
    from httpx import AsyncBaseTransport, AsyncByteStream, BaseTransport, SyncByteStream
else:
    try:
        import httpx
        from httpx import AsyncBaseTransport, AsyncByteStream, BaseTransport, SyncByteStream
    except ImportError:
        httpx = None
        BaseTransport = AsyncBaseTransport = SyncByteStream = AsyncByteStream = object


class _Transport:
    """What both transports are made with, and what they make of an answer."""

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

    def _wanted(self, request: httpx.Request) -> Wanted | None:
        return transport.wanted(self._options, request.method, str(request.url))


class PermitTransport(_Transport, BaseTransport):
    """A transport of httpx that makes each request under a permit.

    `rule`: under which; without it the rule whose hosts name the request's, and hosts without a
    rule go as `CALLQUEUE["OTHER_HOSTS"]` says. `key`, `cost`, `priority`, `wait`, `lease`, `label`:
    see `callqueue.permit`. `transport`: what sends them; else an `httpx.HTTPTransport` made with
    the other arguments. Raises NotNow where no permit is to be had within `wait`.
    """

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request under a permit."""
        if (asked := self._wanted(request)) is None:
            return self._sent(request)
        permit = begin(asked)
        try:
            response, body = self._sent(request), None
            if _is_worth_reading(permit, response):
                body = _Start(response)
                body.read()
        except BaseException as error:
            permit.end_with(permit.ended(error))
            raise
        return _answered(permit, request, response, body, _Stream)

    def close(self) -> None:
        """Close what sends them."""
        self._inner.close()

    def _sent(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = self._inner.handle_request(request)
        return response

    def _default(self, **of_transport: Any) -> Any:
        return httpx.HTTPTransport(**of_transport)


class AsyncPermitTransport(_Transport, AsyncBaseTransport):
    """The same for `httpx.AsyncClient`."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request under a permit."""
        if (asked := self._wanted(request)) is None:
            return await self._sent(request)
        permit = await abegin(asked)
        try:
            response, body = await self._sent(request), None
            if _is_worth_reading(permit, response):
                body = _AsyncStart(response)
                await body.read()
        except BaseException as error:
            permit.end_with(permit.ended(error))
            await permit.written()
            raise
        response = _answered(permit, request, response, body, _AsyncStream)
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


class _Read:
    """The beginning of a body, which the verdict is made by: all of it, or somewhat more than
    MAX_RESPONSE_BYTES. To the client it is the whole body: what was read, and what is still to
    come.
    """

    def __init__(self, response: httpx.Response) -> None:
        self.most, self.start, self.is_whole = conf.current().max_response_bytes, b"", False
        self._room = self.most + self.most // 100 + 1024  # what gzip adds to what it cannot shorten
        self._stream: Any = response.stream
        response.stream = self  # type: ignore[assignment]


class _Start(_Read, SyncByteStream):
    def read(self) -> None:
        parts, size = [], 0
        self._coming = iter(self._stream)
        for part in self._coming:
            parts.append(part)
            size += len(part)
            if size > self._room:
                break
        else:
            self.is_whole = True
            self._stream.close()
        self.start = b"".join(parts)

    def __iter__(self) -> Iterator[bytes]:
        yield self.start
        yield from self._coming

    def close(self) -> None:
        self._stream.close()


class _AsyncStart(_Read, AsyncByteStream):
    async def read(self) -> None:
        parts, size = [], 0
        self._coming = aiter(self._stream)
        async for part in self._coming:
            parts.append(part)
            size += len(part)
            if size > self._room:
                break
        else:
            self.is_whole = True
            await self._stream.aclose()
        self.start = b"".join(parts)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.start
        async for part in self._coming:
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Body:
    """A body that is still to come, with the permit that ends once it has, or is closed."""

    def __init__(self, stream: Any, permit: Any, result: Result) -> None:
        self._stream, self._permit, self._result = stream, permit, result

    def _end(self) -> Any:
        permit, self._permit = self._permit, None
        if permit is not None:
            permit.end_with(self._result)
        return permit


class _Stream(_Body, SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        yield from self._stream

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._end()


class _AsyncStream(_Body, AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            if (permit := self._end()) is not None:
                await permit.written()


def _is_worth_reading(permit: Permit, response: httpx.Response) -> bool:
    kind = response.headers.get("content-type", "")
    return transport.is_worth_reading(permit, response.status_code, kind)


def _answered(
    permit: Permit,
    request: httpx.Request,
    response: httpx.Response,
    body: _Read | None,
    stream: type[_Body],
) -> httpx.Response:
    """The permit has this answer; what the client gets, to which nobody has done anything. `body`:
    where it was read.
    """
    status, headers = response.status_code, response.headers
    read, is_cut = (None, False) if body is None else _decoded(headers, body)
    told = transport.as_response(status, dict(headers), read, str(request.url))
    result = transport.judged(permit, told, is_cut=is_cut)
    if (body is None or not body.is_whole) and transport.lasts(permit):
        permit.answered(result)
        response.stream = stream(response.stream, permit, result)  # type: ignore[assignment]
        return response
    permit.end_with(result)
    if body is not None and body.is_whole:  # for either kind of client
        response.stream = httpx.ByteStream(body.start)
    return response


def _decoded(headers: httpx.Headers, body: _Read) -> tuple[bytes, bool]:
    """The body's content, at most MAX_RESPONSE_BYTES of it, and whether that is not all; as it came
    where it is not what its headers say. Decoded in small pieces, however far they unfold.
    """
    found = bytearray()
    pieces = (body.start[at : at + _PIECE] for at in range(0, len(body.start), _PIECE))
    try:
        for part in httpx.Response(200, headers=headers, content=pieces).iter_bytes():
            found += part
            if len(found) > body.most:
                break
    except httpx.DecodingError:
        found = bytearray(body.start)
    return bytes(found[: body.most]), not body.is_whole or len(found) > body.most
