"""What ``/metrics`` shows: the engine core's counters and gauges, and what clients saw of their requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "atom:"
_FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960, 1920)


class HttpMetrics:
    """Latencies and outcomes as seen by the HTTP server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._first_token = Histogram(
            f"{_PREFIX}time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            registry=self._registry,
            buckets=_FIRST_TOKEN_SECONDS,
        )
        self._latency = Histogram(
            f"{_PREFIX}e2e_request_latency_seconds",
            "Seconds from a request's arrival to its last token.",
            registry=self._registry,
            buckets=_REQUEST_SECONDS,
        )
        self._finished = Counter(
            f"{_PREFIX}http_choices_finished",
            "Continuations by why they ended; abort: the client left.",
            ["finished_reason"],
            registry=self._registry,
        )
        self._engine = _EngineCollector()
        self._registry.register(self._engine)

    def first_token(self, seconds: float) -> None:
        """Record a request's time to its first token."""
        self._first_token.observe(seconds)

    def completed(self, seconds: float) -> None:
        """Record how long a request took that ran to its end."""
        self._latency.observe(seconds)

    def finished(self, reason: str) -> None:
        """Count one continuation's end."""
        self._finished.labels(reason).inc()

    def render(self, engine: Mapping[str, int | float] | None) -> bytes:
        """Everything in Prometheus' text format. ``engine``: the core's figures, None when it is dead."""
        self._engine.figures = engine
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine core's figures. A name that ends in ``_total`` is a counter, any other a gauge."""

    def __init__(self) -> None:
        self.figures: Mapping[str, int | float] | None = {}

    def collect(self) -> Iterator[Metric]:
        alive = self.figures is not None
        yield GaugeMetricFamily(f"{_PREFIX}engine_up", "1 while the engine core runs.", value=int(alive))
        for name, value in (self.figures or {}).items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(_PREFIX + name, name.replace("_", " "), value=value)
