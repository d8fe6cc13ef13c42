"""Plays the scripted conversation against a server with prefix caching and against one without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atom.config import EngineConfig
from atom.entrypoints.demo.conversation import SCRIPT
from atom.entrypoints.demo.errors import DemoError
from atom.entrypoints.demo.player import Answer, Message, Player
from atom.entrypoints.demo.server_process import ServerProcess
from atom.model_engine.placement import resumable_limit

CACHING_OFF = "--no-enable-prefix-caching"

_MAX_TOKENS = 48
# Long enough to make the server load and size everything that it does at a first request; shares no block with a demo.
_WARM_UP = "The first request pays for what happens once: it is not timed. " * 4

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """One request, with caching and without."""

    name: str
    answer: Answer
    uncached: Answer

    @property
    def seconds_saved(self) -> float:
        return self.uncached.seconds_to_first_token - self.answer.seconds_to_first_token

    @property
    def same_output(self) -> bool:
        return self.answer.same_output(self.uncached)


@dataclass(slots=True)
class Report:
    """What a demo saw: its results, the cache's counters, and what the server's log says of the cache."""

    results: list[Result] = field(default_factory=list)
    cache_stats: dict[str, int] = field(default_factory=dict)
    cache_lines: list[str] = field(default_factory=list)


def warm_up(server: ServerProcess) -> Player:
    """A client of ``server``, after one request that is not timed."""
    player = Player(server.host, server.port)
    player.complete(_WARM_UP, max_tokens=2)
    return player


def play_conversation(flags: list[str], progress: Progress) -> Report:
    """Play the script on both servers, started with ``flags``. Raises :class:`DemoError` when a request fails."""
    report = Report()
    progress("starting a server")
    requests: list[tuple[str, list[Message], Answer]] = []
    with ServerProcess(flags) as server:
        player = warm_up(server)
        texts: dict[str, str] = {}
        for turn in SCRIPT:
            progress(f"playing the conversation: {turn.name}")
            messages = turn.messages(texts)
            answer = player.chat(messages, _MAX_TOKENS)
            texts[turn.name] = answer.text
            requests.append((turn.name, messages, answer))
        report.cache_stats = player.cache_stats()
        progress("stopping the server")
        server.stop()
        report.cache_lines = server.cache_lines()
    progress("starting a server with prefix caching off")
    with ServerProcess([*flags, CACHING_OFF]) as server:
        player = warm_up(server)
        for name, messages, answer in requests:
            progress(f"playing the same requests with prefix caching off: {name}")
            report.results.append(Result(name, answer, player.chat(messages, _MAX_TOKENS)))
    return report


def check(report: Report, config: EngineConfig) -> None:
    """Raise :class:`DemoError` unless every output is the same as without caching and the resent prompt was resumed."""
    different = [result.name for result in report.results if not result.same_output]
    if different:
        raise DemoError(f"the tokens differ from those without prefix caching: {', '.join(different)}")
    resent = next(result.answer for result in report.results if result.name == "resent")
    expected = resumable_limit(resent.prompt_tokens, config.block_size)
    if resent.cached_tokens != expected:
        raise DemoError(f"the resent prompt resumed {resent.cached_tokens} tokens instead of {expected}")
