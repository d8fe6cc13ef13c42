"""A client that leaves: exactly one abort reaches the engine; none when a request ends by itself."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.openai_fixtures import server_fixture, shared_server_fixture, tokenizer_fixture  # noqa: F401
from tests.openai_server import wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    "text": (TEXT, {"prompt": "hi"}),
    "several": (TEXT, {"prompt": ["a", "b", "c"]}),
    "n": (TEXT, {"prompt": "a", "n": 3}),
}


@pytest.fixture(params=BODIES)
def case(request) -> tuple[str, dict]:
    return BODIES[request.param]


def expected_aborts(body: dict) -> int:
    return len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1


def leave_after(server, path: str, body: dict, stream: bool, nbytes: int) -> None:
    """Send a request, wait until the engine has it and ``nbytes`` have come, then close the connection."""

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
            if not stream:
                task = asyncio.create_task(client.post(path, json=body))
                while server.engine.running < expected_aborts(body):
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.wait([task])
                return
            async with client.stream("POST", path, json=body | {"stream": True}) as response:
                got = 0
                async for chunk in response.aiter_raw():
                    got += len(chunk)
                    if got >= nbytes:
                        return

    asyncio.run(run())


def check_aborted_once(server, body: dict) -> None:
    wait_until(lambda: server.engine.running == 0)
    count = expected_aborts(body)
    assert len(server.engine.aborted) == count == len(set(server.engine.aborted))


@pytest.mark.parametrize("hold", [0, 2])
def test_gone_without_a_stream(server, case, hold):
    path, body = case
    server.engine.hold_after = hold
    leave_after(server, path, body, stream=False, nbytes=0)
    check_aborted_once(server, body)


def test_gone_mid_stream(server, case):
    path, body = case
    server.engine.hold_after = 2
    leave_after(server, path, body, stream=True, nbytes=50)
    check_aborted_once(server, body)


def test_gone_mid_stream_while_tokens_flow(server, case):
    path, body = case
    server.engine.max_model_len = 10**6
    server.engine.reply = [65] * 10**5
    leave_after(server, path, body | {"max_tokens": 10**5}, stream=True, nbytes=2000)
    check_aborted_once(server, body)


def test_gone_mid_prefill_of_a_stream(server, case):
    path, body = case
    server.engine.hold_after = 0

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
            task = asyncio.create_task(client.post(path, json=body | {"stream": True}))
            while server.engine.running < expected_aborts(body):
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(run())
    check_aborted_once(server, body)


@pytest.mark.parametrize("stream", [False, True])
def test_no_abort_at_a_normal_end(server, case, stream):
    path, body = case
    for _ in range(3):
        assert server.post(path, stream=stream, **body).status_code == 200
    wait_until(lambda: server.engine.running == 0)
    assert server.engine.aborted == []


def test_many_leave_and_the_rest_are_served(server):
    server.engine.reply = [65] * 150

    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=limits) as client:

            async def one(number: int) -> str:
                body = {"prompt": "hi", "stream": True, "max_tokens": 150}
                async with client.stream("POST", TEXT, json=body) as response:
                    text = ""
                    async for chunk in response.aiter_text():
                        text += chunk
                        if number % 2 and len(text) > 300:
                            return "left"
                    return text.strip()[-6:]

            return await asyncio.gather(*map(one, range(40)))

    results = asyncio.run(run())
    assert results[::2] == ["[DONE]"] * 20
    assert results[1::2] == ["left"] * 20
    wait_until(lambda: server.engine.running == 0)
    assert len(server.engine.aborted) == len(set(server.engine.aborted)) <= 20
