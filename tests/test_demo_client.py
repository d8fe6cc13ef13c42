"""The demo's client and its server process, against servers that misbehave. No model is loaded."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from atom.entrypoints.demo.errors import DemoError
from atom.entrypoints.demo.player import Player
from atom.entrypoints.demo.server_process import ServerProcess


class Canned(http.server.BaseHTTPRequestHandler):
    """Answers every request with the server's ``status`` and ``body``."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)

    def do_GET(self) -> None:
        self.headers["Content-Length"] = "0"
        self.do_POST()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def canned() -> Iterator[http.server.HTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canned) as server:
        server.status = 200
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def player_of(server: http.server.HTTPServer) -> Player:
    return Player(*server.server_address)


def stream(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
CHAT = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None},
    {"choices": [{"delta": {"content": "ab"}, "logprobs": {"content": [{"token": "a"}, {"token": "b"}]}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": USAGE},
]


def test_client_reads_a_chat_stream(canned) -> None:
    canned.body = stream(*CHAT)
    answer = player_of(canned).chat([], 2)
    assert (answer.text, answer.tokens, answer.finish_reason) == ("ab", ("a", "b"), "stop")
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4)
    assert 0 < answer.seconds_to_first_token < 10


def test_client_reads_a_completion_stream(canned) -> None:
    choice = {"text": "ab", "logprobs": {"tokens": ["a", "b"]}, "finish_reason": "length"}
    canned.body = stream({"choices": [choice], "usage": None}, {"choices": [], "usage": USAGE})
    answer = player_of(canned).complete("", 2)
    assert (answer.text, answer.tokens, answer.finish_reason) == ("ab", ("a", "b"), "length")


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (400, b"too long", "answered 400: too long"),
        (200, stream(*CHAT)[: -len(b"data: [DONE]\n\n")], "ended early"),
        (200, stream(*CHAT)[:-40], "no JSON"),
        (200, stream(*CHAT[:3]), "not whole"),
        (200, stream(CHAT[0], {"error": {"message": "out of luck"}}), "out of luck"),
        (200, stream({"choices": [{"delta": {}, "finish_reason": "error"}], "usage": USAGE}), "not whole"),
    ],
)
def test_client_tells_what_failed(canned, status: int, body: bytes, told: str) -> None:
    canned.status, canned.body = status, body
    with pytest.raises(DemoError, match=told):
        player_of(canned).chat([], 2)


def test_client_tells_that_nobody_answers(canned) -> None:
    player = player_of(canned)
    canned.shutdown()
    canned.server_close()
    with pytest.raises(DemoError, match="failed: ConnectionRefusedError"):
        player.complete("", 1)


def test_cache_counters_are_read_from_the_metrics(canned) -> None:
    canned.body = (
        b"# TYPE atom:prefix_cache_cached_tokens_total counter\natom:prefix_cache_cached_tokens_total 64.0\n"
        b"# TYPE atom:pages gauge\natom:pages 7.0\n"
    )
    assert player_of(canned).cache_stats() == {"cached_tokens": 64}


def test_a_server_that_cannot_start_is_quoted() -> None:
    with (
        pytest.raises(DemoError, match=r"exit code 2.*\n.*--block-size=0: use 1 or more"),
        ServerProcess(["--block-size=0"]),
    ):
        pass
