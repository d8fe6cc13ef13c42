"""Server-sent events, several generators read as one, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from atom.entrypoints.openai.errors import ClientGone, as_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """JSON as one server-sent event."""
    return b"data: " + payload + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns. If the client leaves first, ``work`` is cancelled and waited for; raises ClientGone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        # Waited for, so that a request's clean-up is over when its handler is, at a shutdown too.
        await _cancel([working, leaving])


class EventStream(StreamingResponse):
    """Sends ``first`` and then what ``rest`` yields; closes ``rest`` at the end and when the client leaves.

    A failure becomes one error event, after which the stream ends without ``[DONE]``.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(rest, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response. A client that leaves is no failure."""
        try:
            await until_disconnect(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for chunk in self._rest:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            body = event(as_api_error(error).body())
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncIterator[tuple[int, T]]:
    """What the sources yield, as it comes, with each source's index. All are closed when one fails or this closes."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(index, source)) for index, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        await _cancel(tasks)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
