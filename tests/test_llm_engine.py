import pytest

from atom.model_engine.llm_engine import LLMEngine
from atom.outputs import Logprob
from atom.sampling_params import SamplingParams
from tests.fake_core import FAKE_CORE, REFUSED_TOKEN, FakeConfig
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def make_engine(folder):
    return lambda **settings: LLMEngine(FakeConfig(folder, **settings), FAKE_CORE)


def run(engine):
    """Every output until the engine is idle, by request id."""
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_outputs_grow_until_the_end(make_engine):
    engine = make_engine()
    engine.add_request("a", "xyz", SamplingParams(max_tokens=4))
    outputs = run(engine)["a"]
    assert [output.outputs[0].text for output in outputs] == ["x", "xy", "xyz", "xyzx"]
    last = outputs[-1]
    assert (last.prompt, last.num_cached_tokens, last.outputs[0].finish_reason) == ("xyz", 7, "length")
    assert last.metrics.arrival_time <= last.metrics.first_token_at <= last.metrics.finished_at
    assert 0 <= last.metrics.time_to_first_token <= last.metrics.time_to_finish
    assert outputs[0] is not last and outputs[0].outputs[0].token_ids != last.outputs[0].token_ids


def test_logprobs_of_sampled_and_likely_tokens(make_engine):
    engine = make_engine()
    ids = engine.tokenizer.encode("xy")
    engine.add_request("a", ids, SamplingParams(max_tokens=2, logprobs=2))
    output = run(engine)["a"][-1].outputs[0]
    other = Logprob(-0.1, 1, engine.tokenizer.token_text(0))
    assert output.logprobs == [{ids[0]: Logprob(-0.5, 2, "x"), 0: other}, {ids[1]: Logprob(-0.5, 2, "y"), 0: other}]
    assert next(iter(output.logprobs[0])) == ids[0]
    assert output.cumulative_logprob == -1.0


def test_n_continuations_come_back_as_one(make_engine):
    engine = make_engine()
    engine.add_request("a", "xy", SamplingParams(n=3, max_tokens=2))
    last = run(engine)["a"][-1]
    assert [(output.index, output.text) for output in last.outputs] == [(0, "xy"), (1, "xy"), (2, "xy")]
    assert last.num_cached_tokens == 7  # the first continuation's; the fake gives each one more
    assert engine._core.num_added == 3


def test_a_stop_string_ends_the_request_in_the_core(make_engine):
    engine = make_engine(tokens_per_step=2)
    engine.add_request("a", "hello world", SamplingParams(max_tokens=50, stop="o w"))
    last = run(engine)["a"][-1]
    assert (last.outputs[0].text, last.outputs[0].finish_reason) == ("hell", "stop")
    assert engine._core.aborted == ["a"] and not engine._core.requests


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(make_engine):
    engine = make_engine()
    engine.add_request("a", "xy", SamplingParams(max_tokens=2, n=2))
    for taken in ("a", "a#1"):
        with pytest.raises(ValueError, match="in use"):
            engine.add_request(taken, "z")
    assert run(engine)["a"][-1].outputs[1].text == "xy"


def test_a_request_that_the_core_refuses_leaves_nothing(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match="cannot be taken"):
        engine.add_request("a", [1, REFUSED_TOKEN], SamplingParams(n=2))
    assert not engine.has_unfinished_requests() and not engine._core.requests


def test_an_aborted_request_has_no_output(make_engine):
    engine = make_engine()
    engine.add_request("a", "xy")
    engine.add_request("b", "xy", SamplingParams(max_tokens=1))
    engine.abort("a")
    engine.abort("unknown")
    assert set(run(engine)) == {"b"}
    assert engine._core.aborted == ["a"]
