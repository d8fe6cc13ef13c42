import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.llm import LLM
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.messages import EngineOutput
from atom.model_engine.output_processor import OutputKind, OutputProcessor
from atom.model_engine.request_input import prepare_request
from atom.outputs import Logprob
from atom.sampling_params import SamplingParams
from atom.tokenizer import Tokenizer
from tests.fake_core import FAKE_CORE, REFUSED_TOKEN, FakeConfig
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

IM_END = 258
MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


@pytest.fixture
def make_engine(folder):
    return lambda **settings: LLMEngine(FakeConfig(folder, **settings), FAKE_CORE)


@pytest.fixture
def prepare(tokenizer):
    def prepare(prompt, request_id="r", **params):
        return prepare_request(
            request_id,
            prompt,
            SamplingParams(**params),
            tokenizer=tokenizer,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
        )

    return prepare


def run(engine):
    """Every output until the engine is idle, by request id."""
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


# Preparing a request


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, -1], "token id -1 .* from 0 to 319"),
        ([1, VOCAB_SIZE], "token id 320 "),
        ([2**70], "token id"),
        (["a"], "token ids"),
        (7, "token ids"),
        ([1] * MAX_MODEL_LEN, "64 tokens; at most 63 "),
        ("a\ud800", r"\\ud800 at character 1"),
        ({"text": "a"}, "no .'text'"),
        ({"prompt": None}, "must have"),
        ({"prompt": 5}, "text, not int"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt must be text"),
        ({"prompt": "a", "cache_salt": "\udfff"}, "cache_salt has a lone surrogate"),
    ],
)
def test_prompts_that_cannot_be_used(prepare, prompt, message):
    with pytest.raises(ValueError, match=message):
        prepare(prompt)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids=320"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias=-1"),
        ({"stop": ["\ud800"]}, r"stop has a lone surrogate \\ud800"),
        ({"seed": 2**70}, "sampling parameters"),
        ({"max_tokens": 5.5}, "sampling parameters.*max_tokens"),
        ({"stop": [5]}, "sampling parameters.*stop"),
    ],
)
def test_parameters_that_cannot_be_used(prepare, params, message):
    with pytest.raises(ValueError, match=message):
        prepare("abc", **params)


def test_the_forms_of_a_prompt(prepare, tokenizer):
    ids = tokenizer.encode("abc")
    for prompt in ("abc", ids, tuple(ids), {"prompt": "abc"}, {"prompt_token_ids": ids}):
        assert prepare(prompt).prompt_token_ids == ids
    both = prepare({"prompt": "shown", "prompt_token_ids": ids, "cache_salt": "tenant"})
    assert (both.prompt, both.prompt_token_ids, both.cache_salt) == ("shown", ids, "tenant")


def test_max_tokens_is_cut_to_the_context(prepare):
    assert prepare([1] * 60).params.max_tokens == 4
    assert prepare([1] * 60, max_tokens=3).params.max_tokens == 3
    assert prepare([1] * 63, max_tokens=None).params.max_tokens == 1
    assert prepare([1] * 60, max_tokens=None, min_tokens=50).params.min_tokens == 4


def test_continuations_differ_by_id_and_seed(prepare):
    children = prepare([1], n=3, seed=2**63 - 2, stop=["x"]).children()
    assert [child.request_id for child in children] == ["r#0", "r#1", "r#2"]
    assert [child.params.seed for child in children] == [2**63 - 2, 2**63 - 1, 0]
    assert all(child.params.n == 1 and child.eos_token_ids == [IM_END] for child in children)
    assert [child.params.seed for child in prepare([1], n=2).children()] == [None, None]
    assert [child.request_id for child in prepare([1]).children()] == ["r"]


# Processing outputs


def as_steps(token_ids, sizes, finish_reason="length"):
    """A request's outputs, with its tokens cut into steps."""
    sizes, at, steps = iter(sizes), 0, []
    while at < len(token_ids):
        size = next(sizes, 1)
        steps.append(EngineOutput("r", token_ids[at : at + size]))
        at += size
    steps[-1].finish_reason = finish_reason
    return steps


def process(tokenizer, prepared, steps, kind):
    """The outputs taken after each step, and the ids to abort."""
    processor = OutputProcessor(tokenizer)
    processor.add(prepared, kind)
    taken, aborted = [], []
    for step in steps:
        processed = processor.process([step])
        aborted += processed.abort_ids
        taken += [state.take() for state in processed.states.values()]
    return taken, aborted


texts = st.text("ab<é😀", min_size=1, max_size=30)
stops = st.lists(st.text("ab<é😀", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300)
@given(
    text=texts,
    stop=stops,
    sizes=st.lists(st.integers(1, 4), max_size=30),
    include=st.booleans(),
    min_tokens=st.integers(0, 16),
)
def test_streamed_text_equals_unstreamed_and_respects_stop_strings(tokenizer, text, stop, sizes, include, min_tokens):
    ids = tokenizer.encode(text)
    prepared = prepare_request(
        "r",
        "p",
        SamplingParams(
            stop=stop, include_stop_str_in_output=include, max_tokens=len(ids) + 20, min_tokens=min_tokens
        ),
        tokenizer=tokenizer,
        vocab_size=VOCAB_SIZE,
        max_model_len=4096,
    )
    deltas, aborted = process(tokenizer, prepared, as_steps(ids, sizes), OutputKind.DELTA)
    whole, _ = process(tokenizer, prepared, as_steps(ids, sizes), OutputKind.CUMULATIVE)
    one_by_one, _ = process(tokenizer, prepared, as_steps(ids, []), OutputKind.CUMULATIVE)
    streamed = "".join(delta.outputs[0].text for delta in deltas)
    final = whole[-1].outputs[0]
    assert streamed == final.text == one_by_one[-1].outputs[0].text
    assert list(itertools.chain(*(delta.outputs[0].token_ids for delta in deltas))) == final.token_ids
    assert final.token_ids == one_by_one[-1].outputs[0].token_ids
    assert [delta.outputs[0].finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finished

    unsearched = len(tokenizer.decode(ids[:min_tokens]).rstrip("\ufffd"))
    found = [(at + len(s), -len(s), s) for s in stop if (at := text.find(s, unsearched)) >= 0]
    if found:
        end, _, matched = min(found)
        assert (final.finish_reason, final.stop_reason) == ("stop", matched)
        assert final.text == text[: end if include else end - len(matched)]
        assert len(final.token_ids) > min_tokens
        # The engine is told to stop, unless it had stopped at that step anyway.
        assert aborted == ([] if len(deltas) == len(as_steps(ids, sizes)) else ["r"])
    else:
        assert (final.finish_reason, final.stop_reason) == ("length", None)
        assert final.text == text
        assert aborted == []


def test_what_comes_after_a_stop_string_is_dropped(tokenizer, prepare):
    processor = OutputProcessor(tokenizer)
    state = processor.add(prepare("p", stop=["lo w"], logprobs=0), OutputKind.DELTA)
    processed = processor.process([EngineOutput("r", tokenizer.encode("hello world"))])
    assert processed.abort_ids == ["r"]
    output = state.take().outputs[0]
    assert (output.text, output.token_ids, output.stop_reason) == ("hel", tokenizer.encode("hello w"), "lo w")
    assert processor.process([EngineOutput("r", tokenizer.encode("more"))]).states == {}
    assert processor.num_generated_tokens == len("hello w")
    assert len(processor) == 0


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_the_text_of_a_stop_token_is_shown_on_request(tokenizer, prepare, include, text):
    ids = tokenizer.encode("abc")
    prepared = prepare("p", stop_token_ids=[ids[2]], include_stop_str_in_output=include)
    steps = [EngineOutput("r", ids[:1]), EngineOutput("r", ids[1:], finish_reason="stop", stop_reason=ids[2])]
    taken, aborted = process(tokenizer, prepared, steps, OutputKind.CUMULATIVE)
    output = taken[-1].outputs[0]
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == (text, ids, "stop", ids[2])
    assert aborted == []


def test_an_end_inside_a_stop_string_shows_what_was_held(tokenizer, prepare):
    ids = [*tokenizer.encode("ab<en"), IM_END]
    taken, _ = process(tokenizer, prepare("p", stop=["<end>"]), as_steps(ids, [], "stop"), OutputKind.DELTA)
    assert [delta.outputs[0].text for delta in taken] == ["a", "b", "", "", "", "<en"]
    assert (taken[-1].outputs[0].finish_reason, taken[-1].outputs[0].stop_reason) == ("stop", None)


def test_an_error_of_the_engine_is_the_stop_reason(tokenizer, prepare):
    step = EngineOutput("r", [], finish_reason="error", error="no memory")
    taken, _ = process(tokenizer, prepare("p"), [step], OutputKind.DELTA)
    assert (taken[0].outputs[0].finish_reason, taken[0].outputs[0].stop_reason) == ("error", "no memory")


def test_deltas_of_several_continuations_report_each_end_once(tokenizer, prepare):
    a, b = tokenizer.encode("ab")
    processor = OutputProcessor(tokenizer)
    state = processor.add(prepare("p", n=2), OutputKind.DELTA)
    processor.process([EngineOutput("r#0", [a], num_cached_tokens=5), EngineOutput("r#1", [b], num_cached_tokens=9)])
    processor.process([EngineOutput("r#0", [a]), EngineOutput("r#1", [a], finish_reason="length")])
    first = state.take()
    assert [(o.index, o.text, o.finish_reason) for o in first.outputs] == [(0, "aa", None), (1, "ba", "length")]
    assert not first.finished
    processor.process([EngineOutput("r#0", [b], num_cached_tokens=5, finish_reason="length")])
    second = state.take()
    assert [(o.index, o.text, o.finish_reason) for o in second.outputs] == [(0, "b", "length")]
    assert second.finished and second.num_cached_tokens == 5


# The offline engine


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
    assert last.num_cached_tokens == 7 if last.outputs[0] is None else last.num_cached_tokens == 0
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


# LLM


def test_results_are_in_the_order_of_the_prompts(make_engine):
    with LLM.from_engine(make_engine()) as llm:
        params = [SamplingParams(max_tokens=count) for count in (5, 1, 3)]
        outputs = llm.generate(["ab", {"prompt_token_ids": [1]}, {"prompt": "cd"}], params, use_tqdm=False)
        assert [output.prompt for output in outputs] == ["ab", None, "cd"]
        assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 1, 3]
        assert outputs[0].outputs[0].text == "ababa"
        assert llm.generate([], use_tqdm=False) == []
        assert len(llm.generate([1, 2], use_tqdm=False)) == len(llm.generate("a", use_tqdm=False)) == 1
        core = llm.engine._core
    llm.shutdown()
    assert core.num_shutdowns == 1


def test_progress_is_shown_with_tokens_a_second(make_engine, capsys):
    LLM.from_engine(make_engine()).generate(["ab", "c"])
    shown = capsys.readouterr().err
    assert "2/2" in shown and "tokens/s" in shown


@pytest.mark.parametrize("bad", ["", [VOCAB_SIZE], [REFUSED_TOKEN], {"prompt_token_ids": [1] * 4096}])
def test_one_bad_prompt_stops_all_before_anything_runs(make_engine, bad):
    llm = LLM.from_engine(make_engine())
    with pytest.raises(ValueError):
        llm.generate(["good", bad, "good too"], use_tqdm=False)
    assert llm.engine._core.num_steps == 0 and not llm.engine._core.requests
    assert llm.generate("good", SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].text == "good"


def test_a_wrong_number_of_parameters(make_engine):
    with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
        LLM.from_engine(make_engine()).generate(["a"], [SamplingParams()] * 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_aborts_what_runs(make_engine, error, monkeypatch):
    engine = make_engine()
    llm = LLM.from_engine(engine)
    steps = [engine._core.step, engine._core.step]

    def step():
        if not steps:
            raise error
        return steps.pop()()

    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "step", step)
        with pytest.raises(error):
            llm.generate(["ab", "cd"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=9)], use_tqdm=False)
    assert engine._core.aborted == ["1"] and not engine._core.requests
    assert not engine.has_unfinished_requests()
    assert llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].text == "ab"


def test_chat_uses_the_template(make_engine):
    llm = LLM.from_engine(make_engine())
    conversation = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    single = llm.chat(conversation, params, use_tqdm=False)
    several = llm.chat([conversation, conversation], params, use_tqdm=False, add_generation_prompt=False)
    assert single[0].prompt_token_ids == llm.engine.tokenizer.apply_chat_template(conversation)
    assert len(several) == 2
    assert several[0].prompt_token_ids == llm.engine.tokenizer.apply_chat_template(conversation, False)


def test_cache_calls_reach_the_core(make_engine):
    llm = LLM.from_engine(make_engine())
    llm.generate(["a", "b"], use_tqdm=False)
    assert llm.get_cache_stats() == {"requests": 2, "hit_rate": 0.5}
    assert llm.reset_prefix_cache() is True
