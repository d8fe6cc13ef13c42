import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_engine.messages import EngineOutput
from atom.model_engine.output_processor import OutputKind, OutputProcessor
from atom.model_engine.request_input import prepare_request
from atom.sampling_params import SamplingParams
from atom.tokenizer import Tokenizer
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

IM_END = 258
MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


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
        SamplingParams(stop=stop, include_stop_str_in_output=include, max_tokens=len(ids) + 20, min_tokens=min_tokens),
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
