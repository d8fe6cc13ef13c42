"""Plays recorded sessions against a server, beside a cache that never forgets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atom.config import EngineConfig
from atom.entrypoints.demo.errors import DemoError
from atom.entrypoints.demo.ideal import IdealCache
from atom.entrypoints.demo.play import CACHING_OFF, warm_up
from atom.entrypoints.demo.player import Answer, Player
from atom.entrypoints.demo.server_process import ServerProcess
from atom.entrypoints.demo.trace import TraceRequest

# A trace is about prefills: few tokens of each answer are generated.
_MAX_TOKENS = 4

Progress = Callable[[str, Sequence[TraceRequest]], Sequence[TraceRequest]]


@dataclass(frozen=True, slots=True)
class Played:
    """One request of a trace. ``ideal_tokens``: what an infinite cache resumes. ``uncached``: None unless compared."""

    session_id: str
    answer: Answer
    ideal_tokens: int
    uncached: Answer | None = None


@dataclass(slots=True)
class TraceReport:
    """What playing a trace saw."""

    played: list[Played] = field(default_factory=list)
    cache_stats: dict[str, int] = field(default_factory=dict)
    cache_lines: list[str] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        """Whether the trace was played without caching too."""
        return all(item.uncached is not None for item in self.played)

    def seconds_saved(self, items: Sequence[Played]) -> float:
        """Time to first token that caching saved ``items``: measured if compared, else by the rate of the prefills."""
        if self.compared:
            return sum(
                item.uncached.seconds_to_first_token - item.answer.seconds_to_first_token
                for item in items
                if item.uncached is not None
            )
        return self._seconds_per_token() * sum(item.answer.cached_tokens for item in items)

    def _seconds_per_token(self) -> float:
        """Seconds that one more computed prompt token cost; what every request costs besides is left out."""
        computed = [item.answer.prompt_tokens - item.answer.cached_tokens for item in self.played]
        seconds = [item.answer.seconds_to_first_token for item in self.played]
        if len(set(computed)) < 2:
            return sum(seconds) / sum(computed)
        return max(statistics.linear_regression(computed, seconds).slope, 0.0)


def play_trace(
    requests: Sequence[TraceRequest], config: EngineConfig, flags: list[str], compare: bool, progress: Progress
) -> TraceReport:
    """Play ``requests`` in their order on a server started with ``flags``, and with ``compare`` on one without caching.

    ``progress`` hands back the requests while it shows how far they are. Raises :class:`DemoError` when a request fails.
    """
    from atom.tokenizer import Tokenizer

    tokenizer = Tokenizer(config.tokenizer or config.model)
    ideal = IdealCache(config.block_size)
    report = TraceReport()
    with ServerProcess(flags) as server:
        player = warm_up(server)
        for request in progress("playing", requests):
            token_ids = tokenizer.encode(request.input)
            answer = _ask(player, request)
            if answer.prompt_tokens != len(token_ids):
                raise DemoError(f"the server counts {answer.prompt_tokens} tokens where there are {len(token_ids)}")
            report.played.append(Played(request.session_id, answer, ideal.ask(token_ids)))
        report.cache_stats = player.cache_stats()
        server.stop()
        report.cache_lines = server.cache_lines()
    if compare:
        with ServerProcess([*flags, CACHING_OFF]) as server:
            player = warm_up(server)
            uncached = [_ask(player, request) for request in progress("caching off", requests)]
        report.played = [
            Played(item.session_id, item.answer, item.ideal_tokens, answer)
            for item, answer in zip(report.played, uncached, strict=True)
        ]
    return report


def check_trace(report: TraceReport) -> None:
    """Raise :class:`DemoError` if a compared request's tokens differ from those without caching."""
    different = sum(item.uncached is not None and not item.answer.same_output(item.uncached) for item in report.played)
    if different:
        raise DemoError(f"{different} of {len(report.played)} requests have other tokens than without prefix caching")


def _ask(player: Player, request: TraceRequest) -> Answer:
    try:
        return player.complete(request.input, _MAX_TOKENS)
    except DemoError as error:
        raise DemoError(f"session {request.session_id}, time {request.timestamp:.0f}: {error}") from error
