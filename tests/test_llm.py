import os
import signal

import pytest

from atom.llm import LLM
from atom.model_engine.llm_engine import LLMEngine
from atom.sampling_params import SamplingParams
from tests.fake_core import FAKE_CORE, REFUSED_TOKEN, FakeConfig
from tests.tiny_tokenizer import VOCAB_SIZE, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def make_engine(folder):
    return lambda **settings: LLMEngine(FakeConfig(folder, **settings), FAKE_CORE)


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
    with pytest.raises(RuntimeError, match="was shut down"):
        llm.generate("a", use_tqdm=False)


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


def test_an_interrupt_lets_the_step_end(make_engine, monkeypatch):
    engine = make_engine()
    step, ended = engine._core.step, []

    def interrupted_step():
        os.kill(os.getpid(), signal.SIGINT)
        outputs = step()
        ended.append(outputs)
        return outputs

    monkeypatch.setattr(engine._core, "step", interrupted_step)
    usual = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        LLM.from_engine(engine).generate("abc", use_tqdm=False)
    assert len(ended) == 1 and len(ended[0]) == 1
    assert signal.getsignal(signal.SIGINT) is usual
    assert not engine.has_unfinished_requests()


def test_a_second_interrupt_acts_inside_the_step(make_engine, monkeypatch):
    engine = make_engine()

    def stuck_step():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the step went on")

    monkeypatch.setattr(engine._core, "step", stuck_step)
    with pytest.raises(KeyboardInterrupt):
        LLM.from_engine(engine).generate("abc", use_tqdm=False)
    assert engine._core.aborted == ["0"]


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
