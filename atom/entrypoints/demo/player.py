"""Sends requests to an OpenAI-compatible server and times them, as any client would."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from atom.entrypoints.demo.errors import DemoError

Message = dict[str, str]

_TIMEOUT_S = 300.0
_CACHE_METRIC = "atom:prefix_cache_"


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer. ``tokens``: the text of each generated token, so that equal answers are equal token by token."""

    text: str
    tokens: tuple[str, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    seconds_to_first_token: float

    def same_output(self, other: Answer) -> bool:
        """Whether both generated the same tokens, and ended for the same reason."""
        return (self.tokens, self.text, self.finish_reason) == (other.tokens, other.text, other.finish_reason)


class Player:
    """A client of one server. Raises :class:`DemoError` when a request fails or takes too long."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    def chat(self, messages: list[Message], max_tokens: int) -> Answer:
        """The assistant's next message."""
        body = {"messages": messages, "max_tokens": max_tokens, "logprobs": True}
        return self._stream("/v1/chat/completions", body)

    def complete(self, prompt: str, max_tokens: int) -> Answer:
        """A continuation of plain text."""
        return self._stream("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 0})

    def cache_stats(self) -> dict[str, int]:
        """The server's counters of its prefix cache, in tokens, requests and checkpoints."""
        with _exchange(self._host, self._port, "GET", "/metrics") as response:
            text = response.read().decode()
        return {
            sample.name.removeprefix(_CACHE_METRIC).removesuffix("_total"): int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(_CACHE_METRIC)
        }

    def _stream(self, path: str, body: dict[str, Any]) -> Answer:
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        started = time.perf_counter()
        first_at: float | None = None
        texts: list[str] = []
        tokens: list[str] = []
        finish_reason, usage = "", None
        with _exchange(self._host, self._port, "POST", path, body) as response:
            for event in _events(response):
                first_at = first_at or time.perf_counter()
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
                    tokens += _token_texts(choice.get("logprobs") or {})
                    finish_reason = choice.get("finish_reason") or finish_reason
        if first_at is None or usage is None or finish_reason == "error":
            raise DemoError(f"the answer from {path} is not whole (finish reason: {finish_reason or 'none'})")
        return Answer(
            text="".join(texts),
            tokens=tuple(tokens),
            finish_reason=finish_reason,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            seconds_to_first_token=first_at - started,
        )


@contextlib.contextmanager
def _exchange(
    host: str, port: int, method: str, path: str, body: dict[str, Any] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """The response to one HTTP request; every failure, while it is read too, is a :class:`DemoError`."""
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            raise DemoError(f"{path} answered {response.status}: {response.read(2000).decode(errors='replace')}")
        yield response
    except TimeoutError as error:
        raise DemoError(f"{path} took longer than {_TIMEOUT_S:.0f} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise DemoError(f"{path} failed: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events as JSON objects, up to ``[DONE]``."""
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        if data:
            try:
                event = json.loads(data)
            except ValueError as error:
                raise DemoError(f"an event of the stream is no JSON: {data[:200]!r}") from error
            if "error" in event:
                raise DemoError(f"the server reports: {event['error'].get('message', event['error'])}")
            yield event
    raise DemoError("the stream ended early")


def _token_texts(logprobs: dict[str, Any]) -> list[str]:
    """Token texts in the shape of either endpoint."""
    if "content" in logprobs:
        return [entry["token"] for entry in logprobs["content"]]
    return logprobs.get("tokens", [])
