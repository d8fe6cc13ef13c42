"""Generators are closed and tasks have ended by the time a response is over, whoever ends it."""

from __future__ import annotations

import asyncio

import pytest

from atom.entrypoints.openai.errors import ClientGone, bad_request
from atom.entrypoints.openai.streaming import EventStream, merge, until_disconnect


class Client:
    """An ASGI client: keeps what is sent, and leaves when told to."""

    def __init__(self, blocked: bool = False) -> None:
        self.gone = asyncio.Event()
        self.sent: list[dict] = []
        self.blocked = blocked

    async def receive(self) -> dict:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.sent.append(message)
        if self.blocked and len(self.sent) > 3:
            await asyncio.Event().wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Source:
    """A generator of bytes; ``closed`` counts how often it was ended, however that came."""

    def __init__(self, items: list, hold: bool = False) -> None:
        self.items, self.hold, self.closed = items, hold, 0

    async def __call__(self):
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                yield item
                await asyncio.sleep(0)
            if self.hold:
                await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # clean-up that takes a moment is waited for
            self.closed += 1


def stream(source: Source) -> EventStream:
    return EventStream(b"first", source())


def test_a_stream_is_sent_in_order_and_closed():
    async def run() -> None:
        client, source = Client(), Source([b"a", b"b"])
        await stream(source)({}, client.receive, client.send)
        assert client.body == b"firstab"
        assert [message.get("more_body", False) for message in client.sent[1:]] == [True, True, True, False]
        headers = dict(client.sent[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert b"content-length" not in headers
        assert source.closed == 1

    asyncio.run(run())


@pytest.mark.parametrize("blocked", [False, True], ids=["waiting for the source", "waiting for a slow client"])
def test_a_client_that_leaves_closes_the_source_before_the_response_ends(blocked):
    async def run() -> None:
        client, source = Client(blocked), Source([b"a", b"b", b"c"], hold=True)
        rest = source()  # kept here, so that no garbage collection closes it
        task = asyncio.create_task(EventStream(b"first", rest)({}, client.receive, client.send))
        while len(client.sent) < 4:
            await asyncio.sleep(0)
        client.gone.set()
        await asyncio.wait_for(task, 5)
        assert source.closed == 1

    asyncio.run(run())


def test_a_cancelled_response_closes_the_source():
    async def run() -> None:
        client, source = Client(blocked=True), Source([b"a", b"b", b"c"], hold=True)
        rest = source()
        task = asyncio.create_task(EventStream(b"first", rest)({}, client.receive, client.send))
        while len(client.sent) < 4:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.closed == 1

    asyncio.run(run())


def test_a_failure_is_the_last_event():
    async def run() -> None:
        client, source = Client(), Source([b"a", bad_request("wrong", "field")])
        await stream(source)({}, client.receive, client.send)
        assert client.body.startswith(b'firstadata: {"error":{"message":"wrong"')
        assert client.body.endswith(b"}}\n\n")
        assert client.sent[-1] == {"type": "http.response.body", "body": b""}

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_merge_yields_everything_with_its_origin(count):
    async def run() -> None:
        sources = [Source([(index, number) for number in range(index + 2)]) for index in range(count)]
        got = [item async for item in merge([source() for source in sources])]
        assert all(index == item[0] for index, item in got)
        assert sorted(item for _, item in got) == sorted(item for source in sources for item in source.items)
        assert [source.closed for source in sources] == [1] * count

    asyncio.run(run())


@pytest.mark.parametrize("end", ["failure", "close", "cancel"])
def test_merge_closes_all_sources(end):
    async def run() -> None:
        failing = Source([1, RuntimeError("broken")] if end == "failure" else [1], hold=True)
        sources = [Source([1, 2], hold=True), failing, Source([1], hold=True)]
        merged = merge([source() for source in sources])
        if end == "failure":
            with pytest.raises(RuntimeError, match="broken"):
                [item async for item in merged]
        elif end == "close":
            for _ in range(3):
                await anext(merged)
            await merged.aclose()
        else:
            task = asyncio.create_task(_drain(merged))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert [source.closed for source in sources] == [1, 1, 1]

    async def _drain(merged) -> None:
        async for _ in merged:
            pass

    asyncio.run(run())


def test_until_disconnect():
    async def run() -> None:
        client, ended = Client(), []

        async def work(hold: bool) -> str:
            try:
                if hold:
                    await asyncio.Event().wait()
                return "done"
            finally:
                ended.append(hold)

        assert await until_disconnect(client.receive, work(False)) == "done"
        waiting = asyncio.create_task(until_disconnect(client.receive, work(True)))
        await asyncio.sleep(0.01)
        client.gone.set()
        with pytest.raises(ClientGone):
            await waiting
        assert ended == [False, True]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
