"""Models, health, metrics, version and the prefix cache's reset."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

import atom
from tests.openai_fixtures import server_fixture, shared_server_fixture, tokenizer_fixture  # noqa: F401
from tests.openai_server import MODEL, ScriptedEngine, Server, error_of, wait_until


def scrape(server) -> dict[str, object]:
    response = server.http.get("/metrics")
    assert response.status_code == 200
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def value(families: dict, name: str, sample: str | None = None, **labels: str) -> float:
    (found,) = [s.value for s in families[name].samples if s.name == (sample or name) and s.labels == labels]
    return found


def test_models(server):
    (model,) = server.client.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == (MODEL, "model", "atom", 200)
    assert server.client.models.retrieve(MODEL).id == MODEL
    assert error_of(server.http.get("/v1/models/a/b"), 404)["code"] == "model_not_found"


def test_the_model_may_have_another_name(tokenizer):
    with Server(ScriptedEngine(tokenizer), model_name="org/name") as server:
        assert [model.id for model in server.client.models.list()] == ["org/name"]
        assert server.client.models.retrieve("org/name").id == "org/name"
        assert server.client.completions.create(model="org/name", prompt="a").model == "org/name"
        error_of(server.post("/v1/completions", model=MODEL, prompt="a"), 404)


def test_version(server):
    assert server.http.get("/version").json() == {"version": atom.__version__}


def test_health(server):
    assert server.http.get("/health").status_code == 200
    server.engine.alive = False
    error = error_of(server.http.get("/health"), 503)
    assert "killed by a test" in error["message"]


def test_reset_prefix_cache(server):
    assert server.http.post("/reset_prefix_cache").status_code == 200
    server.engine.reset_result = False
    assert error_of(server.http.post("/reset_prefix_cache"), 409)["code"] == "cache_in_use"
    server.engine.alive = False
    error_of(server.http.post("/reset_prefix_cache"), 503)


def test_engine_figures_are_counters_or_gauges_by_name(server):
    server.engine.figures = {"pages_free": 7, "prefix_cache_cached_tokens_total": 128, "usage": 0.5}
    families = scrape(server)
    assert families["atom:pages_free"].type == "gauge"
    assert value(families, "atom:pages_free") == 7
    assert value(families, "atom:usage") == 0.5
    name = "atom:prefix_cache_cached_tokens"
    assert families[name].type == "counter"
    assert value(families, name, name + "_total") == 128
    assert value(families, "atom:engine_up") == 1


def test_metrics_survive_the_engine(server):
    server.engine.figures = {"pages_free": 7}
    server.engine.alive = False
    families = scrape(server)
    assert value(families, "atom:engine_up") == 0
    assert "atom:pages_free" not in families
    assert "atom:time_to_first_token_seconds" in families


def test_requests_are_timed_and_counted_by_outcome(tokenizer):
    finished, total = "atom:http_choices_finished", "atom:http_choices_finished_total"
    first, whole = "atom:time_to_first_token_seconds", "atom:e2e_request_latency_seconds"
    with Server(ScriptedEngine(tokenizer)) as server:
        families = scrape(server)
        assert value(families, first, first + "_count") == 0
        server.post("/v1/completions", prompt=["a", "b"], n=2)
        server.post("/v1/completions", prompt="a", stream=True, max_tokens=2)
        server.post("/v1/completions", prompt="")
        server.engine.break_after = 1
        server.post("/v1/completions", prompt="a", n=3)
        server.engine.break_after = None
        server.engine.hold_after = 3
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            next(response.iter_raw())
        wait_until(lambda: server.engine.running == 0)
        families = scrape(server)
    assert value(families, finished, total, finished_reason="stop") == 4
    assert value(families, finished, total, finished_reason="length") == 1
    assert value(families, finished, total, finished_reason="error") == 3
    assert value(families, finished, total, finished_reason="abort") == 1
    assert value(families, first, first + "_count") == 4
    assert value(families, whole, whole + "_count") == 2
